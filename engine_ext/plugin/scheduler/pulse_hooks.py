"""Makes SGLang's scheduler write its pulse: at each turn of its loop, and at the end of each step."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.options import mine
from engine_ext.plugin.pulse import Beating, Foreseen

IDLE_MS = 15_000

_mine: Beating | None = None


def _beating(scheduler: Any) -> Beating | None:
    global _mine
    if _mine is None and (pulses := mine().pulses) is not None:
        ranks = scheduler.ps
        slot = ((ranks.dp_rank or 0) * ranks.pp_size + ranks.pp_rank) * ranks.tp_size + ranks.tp_rank
        _mine = Beating(Path(pulses), slot, time.monotonic())
    return _mine


def process_input_requests(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Note a turn of the scheduler's loop: SGLang calls this once per turn, in each of its kinds of loop."""
    mine = _beating(scheduler)
    if mine is not None:
        mine.turned(time.monotonic())
    return original(scheduler, *args, **kwargs)


def expects(scheduler: Any, seconds: float) -> None:
    """Note how long the step that begins now should take."""
    mine = _beating(scheduler)
    if mine is not None:
        mine.expects(seconds)


def stepped(scheduler: Any) -> None:
    """Note that a step has ended."""
    mine = _beating(scheduler)
    if mine is not None:
        mine.stepped(time.monotonic())


def foresaw(scheduler: Any, found: Foreseen) -> None:
    """Tell the worker what a new online request would meet."""
    mine = _beating(scheduler)
    if mine is not None:
        mine.foresaw(found)


def maybe_sleep(original: Callable[..., None], sleeper: Any) -> None:
    """Sleep until a message comes, IDLE_MS at most: each turn of an idle loop looks through all of SGLang's state."""
    sleeper.poller.poll(IDLE_MS)
    original(sleeper)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = [
    (f"{_SCHEDULER}.process_input_requests", process_input_requests, HookType.AROUND),
    ("sglang.srt.managers.scheduler_components.idle_sleeper.IdleSleeper.maybe_sleep", maybe_sleep, HookType.AROUND),
]
