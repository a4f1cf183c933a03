"""Bounds how long the parsers of answers hold the event loop.

SGLang finds tool calls and thoughts in the loop. Some of its parsers take the square or the cube of what a model
writes, and in a stream most of them parse the whole call again for each token. So a parser that takes too long, or
fails, is ended, and its answer is text; and the parsers of one project together get a share of the time, beyond which
its streams skip steps (the next step has their text too), and its answers wait a little and then get less.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

from sglang.srt.function_call.core_types import StreamingParseResult
from sglang.srt.function_call.function_call_parser import FunctionCallParser
from sglang.srt.function_call.json_array_parser import JsonArrayParser
from sglang.srt.parser.reasoning_parser import ReasoningParser

from engine_ext.plugin.worker import alarm
from engine_ext.plugin.worker.alarm import TooLongError
from engine_ext.plugin.worker.aside import in_loop, project

AT_ONCE_S = 0.25  # of the thread's time, for one answer: others' tokens wait for it
LEAST_S = 0.02  # for one of a project above its share: 100 KB of ordinary calls take less
RESTS_S = 2.0  # for which an answer waits until its project has its share again
BURST_S = 0.5  # that the parsers of one project may take above their share
SHARE = 0.125  # of the time, for the parsers of one project
ENDED = {"type": "stop"}  # of each of several answers
MOST_BUDGETS = 1000  # that are kept, beside those of projects that are above their share

Found = TypeVar("Found")
_found: ContextVar[dict[Any, Any]] = ContextVar("found")  # what parsers found in answers of the task's request


class Budget:
    """What the parsers of one project may take."""

    def __init__(self, left_s: float = BURST_S) -> None:
        self.next = asyncio.Lock()  # of the answer that is read next
        self._left_s = left_s
        self._at = time.monotonic()

    def wait_s(self) -> float:
        """Return how long its parsers must rest."""
        if self._left_s < BURST_S:
            now = time.monotonic()
            self._left_s = min(BURST_S, self._left_s + SHARE * (now - self._at))
            self._at = now
        return max(0.0, -self._left_s / SHARE)

    def run(self, parse: Callable[[], Found]) -> Found:
        """Return what `parse` returns. Raises TooLongError."""
        started = time.thread_time()
        try:
            return alarm.within(LEAST_S if self.wait_s() else AT_ONCE_S, parse)
        finally:
            self.wait_s()
            self._left_s -= time.thread_time() - started


budgets: dict[str, Budget] = {}


def budget() -> Budget:
    """Return the budget of the task's project."""
    name = project.get()
    found = budgets.get(name)
    if found is None:
        if len(budgets) >= MOST_BUDGETS:
            for idle in [key for key, each in budgets.items() if not each.wait_s()]:
                del budgets[idle]
        found = budgets[name] = Budget()
    return found


async def turn() -> None:
    """Let others have their tokens before the parsers of the next answer, of which a project has one at a time."""
    allowed, until = budget(), time.monotonic() + RESTS_S
    async with allowed.next:
        await asyncio.sleep(0)  # the answer before this one is parsed by now
        if rest_s := allowed.wait_s():
            await asyncio.sleep(max(0.0, min(rest_s, until - time.monotonic())))


def begin(of: str) -> None:
    """Note whose request the task answers from now on, and forget what parsers found in answers to the last one."""
    project.set(of)
    _found.set({})


def paced(manager: Any) -> None:
    """Let SGLang's tokenizer manager send answers as their projects' budgets allow.

    SGLang gives all tokens of one step the alternatives of the first, so streams with log probabilities skip none.
    """
    generate, sends_parts = manager.generate_request, bool(manager.server_args.incremental_streaming_output)

    async def generate_request(obj: Any, request: Any = None) -> AsyncGenerator[Any, None]:
        skips = not (sends_parts or getattr(obj, "return_logprob", None))
        async with aclosing(generate(obj, request)) as steps:
            async for found in steps:
                reason = ENDED if isinstance(found, list) else found["meta_info"].get("finish_reason")
                if reason is None and skips and budget().wait_s():
                    continue
                if reason is not None and reason.get("type") != "abort":  # nobody waits for the text of that one
                    await turn()
                yield found

    manager.generate_request = generate_request


def bound() -> None:
    """Bound SGLang's parsers. Call it in the main thread, where the event loop must run."""
    alarm.install()
    for name in ("function_call", "parser"):  # what they log quotes answers
        logging.getLogger(f"sglang.srt.{name}").setLevel(logging.CRITICAL)
    if FunctionCallParser.has_tool_call.__module__ == __name__:
        return
    calls: Any = FunctionCallParser
    thoughts: Any = ReasoningParser
    calls.has_tool_call = _whole(calls.has_tool_call, lambda text: False)
    calls.parse_non_stream = _whole(calls.parse_non_stream, lambda text: (text, []))
    calls.parse_stream_chunk = _part(calls.parse_stream_chunk, lambda text: (text, []))
    JsonArrayParser.parse_streaming_increment = _part(  # type: ignore[method-assign]
        JsonArrayParser.parse_streaming_increment, lambda text: StreamingParseResult(normal_text=text)
    )
    thoughts.parse_non_stream = _whole(thoughts.parse_non_stream, lambda text: (None, text))
    thoughts.parse_stream_chunk = _part(thoughts.parse_stream_chunk, lambda text: (None, text))
    thoughts.parse_stream_end = _part(thoughts.parse_stream_end, lambda text: (None, text))


def _whole(parse: Any, as_text: Callable[[str], Any]) -> Any:
    def parse_whole(self: Any, text: str) -> Any:
        found, key = _found.get({}), (parse, text)
        if key not in found:
            try:
                found[key] = in_loop(partial(budget().run, partial(parse, self, text)))
            except (TooLongError, Exception):  # what no parser understands is still an answer
                found[key] = as_text(text)
        return found[key]

    return parse_whole


def _part(parse: Any, as_text: Callable[[str], Any]) -> Any:
    def parse_part(self: Any, text: str = "", *more: Any) -> Any:
        detector = getattr(self, "detector", self)
        if detector.__dict__.get("is_given_up"):
            return as_text(text)
        held = _held(detector)
        try:
            return budget().run(partial(parse, self, *([text] if parse.__code__.co_argcount > 1 else []), *more))
        except (TooLongError, Exception):
            detector.is_given_up = True
            return as_text(held + text)

    return parse_part


def _held(detector: Any) -> str:
    """Return the text that a detector keeps until it knows what it is."""
    parts = (detector, *(getattr(detector, name, None) for name in ("parser", "harmony_parser")))
    return next((text for each in parts if (text := getattr(each, "_buffer", ""))), "")
