"""No answer, whatever a model writes, holds its parser for long; one with calls is parsed as SGLang does it."""

import asyncio
import io
import json
import logging
import threading
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
CALLS = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' * 2
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
        ("qwen", CALLS),
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


def steps(count: int, sends_parts: bool = False, reason: str = "stop") -> Any:
    """Return SGLang's tokenizer manager, whose answers grow by one step at a time."""

    async def generate_request(obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        for at in range(count):
            await asyncio.sleep(0)
            yield {
                "text": LONG[: len(LONG) * (at + 1) // count],
                "meta_info": {"finish_reason": {"type": reason} if at == count - 1 else None},
            }

    told = SimpleNamespace(incremental_streaming_output=sends_parts)
    return SimpleNamespace(generate_request=generate_request, server_args=told)


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


async def seen(manager: Any, **asked: Any) -> int:
    """Return how many steps a stream shows of a project above its share."""
    patience.begin("a")
    patience.budgets["a"] = patience.Budget(-0.02)
    patience.paced(manager)
    return len([found async for found in manager.generate_request(SimpleNamespace(**asked))])


async def test_only_steps_that_the_next_one_has_too_are_skipped() -> None:
    assert await seen(steps(20)) < 20
    assert await seen(steps(20), return_logprob=True) == 20
    assert await seen(steps(20, sends_parts=True)) == 20


async def test_projects_wait_for_their_own_answers_alone() -> None:
    patience.budgets["a"] = patience.Budget(-1.0)
    patience.begin("a")
    assert 7 < patience.budget().wait_s() <= 8
    patience.begin("b")
    assert patience.budget().wait_s() == 0
    manager = steps(3)
    patience.paced(manager)
    assert [found async for found in manager.generate_request(None)]


@pytest.mark.parametrize(("reason", "rests"), [("stop", True), ("abort", False)])
async def test_answers_rest_a_little_and_aborted_ones_never(reason: str, rests: bool) -> None:
    """While they rest they count as in flight, and hold up what others could run."""
    patience.budgets["a"] = patience.Budget(-1000.0)
    patience.begin("a")
    manager, started = steps(1, reason=reason), time.monotonic()
    patience.paced(manager)
    assert [found async for found in manager.generate_request(None)]
    assert (time.monotonic() - started > patience.RESTS_S / 2) == rests
    assert parsed("qwen", CALLS) != []  # an ordinary call takes less than the least


def test_parsers_find_the_same_again_at_no_cost() -> None:
    """SGLang's answer with several choices asks again what was found in a turn of each choice."""
    patience.begin("a")
    found = parsed("qwen", CALLS)
    patience.budgets["a"] = patience.Budget(-1000.0)
    assert parsed("qwen", CALLS) is found
    patience.begin("a")
    assert parsed("qwen", CALLS) is not found


def test_no_alarm_ends_a_parser_that_logs() -> None:
    """The lock of the log's handler would stay held, and who logs next would wait for good."""
    log = logging.getLogger("test.patience")
    log.addHandler(logging.StreamHandler(io.StringIO()))

    def writes() -> None:
        while True:
            log.warning("a name that no tool has")

    for _ in range(20):
        with pytest.raises(patience.TooLongError):
            patience.Budget(-1.0).run(writes)
    other = threading.Thread(target=log.warning, args=("from another thread",), daemon=True)
    other.start()
    other.join(30)
    assert not other.is_alive()


async def test_answers_that_end_at_once_have_a_turn_each() -> None:
    """Others' tokens wait for one of them, and not for all that one step has ended."""
    patience.begin("a")
    running, longest = True, 0.0

    async def others() -> None:
        nonlocal longest
        while running:
            before = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - before)

    async def one() -> None:
        await patience.turn()
        parsed("qwen3_coder", "<tool_call>" * 3_000)

    watched = asyncio.create_task(others())
    await asyncio.gather(*(one() for _ in range(32)))
    running = False
    await watched
    assert longest < 4 * patience.AT_ONCE_S
