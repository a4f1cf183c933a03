"""The endpoints that a batch can run, and what a body must have for each."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`required` fields of a body; `id_prefix`: of the answer's id; `generates`: tokens one by one, or all at once."""

    required: tuple[str, ...]
    id_prefix: str
    generates: bool = True


BY_PATH = {
    "/v1/chat/completions": Endpoint(("model", "messages"), "chatcmpl-"),
    "/v1/completions": Endpoint(("model", "prompt"), "cmpl-"),
    "/v1/responses": Endpoint(("model", "input"), "resp_"),
    "/v1/embeddings": Endpoint(("model", "input"), "embd-", generates=False),
    "/v1/score": Endpoint(("model", "query", "items"), "score-", generates=False),
    "/v1/rerank": Endpoint(("model", "query", "documents"), "rerank-", generates=False),
}
ENDPOINTS = tuple(BY_PATH)
