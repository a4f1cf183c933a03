"""Reports a scheduler process's figures to its worker, as a part of SGLang's internal state."""

import math
from typing import Any

import numpy as np
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from engine_ext.plugin.options import Scheduling, mine
from engine_ext.plugin.scheduler import emulated, nano
from engine_ext.plugin.scheduler.admission import Admission, admission_of, overlap_of
from engine_ext.plugin.scheduler.fallback import is_alone
from engine_ext.plugin.scheduler.steps import books_of


def report(result: Any, scheduler: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Add batchweave's part to SGLang's internal state, which also shows the worker that the plugin is loaded."""
    scheduling = mine().scheduling
    if scheduling is Scheduling.DUAL_SCAN and admission_of(scheduler).fallback:
        scheduling = Scheduling.SGLANG
    found: dict[str, Any] = {
        "hooks": sorted(HookRegistry._patched),  # pyright: ignore[reportPrivateUsage]
        "device": None,
        "overlap": overlap_of(scheduler).value,
        "scheduling": scheduling.value,
        "kv_capacity": int(scheduler.max_total_num_tokens),
        "queued": len(scheduler.waiting_queue),
    }
    if scheduling is Scheduling.DUAL_SCAN or is_alone(scheduler):
        found |= _of_scan(admission_of(scheduler))
    found |= books_of(scheduler).report()
    found |= emulated.books() | nano.report()
    result.internal_state["batchweave"] = found
    return result


def _of_scan(ours: Admission) -> dict[str, Any]:
    did, (compute_s, memory_s) = ours.figures, ours.scan.remaining_s
    left_kv, right_kv = ours.scan.kv_tokens
    return {
        "waiting": len(ours.waiting),
        "running": sum(not req.finished() for req in ours.running),
        "admitted": did.admitted,
        "refused": did.refused,
        "plans": ours.scan.plans,
        "decisions": ours.steps,
        "deciding_s": did.deciding_s,
        "deciding_p99_s": float(np.quantile(did.deciding, 0.99)) if did.deciding else 0.0,
        "retractions": did.retractions,
        "retracted_tokens": did.retracted_tokens,
        "parked": did.parked,
        "yielded": did.yielded,
        "preempted": did.preempted,
        "restored_tokens": ours.reuse.restored_tokens,
        "loaded_host_tokens": ours.copies.loaded_tokens,
        "recomputed_tokens": ours.reuse.recomputed_tokens,
        "limited_steps": ours.beside.limited,
        "left_out": ours.beside.left_out,
        "batches_share": float(ours.beside.memory.governor.share[0]),
        "batches_excess_s": ours.beside.excess_s,
        "online_ended": ours.beside.ended,
        "online_late": ours.beside.late,
        "online_ttft_s": ours.beside.ttft_s,
        "online_tpot_s": ours.beside.tpot_s,
        "online_s": ours.beside.online_s,
        "online_kv": int(ours.beside.memory.held.now[0]),
        "online_classes": [
            ours.beside.served[slo.name].report(slo) for slo in ours.beside.classes if slo.name in ours.beside.served
        ],
        "step_limit_s": ours.beside.limit_s if ours.beside.is_needed and ours.beside.limit_s < math.inf else 0.0,
        "kv_kept_for_online": ours.beside.kept_free,
        "online_admitted": did.online_admitted,
        "online_most_steps": did.online_most_steps,
        "admitted_prompt_tokens": ours.reuse.prompt_tokens,
        "admitted_cached_tokens": ours.reuse.cached_tokens,
        "expected_cached_tokens": ours.scan.expected_cached,
        "remaining_compute_s": compute_s,
        "remaining_memory_s": memory_s,
        "remaining_s": ours.scan.slowness * max(compute_s, memory_s),
        "kv_kept": ours.pins.tokens,
        "kv_of_left": left_kv,
        "kv_of_right": right_kv,
        "recent_ids": list(ours.reuse.recent_ids),
    }


HOOKS = [("sglang.srt.managers.scheduler.Scheduler.get_internal_state", report, HookType.AFTER)]
