"""Tells a scheduler process that hangs from one that works or rests, by its pulse.

A scheduler that hangs may hold its interpreter's lock, for example in a regular expression, and then it answers no
queries. So it writes when its loop turned, and when a step ended, into memory that it shares with the worker. The
worker reads it from a thread. The same memory tells the worker what a new online request would meet; a read during a
write costs at most one wrong guess.
"""

import logging
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CHECK_S = 2.0
STOOD_STILL_S = 3 * CHECK_S  # a check this late says that the machine stood still, and the engine with it
FIRST_STEPS = 10  # times the limit for the first step of a process, which may compile its kernels
SPARE = 2.0  # the limit is at least this many times the longest turn with a step, and what a step should take
SLOTS = 256  # ranks of one engine
_FORM = struct.Struct("=ddddqq")
_FORESEEN = struct.Struct("=ddddd")
_SLOT = _FORM.size + _FORESEEN.size
log = logging.getLogger(__name__)


class Pulse(NamedTuple):
    """The pulse of one scheduler process, by the machine's monotonic clock.

    It holds when the loop last turned, when the last step ended, the longest turn with a step so far in seconds, how
    long the step that began last should take, the number of steps, and the process id.
    """

    turned_at: float
    stepped_at: float
    longest_s: float
    expected_s: float
    steps: int
    pid: int


class Foreseen(NamedTuple):
    """What a new online request would meet in one scheduler.

    `at_s`: when this was foreseen, by the machine's monotonic clock. `step_s`: seconds of a step without batches in
    which all online requests decode, also those that still wait. `token_s`: seconds per prompt token while prompts
    wait. `priority_s`, `default_s`: how long a prompt of this class would wait for its first step.
    """

    at_s: float
    step_s: float
    token_s: float
    priority_s: float
    default_s: float


class Beating:
    """The scheduler's side: writes the pulse of this process into its slot."""

    def __init__(self, memory: Path, slot: int, now: float) -> None:
        with memory.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), SLOTS * _SLOT)
        self._at = slot % SLOTS * _SLOT
        self._pulse = Pulse(now, now, 0.0, 0.0, 0, os.getpid())
        self._steps = 0  # at the last turn
        self._write()

    def turned(self, now: float) -> None:
        before = self._pulse
        turn_s = now - before.turned_at if before.steps > self._steps else 0.0  # an idle turn waits for requests
        self._steps = before.steps
        self._pulse = before._replace(turned_at=now, longest_s=max(before.longest_s, turn_s))
        self._write()

    def expects(self, seconds: float) -> None:
        """Note how long the step that begins now should take."""
        self._pulse = self._pulse._replace(expected_s=seconds)
        self._write()

    def stepped(self, now: float) -> None:
        self._pulse = self._pulse._replace(stepped_at=now, steps=self._pulse.steps + 1)
        self._write()

    def foresaw(self, found: Foreseen) -> None:
        _FORESEEN.pack_into(self._memory, self._at + _FORM.size, *found)

    def _write(self) -> None:
        _FORM.pack_into(self._memory, self._at, *self._pulse)


class Pulses:
    """The worker's side: memory that disappears with this process, however it ends."""

    def __init__(self) -> None:
        self._file = os.memfd_create("batchweave-pulses")
        os.truncate(self._file, SLOTS * _SLOT)
        self._memory = mmap.mmap(self._file, SLOTS * _SLOT, prot=mmap.PROT_READ)

    @property
    def path(self) -> Path:
        """The path by which other processes of this user find the memory."""
        return Path(f"/proc/{os.getpid()}/fd/{self._file}")

    def read(self) -> list[Pulse]:
        """Return the pulse of every scheduler that has started."""
        found = (Pulse(*_FORM.unpack_from(self._memory, slot * _SLOT)) for slot in range(SLOTS))
        return [pulse for pulse in found if pulse.pid]

    def foreseen(self) -> list[Foreseen]:
        """Return what each scheduler foresees that tells it; the first of several ranks does, after each step."""
        slots = range(_FORM.size, SLOTS * _SLOT, _SLOT)
        found = (Foreseen(*_FORESEEN.unpack_from(self._memory, slot)) for slot in slots)
        return [each for each in found if each.at_s]

    def close(self) -> None:
        self._memory.close()
        os.close(self._file)


@dataclass(frozen=True, slots=True)
class Health:
    """Whether an engine hangs.

    `age_s`: seconds since a step ended, or a loop turned, while requests were in flight. `limit_s`: a higher age is a
    hang.
    """

    age_s: float
    limit_s: float

    @classmethod
    def of(cls, found: Sequence[Pulse], busy_since: float | None, now: float, limit_s: float) -> "Health":
        """Judge these pulses. `busy_since`: since when any request has been in flight; None while there is none."""
        longest_s = max((max(each.longest_s, each.expected_s) for each in found), default=0.0)
        most_s = FIRST_STEPS * limit_s
        limit_s = min(max(limit_s, SPARE * longest_s), most_s) if any(each.steps for each in found) else most_s
        if busy_since is None or not found:
            return cls(0.0, limit_s)
        # Some of several ranks may rest: it is enough that one of them steps, but the loop of each must turn.
        last = min(max(each.stepped_at for each in found), min(each.turned_at for each in found))
        return cls(now - max(last, busy_since), limit_s)


class Watch:
    """Kills the engine and the worker together if the engine hangs, so that they are started again."""

    def __init__(self, pulses: Pulses, limit_s: float, busy_since: Callable[[], float | None]) -> None:
        self._pulses, self._limit_s, self._busy_since = pulses, limit_s, busy_since
        self._stopped = threading.Event()
        self._resumed_at = 0.0
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def health(self) -> Health:
        busy_since = self._busy_since()
        since = None if busy_since is None else max(busy_since, self._resumed_at)
        return Health.of(self._pulses.read(), since, time.monotonic(), self._limit_s)

    def _run(self) -> None:
        checked_at = time.monotonic()
        while not self._stopped.wait(CHECK_S):
            now = time.monotonic()
            if now - checked_at > STOOD_STILL_S:
                log.warning("this process stood still for %.0f s; no time before counts as a hang", now - checked_at)
                self._resumed_at = now
            checked_at = now
            health = self.health
            if health.age_s > health.limit_s:
                log.critical(
                    "the engine hangs: no step has ended for %.0f s (limit %.0f s); killing it with this worker",
                    *(health.age_s, health.limit_s),
                )
                end_together([each.pid for each in self._pulses.read()])


def end_together(pids: Sequence[int]) -> None:
    """Kill these processes and this one, with its process group if it leads one."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
