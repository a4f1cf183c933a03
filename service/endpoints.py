"""The endpoints that a batch can run, and what a body must have for each."""

REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "/v1/chat/completions": ("model", "messages"),
    "/v1/completions": ("model", "prompt"),
}
ENDPOINTS = tuple(REQUIRED_FIELDS)
