"""What service/requests/parameters.py knows is what SGLang's server reads."""

import pytest

from service.requests.parameters import KNOWN

protocol = pytest.importorskip("sglang.srt.entrypoints.openai.protocol")
TYPES = {
    "/v1/chat/completions": "ChatCompletionRequest",
    "/v1/completions": "CompletionRequest",
    "/v1/responses": "ResponsesRequest",
    "/v1/embeddings": "EmbeddingRequest",
    "/v1/score": "ScoringRequest",
    "/v1/rerank": "V1RerankReqInput",
}
# What this service reads itself, or refuses; SGLang turns `reasoning` into reasoning_effort.
BESIDES = {
    "/v1/chat/completions": {"reasoning", "audio", "functions", "modalities", "web_search_options"},
    "/v1/responses": {"text", "conversation", "prompt"},
    "/v1/rerank": {"model"},
}


@pytest.mark.parametrize("path", KNOWN)
def test_the_names_are_those_of_sglang(path: str) -> None:
    fields = getattr(protocol, TYPES[path]).model_fields
    assert {each.alias or name for name, each in fields.items()} | BESIDES.get(path, set()) == KNOWN[path]
