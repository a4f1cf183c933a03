"""The place and the words of a value that SGLang's models refuse: a path of the body, and every type that would do."""

import json
from typing import Any

import pytest
from pydantic import ValidationError
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, ResponsesRequest

from engine_ext.plugin.worker.answers import refused

MANY = "Too many values of the body have the wrong type to name them."
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("model", "body", "param", "message"),
    [
        (ChatCompletionRequest, {"model": "m"}, "messages", "messages: is missing"),
        (ChatCompletionRequest, CHAT | {"stop": 5}, "stop", "stop: Input should be a valid list, or a valid string"),
        (ChatCompletionRequest, CHAT | {"stop": [5]}, "stop.0", "stop.0: Input should be a valid string"),
        (ChatCompletionRequest, CHAT | {"tools": [{}]}, "tools.0.function", "tools.0.function: is missing"),
        (CompletionRequest, {"prompt": {}}, "prompt", "prompt: Input should be a valid list, or a valid string"),
        (CompletionRequest, {"prompt": [1] * 5000 + ["a"]}, None, MANY),
        (ResponsesRequest, {"input": 5}, "input", "input: Input should be a valid list, or a valid string"),
    ],
)
def test_a_refusal_names_a_place_of_the_body(model: Any, body: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(ValidationError) as found:
        model.model_validate(body)
    error = json.loads(refused(found.value, body).body)["error"]
    assert (error["param"], error["message"]) == (param, message)
