"""What requests can call: endpoints, with the fields that each one requires in a body, and models by their names."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

ADAPTER = ":"  # between a model's name and an adapter's
DELTA = b"event: response.output_text.delta\n"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Describes an endpoint: a body's `required` fields and the `id_prefix` of answers.

    `generates` is true if the engine generates tokens one by one, false if it answers all at once; `limit` is the field
    that says how many. `online` is true if clients may also call it outside of batches, and `streams` if they may ask
    for the tokens as they come. Each token of a stream has one `token_mark`; `typed` is true if the stream's events
    name their types. `adapters` is true if SGLang 0.5.17 applies a LoRA adapter that the model's name asks for; where
    it does not, it answers without a word.
    """

    required: tuple[str, ...]
    id_prefix: str
    generates: bool = True
    online: bool = False
    streams: bool = False
    token_mark: bytes = b"\n\n"
    typed: bool = False
    limit: str | None = None
    adapters: bool = False

    def error_event(self, body: dict[str, Any]) -> bytes:
        """Return the server-sent event that ends a stream with this error, which is in OpenAI's envelope."""
        if not self.typed:
            return b"data: " + msgspec.json.encode(body) + b"\n\n"
        said = {name: body["error"][name] for name in ("code", "message", "param")}
        return b"event: error\ndata: " + msgspec.json.encode({**body, "type": "error", **said}) + b"\n\n"


BY_PATH = {
    "/v1/chat/completions": Endpoint(
        ("model", "messages"), "chatcmpl-", online=True, streams=True, limit="max_completion_tokens", adapters=True
    ),
    "/v1/completions": Endpoint(
        ("model", "prompt"), "cmpl-", online=True, streams=True, limit="max_tokens", adapters=True
    ),
    "/v1/responses": Endpoint(
        *(("model", "input"), "resp_"),
        online=True,
        streams=True,
        token_mark=DELTA,
        typed=True,
        limit="max_output_tokens",
    ),
    "/v1/embeddings": Endpoint(("model", "input"), "embd-", generates=False, online=True, adapters=True),
    "/v1/score": Endpoint(("model", "query", "items"), "score-", generates=False),
    "/v1/rerank": Endpoint(("model", "query", "documents"), "rerank-", generates=False),
}
ENDPOINTS = tuple(BY_PATH)
ONLINE = tuple(path for path, endpoint in BY_PATH.items() if endpoint.online)


class ModelName(NamedTuple):
    """The model that a request names: `base`, whose workers run it, and its LoRA `adapter`, if it names one."""

    base: str
    adapter: str | None = None

    @classmethod
    def of(cls, name: str) -> "ModelName":
        base, _, adapter = name.partition(ADAPTER)
        return cls(base, adapter or None)

    def __str__(self) -> str:
        return self.base if self.adapter is None else f"{self.base}{ADAPTER}{self.adapter}"
