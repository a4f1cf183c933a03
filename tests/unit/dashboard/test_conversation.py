"""How a request and its answer are shown to people."""

import json
from typing import Any

import pytest

from service.dashboard.conversation import (
    MOST_CHARACTERS,
    MOST_TURNS,
    Turn,
    answered,
    asked,
    beginning,
    conversation_of,
    verdict,
)
from service.objects.shards import Outcome

PIXEL = "data:image/png;base64,iVBORw0KGgo="
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "required": ["n"]}}}


def says(*turns: Turn) -> list[tuple[str, str]]:
    return [(turn.role, turn.text) for turn in turns]


def test_a_chat_is_a_row_of_turns() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 7}'}}
    messages = [
        {"role": "system", "content": "Be brief.\nVery."},
        {"role": "user", "content": [{"type": "text", "text": "What is it?"}, image(PIXEL), image("http://a/b.png")]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "[1]"},
    ]
    found = asked({"messages": messages})
    assert says(*found) == [
        ("system", "Be brief.\nVery."),
        ("user", "What is it?\n[image: http://a/b.png]"),
        ("calls look", '{"at": 7}'),
        ("tool", "[1]"),
    ]
    assert [turn.images for turn in found] == [(), (PIXEL,), (), ()]
    shown = shown_of({"messages": messages})
    assert [turn.text for turn in shown[2:]] == ['{\n  "at": 7\n}', "[\n  1\n]"]
    assert [turn.is_json for turn in shown] == [False, False, True, True]
    assert beginning(found[:2], 8) == "What is "


def shown_of(body: dict[str, Any]) -> list[Turn]:
    return conversation_of({"body": body}, None, True, None).turns


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize(
    ("body", "turns"),
    [
        ({"prompt": ["one", "two"]}, [("prompt", "one"), ("prompt", "two")]),
        ({"instructions": "be", "input": "say"}, [("system", "be"), ("user", "say")]),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}]},
            [("user", "hi")],
        ),
        (
            {"query": "q", "documents": ["a", {"text": "b"}]},
            [("query", "q"), ("document 1", "a"), ("document 2", '{\n  "text": "b"\n}')],
        ),
        ({"messages": "odd", "prompt": 7, "input": [[1, 2]], "instructions": []}, []),
        ({"messages": [7, None, {"role": [], "content": {}}, {"tool_calls": [1]}]}, [("calls None", "")]),
    ],
)
def test_requests_of_other_endpoints_and_odd_ones(body: dict[str, Any], turns: list[tuple[str, str]]) -> None:
    assert says(*asked(body)) == turns


@pytest.mark.parametrize(
    ("body", "turns"),
    [
        (
            {"choices": [{"message": {"role": "assistant", "content": "A", "reasoning_content": "hm"}}]},
            [("reasoning", "hm"), ("answer", "A")],
        ),
        ({"choices": [{"text": "a"}, {"text": "b"}]}, [("answer 1", "a"), ("answer 2", "b")]),
        (
            {"output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "A"}]}]},
            [("answer", "A")],
        ),
        ({"data": [{"embedding": [0.1, 0.2]}]}, [("answer", "1 vectors of 2 numbers")]),
        ({"error": {"message": "no"}}, [("error", "no")]),
        ({"choices": {"a": 1}, "output": 3, "data": [7], "error": "odd"}, [("answer", "1 vectors of 0 numbers")]),
    ],
)
def test_answers_of_all_endpoints_and_odd_ones(body: dict[str, Any], turns: list[tuple[str, str]]) -> None:
    assert says(*answered(body)) == turns


def test_what_is_long_is_bounded() -> None:
    found = shown_of({"messages": [{"role": "user", "content": "x" * (MOST_CHARACTERS + 5)}] * (MOST_TURNS + 5)})
    assert len(found) == MOST_TURNS + 1
    assert found[0].text.endswith("x\n… 5 more characters")
    assert found[-1].text == f"Only the first {MOST_TURNS} turns are shown."
    deep = "[" * 100_000
    assert shown_of({"prompt": deep})[0].text.startswith("[[")
    wide = "[" * 900 + "1," * 40_000 + "1" + "]" * 900  # 38 MB with its indentation
    talk = conversation_of({"body": {"prompt": wide}}, None, True, None)
    assert [len(turn.text) <= 2 * MOST_CHARACTERS for turn in talk.turns] == [True]
    assert [len(text) <= 2 * MOST_CHARACTERS for _, text in talk.raw] == [True]


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', "[1e999]", "[NaN]", "[1.10]"])
def test_json_that_would_change_is_shown_as_it_is(text: str) -> None:
    [turn] = shown_of({"prompt": text})
    assert (turn.text, turn.is_json) == (text, False)


def test_what_is_copied_is_the_whole_answer() -> None:
    text = '{"a": 1,   "b": "' + "x" * MOST_CHARACTERS + '"}'
    line = {"response": {"status_code": 200, "body": {"choices": [{"message": {"content": text}}]}}}
    assert conversation_of(None, line, True, None).said == text


@pytest.mark.parametrize(
    ("request_body", "text", "reason", "word"),
    [
        ({}, "fine", "stop", "answered"),
        ({}, "cu", "length", "cut off at 12 tokens"),
        ({}, "and " * 100, "length", "looped until cut off at 12 tokens"),
        ({"response_format": SCHEMA}, '{"n": 1}', "stop", "valid by its schema"),
        ({"response_format": SCHEMA}, "{}", "stop", "not the JSON that was asked for"),
        ({"response_format": SCHEMA}, "", "stop", "not the JSON that was asked for"),
        ({"response_format": SCHEMA}, None, "tool_calls", "answered"),
    ],
)
def test_a_verdict_says_what_an_answer_is_worth(
    request_body: dict[str, Any], text: str | None, reason: str, word: str
) -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 12, "total_tokens": 17}
    body = {"choices": [{"message": {"content": text}, "finish_reason": reason}], "usage": usage}
    found = verdict(request_body, {"response": {"status_code": 200, "body": body}}, ok=True)
    assert (found.word, found.usage.input, found.usage.output) == (word, 5, 12)


def test_a_verdict_of_a_failure_names_its_code() -> None:
    assert verdict({}, {"error": {"code": "batch_expired"}}, ok=False).word == "failed: batch_expired"
    assert verdict({}, {"response": {"status_code": 400, "body": {}}}, ok=False).word == "failed: 400"
    assert verdict({}, json.loads('{"response": 7, "error": []}'), ok=False).word == "failed: unknown"


def test_what_was_noted_counts_where_the_request_is_not_known() -> None:
    line = {"response": {"status_code": 200, "body": {"choices": [{"message": {"content": "no"}}]}}}
    assert verdict({}, line, True, Outcome.INVALID).word == "not the JSON that was asked for"
