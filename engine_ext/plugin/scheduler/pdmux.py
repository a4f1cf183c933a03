"""Runs PD-multiplexing under the dual scan: prefill on some of a GPU's SMs beside decodes on the others.

The split follows the scan's plan instead of SGLang's thresholds on the decode batch. This was written from the source
of SGLang 0.5.17, and has not run on a GPU yet.
"""

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.multiplex.pdmux_context import set_current_stream_idx
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.scheduler.admission import admission_of

SATURATES = 0.4  # share of the SMs that reads memory as fast as all of them; ASSUMED


def best_split(splits: Sequence[tuple[int, int]], compute_s: float, memory_s: float) -> int:
    """Return the index of the split (SMs for prefill, SMs for decodes) that ends this work soonest.

    `compute_s`, `memory_s`: seconds that the work takes on the whole GPU.
    """

    def seconds(split: tuple[int, int]) -> float:
        prefill, decode = split
        total = prefill + decode
        return max(compute_s * total / prefill, memory_s * max(1.0, SATURATES * total / decode))

    return min(range(len(splits)), key=lambda k: seconds(splits[k]))


def adjust_stream_groups(original: Callable[..., Any], scheduler: Any, running_batch: Any) -> Any:
    """Choose the split by the remaining work. SGLang asks when a prefill begins or ends, with both streams idle."""
    compute_s, memory_s = admission_of(scheduler).scan.remaining_s
    if running_batch.is_empty() or not scheduler.split_prefill_batch or compute_s + memory_s <= 0:
        return original(scheduler, running_batch)
    # The first and the last group give the whole GPU to one of the two.
    group = 1 + best_split(scheduler.sm_counts[1:-1], compute_s, memory_s)
    set_current_stream_idx(group)
    scheduler.tp_worker.model_runner.update_decode_attn_backend(group)
    return group, scheduler.stream_groups[group]


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Count decode steps as they come, because the scan is asked only between two prefills."""
    if batch.forward_mode.is_decode():
        admission_of(scheduler).decoded += 1
    return original(scheduler, batch, *args, **kwargs)


def abort(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Abort prefills too: SGLang looks only at its queue and at decodes, so they would run to their last token."""
    found = original(scheduler, recv_req)
    batch = scheduler.split_prefill_batch
    for req in batch.reqs if batch else ():
        if not req.finished() and (recv_req.abort_all or req.rid.startswith(recv_req.rid)):
            req.to_finish = FINISH_ABORT()
    return found


def is_fully_idle(original: Callable[..., bool], scheduler: Any, *args: Any, **kwargs: Any) -> bool:
    return scheduler.split_prefill_batch is None and original(scheduler, *args, **kwargs)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = [
    (f"{_SCHEDULER}.adjust_stream_groups", adjust_stream_groups, HookType.AROUND),
    (f"{_SCHEDULER}.run_batch", run_batch, HookType.AROUND),
    (f"{_SCHEDULER}.abort_request", abort, HookType.AROUND),
    (f"{_SCHEDULER}.is_fully_idle", is_fully_idle, HookType.AROUND),
]
