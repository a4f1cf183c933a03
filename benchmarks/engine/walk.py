"""Traces how a step walks through the files of the plugin: which it enters, and which it comes back to."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

import engine_ext

PHASES = ("observe", "live", "apply")
KEPT = 4096  # steps
OURS = str(Path(engine_ext.__file__).parent)
_walks: list[list[str]] = []


def returns(walk: list[str]) -> int:
    """Return how often a walk comes back to a file that it has left."""
    turns = [each for place, each in enumerate(walk) if place == 0 or each != walk[place - 1]]
    return len(turns) - len(set(turns))


def admit(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one step, and write down what `admission_hooks` calls in other files."""
    walk: list[str] = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        caller = frame.f_back
        if event != "call" or caller is None or not frame.f_code.co_filename.startswith(OURS):
            return
        if Path(caller.f_code.co_filename).stem == "admission_hooks":
            walk.append(Path(frame.f_code.co_filename).stem)

    sys.setprofile(note)
    try:
        return original(scheduler, *args, **kwargs)
    finally:
        sys.setprofile(None)
        if any(each in PHASES for each in walk) and len(_walks) < KEPT:
            _walks.append(walk)


def report(original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
    """Add the walks to SGLang's internal state."""
    result = original(scheduler, *args)
    result.internal_state["batchweave_walks"] = _walks
    return result


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = [
    (f"{_SCHEDULER}._get_new_batch_prefill_raw", admit, HookType.AROUND),
    (f"{_SCHEDULER}.get_internal_state", report, HookType.AROUND),
]
