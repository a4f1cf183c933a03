"""Does the long work of one request in a thread, so that the event loop answers the others meanwhile."""

import asyncio
import contextvars
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE = 100_000  # bytes of text that a tokenizer needs some tens of milliseconds for

Found = TypeVar("Found")
# One: several would take more of the interpreter's time from the event loop.
_thread = ThreadPoolExecutor(1, thread_name_prefix="aside")


async def aside(work: Callable[[], Found], is_large: bool) -> Found:
    """Return what `work` returns; if it is large, it runs in the thread."""
    if not is_large:
        return work()
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_thread, lambda: context.run(work))
