"""Keeps the most KV cache that pins held, and that both ends of the scan held at once, over the steps of a run.

Who asks an engine for its state sees some of its steps; this sees all.
"""

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.scheduler.admission import Admission, admission_of


def step(_result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """After a step's plan: compare what is held now with the most so far; a run's retuning starts it again."""
    ours = admission_of(scheduler)
    run, pinned, both = _so_far(scheduler, ours)
    scheduler.batchweave_most = run, max(pinned, ours.pins.tokens), max(both, min(ours.scan.kv_tokens))


def report(result: Any, scheduler: Any, *_args: Any) -> Any:
    """Add the most so far, in tokens, to SGLang's internal state."""
    _, pinned, both = _so_far(scheduler, admission_of(scheduler))
    result.internal_state["batchweave_most"] = {"most_pinned": pinned, "most_of_both_ends": int(both)}
    return result


def _so_far(scheduler: Any, ours: Admission) -> tuple[Admission, int, float]:
    found = getattr(scheduler, "batchweave_most", None)
    return found if found is not None and found[0] is ours else (ours, 0, 0)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = [
    (f"{_SCHEDULER}._get_new_batch_prefill_raw", step, HookType.AFTER),
    (f"{_SCHEDULER}.get_internal_state", report, HookType.AFTER),
]
