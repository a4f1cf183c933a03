"""No answer, whatever a model writes, holds its parser for long; one with calls is parsed as SGLang does it."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.openai.protocol import Tool
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from engine_ext.plugin.worker import patience
from engine_ext.plugin.worker.aside import aside

TOOL = Tool.model_validate({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}})
# Of each, some parser takes minutes.
MANY = [
    *(mark * 16_000 for mark in ("<tool_call>", "<tool_call>\n", "<function=a>", "<|tool_call>", "[a(b=1, ", "<param")),
    "[" + "a(b=1, " * 20 + ")]" + "[a(b=1, " * 16_000,
    "<\uff5ctool▁calls▁begin\uff5c>"
    + "<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>a\n```json\n" * 2_000,
    "<tool_call>a" + "<arg_key>a</arg_key>" + "\n" * 40_000 + "<arg_value>",
    "<tool_calls>" + '[{"name": ' * 10_000,
    "{" + '{"name":' * 20_000,
    "<|python_tag|>" + "{'a': " * 20_000,
    "<|tool_call>call:add{" + "a:{" * 20_000,
    "<|channel|>analysis<|message|>" + " " * 60_000 + "<|channel|>" * 4_000,
]
PARSERS = sorted(set(FunctionCallParser.ToolCallParserEnum))
LONG = '[{"name": "add", "parameters": {"text": "' + "word " * 4_000 + '"}}]'


class Stopwatch:
    """Keeps the longest time that one call took, of this thread's."""

    longest_s = 0.0

    def __call__(self, work: Any, *given: Any) -> Any:
        started = time.thread_time()
        found = work(*given)
        self.longest_s = max(self.longest_s, time.thread_time() - started)
        return found


@pytest.fixture(autouse=True)
def bounded() -> Iterator[None]:
    """Bound the parsers for one test, with budgets of its own."""
    classes: Any = (FunctionCallParser, JsonArrayParser, ReasoningParser)
    before = [(each, dict(vars(each))) for each in classes]
    patience.bound()
    yield
    patience.budgets.clear()
    for each, members in before:
        for name, value in members.items():
            if vars(each)[name] is not value:
                setattr(each, name, value)


def fresh() -> None:
    """Give the parsers their time again, as each body's answers have it."""
    patience.budgets.clear()


def parsed(name: str, text: str, clock: Any = lambda work, *given: work(*given)) -> Any:
    parser = FunctionCallParser([TOOL], name)
    return clock(parser.parse_non_stream, text)[1] if clock(parser.has_tool_call, text) else []


@pytest.mark.parametrize("name", PARSERS)
def test_hostile_answers_are_text(name: str) -> None:
    clock = Stopwatch()
    for text in MANY:
        fresh()
        parsed(name, text, clock)
    assert clock.longest_s < 4 * patience.AT_ONCE_S


@pytest.mark.parametrize("name", sorted(ReasoningParser.DetectorMap))
def test_hostile_thoughts_are_text(name: str) -> None:
    clock = Stopwatch()
    for text in MANY:
        fresh()
        clock(ReasoningParser(name).parse_non_stream, text)
    assert clock.longest_s < 4 * patience.AT_ONCE_S


@pytest.mark.parametrize("name", PARSERS)
def test_hostile_streams_are_text(name: str) -> None:
    clock = Stopwatch()
    for text in MANY:
        fresh()
        parser, said = FunctionCallParser([TOOL], name), 0
        for at in range(0, len(text), len(text) // 8):
            said += len(clock(parser.parse_stream_chunk, text[at : at + len(text) // 8])[0] or "")
    assert clock.longest_s < 4 * patience.AT_ONCE_S


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("pythonic", "[add(a=1, b='x'), add(a=[2])]"),
        ("hermes", f'<tool_call>\n{{"name": "add", "arguments": {{"a": {[[1, 2]] * 3000}}}}}\n</tool_call>' * 2),
        ("qwen", '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' * 2),
        ("qwen3_coder", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>" * 2),
    ],
)
def test_calls_are_found(name: str, text: str) -> None:
    assert [call.name for call in parsed(name, text)] == ["add", "add"]


def test_a_stream_that_is_given_up_loses_no_text() -> None:
    text = "<tool_call>\n" + "<tool_call>\n" * 16_000
    parser, said = FunctionCallParser([TOOL], "qwen3_coder"), ""
    for at in range(0, len(text), 40_000):
        said += parser.parse_stream_chunk(text[at : at + 40_000])[0] or ""
    assert text.endswith(said)


def test_a_parser_that_catches_all_errors_ends() -> None:
    def stubborn() -> None:
        for _ in range(1_000):
            try:
                while True:
                    pass
            except:  # noqa: E722
                pass

    started = time.thread_time()
    with suppress(patience.TooLongError):
        patience.Budget().run(stubborn)
    assert time.thread_time() - started < 4 * patience.AT_ONCE_S


async def test_a_parser_in_a_thread_ends() -> None:
    async def ticks() -> float:
        longest, last = 0.0, time.monotonic()
        while not done.done():
            await asyncio.sleep(0.01)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        return longest

    text = "<tool_call>\n" * 16_000
    done = asyncio.ensure_future(aside(lambda: parsed("qwen3_coder", text), True))
    watched = asyncio.ensure_future(ticks())
    assert await done == []
    assert await watched < 60


def steps(count: int) -> Any:
    """Return SGLang's tokenizer manager, whose answers grow by one step at a time."""

    async def generate_request(obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        for at in range(count):
            await asyncio.sleep(0)
            yield {
                "text": LONG[: len(LONG) * (at + 1) // count],
                "meta_info": {"finish_reason": at == count - 1 or None},
            }

    return SimpleNamespace(generate_request=generate_request)


async def test_streams_above_their_share_skip_steps_and_lose_nothing() -> None:
    manager = steps(4_000)
    patience.paced(manager)
    parser, at, seen, sent = JsonArrayParser(), 0, [], 0
    async for found in manager.generate_request(None):
        seen += parser.parse_streaming_increment(found["text"][at:], [TOOL]).calls
        at = len(found["text"])
        sent += 1
    assert at == len(LONG)
    assert sent < 4_000
    assert seen[0].name == "add"
    assert json.loads("".join(call.parameters or "" for call in seen)) == {"text": "word " * 4_000}


async def test_projects_wait_for_their_own_answers_alone() -> None:
    patience.project.set("a")
    patience.budgets["a"] = patience.Budget(-1.0)
    assert 7 < patience.budget().wait_s() <= 8
    patience.project.set("b")
    assert patience.budget().wait_s() == 0
    manager = steps(3)
    patience.paced(manager)
    assert [found async for found in manager.generate_request(None)]
