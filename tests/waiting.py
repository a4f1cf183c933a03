"""Waits of tests. Each ends, and says what it waited for.

`asyncio.timeout` around a loop does not: `asyncio.wait_for`, through which the Redis client sends, can lose a cancel
before Python 3.12 (two of a hundred cancelled workers ran on), and the loop then never ends.
"""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

LIMIT_S = 60.0  # for anything to happen, on a machine that is busy


async def until(
    holds: Callable[[], Any], what: str | None = None, limit_s: float = LIMIT_S, every_s: float = 0.01
) -> float:
    """Wait until `holds`, which may be asynchronous, returns something true; return how many seconds it took."""
    started = time.monotonic()
    while True:
        found = holds()
        if await found if inspect.isawaitable(found) else found:
            return time.monotonic() - started
        assert time.monotonic() - started < limit_s, f"not in {limit_s:.0f} s: {what or inspect.getsource(holds)}"
        await asyncio.sleep(every_s)


async def first_of(*events: asyncio.Event) -> None:
    """Wait until one of the events is set."""
    waits = [asyncio.create_task(each.wait()) for each in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for each in waits:
        each.cancel()


async def kill(task: asyncio.Task[Any]) -> None:
    """End a task as a death of its process would: without its own end."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=2.0)
