"""The endpoints that requests can call, with the fields that each one requires in a body."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Describes an endpoint: a body's `required` fields and the `id_prefix` of answers.

    `generates` is true if the engine generates tokens one by one, false if it answers all at once. `online` is true if
    clients may also call it outside of batches, and `streams` if they may ask for the tokens as they come.
    """

    required: tuple[str, ...]
    id_prefix: str
    generates: bool = True
    online: bool = False
    streams: bool = False


BY_PATH = {
    "/v1/chat/completions": Endpoint(("model", "messages"), "chatcmpl-", online=True, streams=True),
    "/v1/completions": Endpoint(("model", "prompt"), "cmpl-", online=True, streams=True),
    "/v1/responses": Endpoint(("model", "input"), "resp_", online=True, streams=True),
    "/v1/embeddings": Endpoint(("model", "input"), "embd-", generates=False, online=True),
    "/v1/score": Endpoint(("model", "query", "items"), "score-", generates=False),
    "/v1/rerank": Endpoint(("model", "query", "documents"), "rerank-", generates=False),
}
ENDPOINTS = tuple(BY_PATH)
ONLINE = tuple(path for path, endpoint in BY_PATH.items() if endpoint.online)
