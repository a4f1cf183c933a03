"""Does the long work of one request in a thread, so that the event loop can answer the others."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar, copy_context
from typing import TypeVar

LOOKS_S = 1.0  # between two looks of a thread at whether its loop has ended
LARGE = 100_000  # bytes of text that a tokenizer needs some tens of milliseconds for

Found = TypeVar("Found")
# One for online requests and one for batches: more would take the interpreter's time from the event loop.
_threads = {each: ThreadPoolExecutor(1, thread_name_prefix="aside") for each in (True, False)}
_home: ContextVar[asyncio.AbstractEventLoop] = ContextVar("home")  # whose loop the thread works for
is_online: ContextVar[bool] = ContextVar("is_online", default=True)  # of the request that the task answers


async def aside(work: Callable[[], Found], is_large: bool) -> Found:
    """Return what `work` returns; if it is large, it runs in the thread."""
    if not is_large:
        return work()
    loop = asyncio.get_running_loop()
    _home.set(loop)
    thread, context = _threads[is_online.get()], copy_context()
    return await loop.run_in_executor(thread, lambda: context.run(work))


def in_loop(work: Callable[[], Found]) -> Found:
    """Return what `work` returns; in a thread of `aside`, wait for the event loop to do it."""
    if threading.current_thread() is threading.main_thread():
        return work()

    async def done() -> Found:
        return work()

    loop = _home.get()
    found = asyncio.run_coroutine_threadsafe(done(), loop)
    while not loop.is_closed():
        with suppress(TimeoutError):
            return found.result(LOOKS_S)
    raise RuntimeError("the event loop has ended")
