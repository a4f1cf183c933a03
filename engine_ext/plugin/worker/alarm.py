"""Ends a call that takes too long, whatever it does: both Python and its regular expressions look for signals."""

import gc
import logging
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import TypeVar

AGAIN_S = 20e-6  # until the next alarm, where the call has caught the last one
LOGGING_S = 1e-3  # until the next alarm, where one came while a lock of `logging` might be held

Found = TypeVar("Found")


class TooLongError(BaseException):
    """A call has used its time. No Exception, because the calls catch those."""


def install() -> None:
    """Prepare the main thread, where calls with a limit must run: it alone gets signals."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("alarms reach the main thread alone")
    signal.signal(signal.SIGALRM, _alarm)


def within(seconds: float, call: Callable[[], Found]) -> Found:
    """Return what `call` returns. Raises TooLongError once it has used so many seconds of the thread."""
    collects = gc.isenabled()
    gc.disable()  # a collection may take as long, and is not the call's fault
    try:
        return _limited(seconds, call)
    finally:  # no alarm ends anything here
        if collects:
            gc.enable()


_until = 0.0  # of the thread's time, for the call that runs


def _limited(seconds: float, call: Callable[[], Found]) -> Found:
    global _until
    _until = time.thread_time() + seconds
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _alarm(_: int, frame: FrameType | None) -> None:
    """End the call if it runs, has used its time, and holds no lock of the log, which would stay held."""
    logs = False
    while frame is not None and frame.f_code is not _limited.__code__:
        logs |= frame.f_code.co_filename == logging.__file__
        frame = frame.f_back
    if frame is None:
        return
    left = _until - time.thread_time()  # more, where this process had no core
    signal.setitimer(signal.ITIMER_REAL, max(left, LOGGING_S if logs else AGAIN_S))
    if left <= 0 and not logs:
        raise TooLongError
