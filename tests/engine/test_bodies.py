"""Bodies that OpenAI's API takes and SGLang reads otherwise, or not at all."""

import json
from typing import Any

import pytest

pytest.importorskip("sglang")

from benchmarks.engine_process import EngineProcess
from engine_ext.plugin.worker.bodies import plain, unserved
from tests.engine.test_sglang import ask

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HELLO = [{"role": "user", "content": "Hello"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "strict": None, "parameters": {"type": "object", "properties": {}}},
}
NULLS = {
    CHAT: "frequency_penalty logit_bias logprobs max_completion_tokens n parallel_tool_calls presence_penalty seed "
    "stop stream temperature tool_choice tools top_logprobs top_p user response_format min_tokens ignore_eos",
    COMPLETIONS: "echo frequency_penalty logit_bias logprobs n presence_penalty seed stop stream suffix temperature",
    RESPONSES: "instructions metadata parallel_tool_calls reasoning service_tier text tool_choice tools truncation",
}
REFUSAL = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]}
IMAGE = {"output": [{"type": "input_image", "image_url": "http://10.0.0.1"}]}
CALL = {"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": ""}}
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"], "additionalProperties": False}


def history(arguments: Any) -> list[dict[str, Any]]:
    call = {**CALL, "function": {"name": "get_time", "arguments": arguments}}
    answered = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
    return [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, answered]


@pytest.mark.parametrize(
    ("endpoint", "body"),
    [
        (CHAT, {"messages": HELLO, **dict.fromkeys(NULLS[CHAT].split())}),
        (CHAT, {"messages": HELLO, "tools": [TOOL]}),
        (CHAT, {"messages": HELLO, "stop": ""}),
        (CHAT, {"messages": HELLO, "stop": ["END", ""]}),
        (CHAT, {"messages": HELLO, "top_p": 0}),
        (CHAT, {"messages": history("")}),
        (CHAT, {"messages": history('{"city": "Os')}),
        (CHAT, {"messages": history("[1, 2]")}),
        (CHAT, {"messages": history('{"a": NaN}')}),
        (CHAT, {"messages": history({"city": "Oslo"})}),
        (
            CHAT,
            {"messages": [*HELLO, REFUSAL, *HELLO]},
        ),
        (COMPLETIONS, {"prompt": "Hello", **dict.fromkeys(NULLS[COMPLETIONS].split())}),
        (RESPONSES, {"input": "Hello", **dict.fromkeys(NULLS[RESPONSES].split())}),
    ],
)
def test_what_openai_takes_is_answered(engine: EngineProcess[Any], endpoint: str, body: dict[str, Any]) -> None:
    most = {"max_output_tokens" if endpoint == RESPONSES else "max_tokens": 6}
    found = engine.do(ask, endpoint, {**most, **body})
    assert found["status_code"] == 200, found
    usage = found["usage"]
    assert usage.get("completion_tokens") or usage.get("output_tokens"), found


def test_the_output_of_a_response_is_input_for_the_next(engine: EngineProcess[Any]) -> None:
    first = engine.do(ask, RESPONSES, {"input": "Hello", "max_output_tokens": 6})
    asked = {"role": "user", "content": "More"}
    parts = [{"type": "input_text", "text": "First"}, {"type": "input_text", "text": "Second"}]
    call = {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"}
    done = {"type": "function_call_output", "call_id": "call_1", "output": parts}
    for items in ([*first["output"], asked], [asked, call, done]):
        found = engine.do(ask, RESPONSES, {"input": items, "max_output_tokens": 6})
        assert found["status_code"] == 200, found
    assert first["usage"]["input_tokens_details"]["cache_write_tokens"] == 0  # newer clients ask for it


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, lambda found: found == {"a": "x"}),
        ({"type": "json_object"}, lambda found: isinstance(found, dict)),
    ],
)
def test_the_format_of_a_response_holds(engine: EngineProcess[Any], wanted: dict[str, Any], fits: Any) -> None:
    body = {"input": "Answer.", "max_output_tokens": 200, "text": {"format": wanted}}
    found = engine.do(ask, RESPONSES, body)
    assert found["status_code"] == 200, found
    assert found["text"]["format"] == wanted
    if found["status"] == "completed":
        assert fits(json.loads(found["output"][0]["content"][0]["text"]))
    else:
        assert found["output"][0]["content"][0]["text"].lstrip().startswith("{")


@pytest.mark.parametrize(
    ("endpoint", "body", "param"),
    [
        (RESPONSES, {"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        (RESPONSES, {"input": "x", "tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0.type"),
        (RESPONSES, {"input": "x", "conversation": "conv_1"}, "conversation"),
        (RESPONSES, {"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
        (RESPONSES, {"input": "x", "background": True}, "background"),
        (
            RESPONSES,
            {"input": [IMAGE]},
            "input.0.output",
        ),
        (CHAT, {"messages": HELLO, "functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"messages": HELLO, "web_search_options": {}}, "web_search_options"),
        (CHAT, {"messages": HELLO, "modalities": ["text", "audio"]}, "modalities"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"messages": HELLO, "max_tokens": 3, "min_tokens": 99}, "min_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (COMPLETIONS, {"prompt": ""}, "prompt"),
        (RESPONSES, {"input": []}, "input"),
        (RESPONSES, {"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input"),
    ],
)
def test_what_would_be_left_out_is_refused(
    engine: EngineProcess[Any], endpoint: str, body: dict[str, Any], param: str
) -> None:
    found = engine.do(ask, endpoint, body)
    assert (found["status_code"], found["error"]["param"]) == (400, param), found


def test_a_schema_that_cannot_be_compiled_is_refused_without_a_place_in_the_engine(engine: EngineProcess[Any]) -> None:
    schema = {"type": "string", "minLength": 5, "maxLength": 2}
    body = {
        "messages": HELLO,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    found = engine.do(ask, CHAT, body)
    message = "response_format has a schema that cannot be compiled: minLength 5 is greater than maxLength 2"
    assert (found["status_code"], found["error"]["param"]) == (400, "response_format")
    assert found["error"]["message"] == message


def test_a_body_is_not_changed_itself() -> None:
    body = {"stop": ["", "x"], "tools": [TOOL], "messages": history(""), "top_p": 0}
    before = json.dumps(body)
    found = plain(CHAT, body)
    assert json.dumps(body) == before
    assert (found["stop"], found["top_p"], found["temperature"]) == (["x"], 1.0, 0.0)
    assert "strict" not in found["tools"][0]["function"]
    assert found["messages"][1]["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize("body", [{"tools": 5}, {"tools": [None]}, {"messages": [5]}, {"input": [5]}, {"stop": [5]}])
def test_odd_types_are_left_to_sglang(body: dict[str, Any]) -> None:
    for endpoint in (CHAT, RESPONSES):
        assert plain(endpoint, body) == body
        assert unserved(endpoint, body) is None
