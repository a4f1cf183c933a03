"""Ends a process whose event loop hangs, so that its supervisor restarts it and its work is taken over."""

import asyncio
import faulthandler
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

LIMIT_S = 120.0
TURN_S = 10.0


@asynccontextmanager
async def watched_loop(limit_s: float = LIMIT_S) -> AsyncGenerator[None, None]:
    """During the block, if the loop hangs for `limit_s`, write every thread's stack to stderr and exit.

    The timer is the interpreter's own thread, which needs no lock, so it ends even a hang in a regular expression.
    """
    turns = asyncio.create_task(_turn(limit_s))
    try:
        yield
    finally:
        turns.cancel()
        faulthandler.cancel_dump_traceback_later()


async def _turn(limit_s: float) -> None:
    while True:
        faulthandler.dump_traceback_later(limit_s, exit=True)
        await asyncio.sleep(min(TURN_S, limit_s / 4))
