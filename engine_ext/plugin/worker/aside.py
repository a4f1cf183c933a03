"""Does the long work of one request in a thread, so that the event loop can answer the others.

Projects take turns in front of the thread: who sends many long texts waits for its own.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextvars import ContextVar, copy_context
from typing import TypeVar

from engine_ext.plugin.worker.turns import Turns

LOOKS_S = 1.0  # between two looks of a thread at whether its loop has ended
LARGE = 100_000  # bytes of text that a tokenizer needs some tens of milliseconds for

Found = TypeVar("Found")


# One for online requests and one for batches: more would take the interpreter's time from the event loop.
_threads = {each: (ThreadPoolExecutor(1, thread_name_prefix="aside"), Turns()) for each in (True, False)}
_home: ContextVar[asyncio.AbstractEventLoop] = ContextVar("home")  # whose loop the thread works for
# Of the request that the task answers.
is_online: ContextVar[bool] = ContextVar("is_online", default=True)
project: ContextVar[str] = ContextVar("project", default="")


async def aside(work: Callable[[], Found], is_large: bool) -> Found:
    """Return what `work` returns; if it is large, it runs in the thread."""
    if not is_large:
        return work()
    loop = asyncio.get_running_loop()
    _home.set(loop)
    thread, turns = _threads[is_online.get()]
    context = copy_context()
    async with turns.turn(project.get()):
        return await loop.run_in_executor(thread, lambda: context.run(work))


def in_loop(work: Callable[[], Found]) -> Found:
    """Return what `work` returns; in a thread of `aside`, wait for the event loop to do it."""
    if threading.current_thread() is threading.main_thread():
        return work()

    async def done() -> Found:
        return work()

    loop = _home.get()
    found = asyncio.run_coroutine_threadsafe(done(), loop)
    while not wait([found], LOOKS_S).done:
        if loop.is_closed():
            raise RuntimeError("the event loop has ended")
    return found.result()
