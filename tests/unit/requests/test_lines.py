"""Every fault of a line has its code, its line and the parameter."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.requests.lines import MAX_ERRORS, LineChecker

CHAT = "/v1/chat/completions"


def line(**changes: Any) -> dict[str, Any]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return {"custom_id": "a", "method": "POST", "url": CHAT, "body": body, **changes}


def raw(**changes: Any) -> bytes:
    return json.dumps(line(**changes)).encode()


def body(**changes: Any) -> dict[str, Any]:
    return {**line()["body"], **changes}


def without(name: str) -> bytes:
    found = line()
    del found[name]
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("text", "code", "param"),
    [
        (b"{not json", "invalid_json_line", None),
        (b"[1, 2]", "invalid_json_line", None),
        (b"[" * 100_000, "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_encoding", None),
        (without("custom_id"), "missing_required_parameter", "custom_id"),
        (without("method"), "missing_required_parameter", "method"),
        (b"{}", "missing_required_parameter", "custom_id"),
        (without("url"), "missing_required_parameter", "url"),
        (without("body"), "missing_required_parameter", "body"),
        (raw(custom_id=""), "missing_required_parameter", "custom_id"),
        (raw(custom_id=7), "invalid_request", "custom_id"),
        (raw(custom_id="x" * 513), "invalid_request", "custom_id"),
        (raw(body="text"), "invalid_request", "body"),
        (raw(method="GET"), "invalid_method", "method"),
        (raw(url="/v1/images"), "invalid_url", "url"),
        (raw(url="/v1/completions"), "url_mismatch", "url"),
        (raw(body=body(stream=True)), "streaming_unsupported", "body.stream"),
        (raw(body=body(model="")), "missing_required_parameter", "body.model"),
        (raw(body=body(model=3)), "invalid_request", "body.model"),
        (raw(body={"model": "m"}), "missing_required_parameter", "body.messages"),
    ],
)
def test_fault_is_coded(text: bytes, code: str, param: str | None) -> None:
    checker = LineChecker(CHAT)
    assert checker.check(5, text) is None
    [error] = checker.errors
    assert (error.code, error.line, error.param) == (code, 5, param)
    assert error.message


@pytest.mark.parametrize("empty", ["", []])
def test_an_empty_prompt_is_left_to_its_line(empty: Any) -> None:
    assert LineChecker(CHAT).check(1, raw(body={"model": "m", "messages": empty})) is not None


def test_all_fields_that_are_missing_are_named() -> None:
    checker = LineChecker(CHAT)
    checker.check(1, b'{"custom_id": "a", "body": {}}')
    assert [error.message for error in checker.errors] == ["'method' and 'url' are missing."]


def test_what_comes_twice_is_suspected() -> None:
    checker = LineChecker(CHAT)
    assert checker.check(1, raw())
    assert checker.check(4, raw(custom_id="other"))
    assert checker.check(5, raw())
    assert checker.custom_ids.suspects(1000) == {1, 5}


def test_second_model_is_refused() -> None:
    checker = LineChecker(CHAT)
    checker.check(1, raw())
    checker.check(2, raw(custom_id="b", body=body(model="other")))
    [error] = checker.errors
    assert (error.code, error.line) == ("model_mismatch", 2)


def test_blank_lines_and_carriage_returns_are_fine() -> None:
    checker = LineChecker(CHAT)
    assert checker.check(1, raw())
    assert checker.check(2, b"") is None
    assert checker.check(3, b"  \r") is None
    assert checker.check(4, raw(custom_id="b") + b"\r")
    assert (checker.requests, checker.errors) == (2, [])


def test_message_cuts_what_it_quotes() -> None:
    checker = LineChecker(CHAT)
    checker.check(1, raw())
    checker.check(2, raw(custom_id="b", url="u" * 100_000))
    checker.check(3, raw(custom_id="c", method="m" * 100_000))
    checker.check(4, raw(custom_id="d", body=body(model="n" * 100_000)))
    assert len(checker.errors) == 3
    assert max(len(error.message) for error in checker.errors) < 400


def test_all_errors_are_collected_up_to_a_thousand() -> None:
    checker = LineChecker(CHAT)
    for number in range(1, MAX_ERRORS + 50):
        checker.check(number, b"{")
    assert [error.line for error in checker.errors] == list(range(1, MAX_ERRORS + 1))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_request_blank_or_one_error(text: bytes) -> None:
    checker = LineChecker(CHAT)
    found = checker.check(2, text)
    assert (found is not None) + len(checker.errors) + (not text.strip()) == 1


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_any_body_is_judged_without_a_crash(value: Any) -> None:
    checker = LineChecker(CHAT)
    checker.check(1, json.dumps({**line(), "body": value}).encode())
    checker.check(2, json.dumps({**line(), "body": {"model": value, "messages": value, "stream": value}}).encode())
    assert checker.requests + len({error.line for error in checker.errors}) == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", "on one line"),
        (b"\xef\xbb\xbf" + raw(), "byte order mark"),
        (raw(custom_id="?").replace(b"?", rb"\ud83d!"), "surrogate"),
        (raw(custom_id="?").replace(b"?", rb"\ude00"), "surrogate"),
        (raw(custom_id="?").replace(b"?", rb"\ud83d\ude00") + b"}", "malformed"),
    ],
)
def test_what_is_no_json_is_said_in_words(line: bytes, words: str) -> None:
    checker = LineChecker(CHAT)
    assert checker.check(2, line) is None
    assert words in checker.errors[0].message
