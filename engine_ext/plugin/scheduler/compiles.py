"""Compiles grammars in threads that kinds share fairly: a batch of costly schemas delays only its own requests.

SGLang has one queue for all grammars, in the order of arrival; a compile takes seconds and cannot be stopped.
"""

import os
import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

WORKERS = 4
MOST_OF_KIND = WORKERS // 2
NICENESS = 10  # below the scheduler, which needs its core at each step


class _Wanted(NamedTuple):
    future: Future[Any]
    run: Callable[[], Any]


class Compiles:
    """Runs calls in threads; kinds take turns, and each gets at most half of the threads."""

    def __init__(self) -> None:
        self.kind = ""  # the kind of the next call to `submit`
        self._waiting: OrderedDict[str, deque[_Wanted]] = OrderedDict()  # the kind whose turn is next comes first
        self._running: Counter[str] = Counter()
        self._changed = threading.Condition()
        self._threads: list[threading.Thread] = []

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run the call in a thread and return its future, as an Executor does."""
        future: Future[Any] = Future()
        with self._changed:
            self._waiting.setdefault(self.kind, deque()).append(_Wanted(future, lambda: function(*args)))
            if len(self._threads) < WORKERS:
                self._threads.append(threading.Thread(target=self._work, name="grammars", daemon=True))
                self._threads[-1].start()
            self._changed.notify()
        return future

    def _work(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)  # on Linux, only of this thread
        while True:
            kind, wanted = self._next()
            try:
                if wanted.future.set_running_or_notify_cancel():
                    try:
                        wanted.future.set_result(wanted.run())
                    except BaseException as error:  # as an Executor does, for the waiter of the future
                        wanted.future.set_exception(error)
            finally:
                with self._changed:
                    self._running -= Counter([kind])
                    self._changed.notify_all()

    def _next(self) -> tuple[str, _Wanted]:
        with self._changed:
            while True:
                kind = next((each for each in self._waiting if self._running[each] < MOST_OF_KIND), None)
                if kind is not None:
                    break
                self._changed.wait()
            queue = self._waiting.pop(kind)
            wanted = queue.popleft()
            if queue:
                self._waiting[kind] = queue  # behind the others
            self._running[kind] += 1
            return kind, wanted
