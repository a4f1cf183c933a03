"""The events of a streamed response, from those that SGLang makes, where the real ones cannot be had at will."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from engine_ext.plugin.worker.answers import Answer, added_fields, event_with_fields
from engine_ext.plugin.worker.marked import ONLINE, Told, told
from engine_ext.plugin.worker.response_events import response_events

CREATED, DELTA, COMPLETED, FAILED = (
    f"response.{kind}" for kind in ("created", "output_text.delta", "completed", "failed")
)


def event(kind: str) -> str:
    body: dict[str, Any] = {"type": kind} | ({"delta": "x"} if kind == DELTA else {"response": {"status": "s"}})
    return f"event: {kind}\ndata: {json.dumps(body)}\n\n"


def run(known: Told, *kinds: str) -> list[Any]:
    async def sglang() -> AsyncIterator[str]:
        for kind in kinds:
            assert told.get() is known
            yield event(kind)

    async def read() -> list[Any]:
        return [each async for each in response_events(sglang(), known, lambda body: {**body, "model": "m"})]

    return asyncio.run(read())


def kinds_of(found: list[bytes]) -> list[str]:
    return [json.loads(each.partition("data: ")[2])["type"] for each in b"".join(found).decode().split("\n\n") if each]


def test_what_sglang_says_before_the_engine_answers_comes_with_the_first_token() -> None:
    found = run(Told("r", ONLINE), CREATED, DELTA, DELTA, COMPLETED)
    assert [len(kinds_of([each])) for each in found] == [2, 1, 1]
    assert kinds_of(found) == [CREATED, DELTA, DELTA, COMPLETED]
    assert found[-1].count(b'"model": "m"') == 1


def test_a_response_that_the_length_limit_ends_is_incomplete() -> None:
    found = run(Told("r", ONLINE, stopped_by_length=True), CREATED, DELTA, COMPLETED)
    assert kinds_of(found)[-1] == "response.incomplete"
    assert found[-1].startswith(b"event: response.incomplete\n")


def test_what_sglang_refuses_is_no_stream() -> None:
    [answer] = run(Told("r", ONLINE, fault="too long"), CREATED, FAILED)
    assert isinstance(answer, Answer)
    assert (answer.status_code, json.loads(answer.body)["error"]["message"]) == (400, "too long")


@pytest.mark.parametrize(
    ("known", "kinds"),
    [
        (Told("r", ONLINE), (CREATED, FAILED)),
        (Told("r", ONLINE, fault="too late to refuse it"), (CREATED, DELTA, FAILED)),
        (Told("r", ONLINE, aborted=True), (CREATED, COMPLETED)),
    ],
)
def test_an_engine_that_fails_is_no_answer(known: Told, kinds: tuple[str, ...]) -> None:
    with pytest.raises(RuntimeError):
        run(known, *kinds)


def test_events_get_fields_unless_they_end_the_stream() -> None:
    fields = added_fields("flex", "emulated")
    assert event_with_fields(b'data: {"a":1}\n\n', fields) == (
        b'data: {"service_tier":"flex","device":"emulated","a":1}\n\n'
    )
    for other in (b"data: [DONE]\n\n", b'data: {"error":{}}\n\n', b"event: x\ndata: {}\n\n"):
        assert event_with_fields(other, fields) == other
    assert added_fields(None, None) == b"{"
