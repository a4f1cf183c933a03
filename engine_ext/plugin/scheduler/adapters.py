"""Finds places for requests that need a LoRA adapter: SGLang runs only so many adapters at once.

A request without an adapter needs a place like any other. SGLang passes over a request whose adapter has none and takes
others behind it, as long as they come. So one adapter must make way: no more of its requests are admitted until it has
left the engine.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from engine_ext.plugin.scheduler.online import is_ours


def held_back(scheduler: Any, others: Sequence[Any], ours: Sequence[Any], running: Any) -> set[Any]:
    """Return those of `ours` that must wait, so that the first request without a place for its adapter gets one.

    `others`: the online requests that wait, which come first; `ours`: what the scan admits. The adapter of the fewest
    running requests makes way, unless online requests use it.
    """
    if not scheduler.enable_lora:
        return set()
    here = [each for each in running.reqs if not each.finished()]
    used = Counter(each.lora_id for each in here)
    first = next((each for each in (*others, *ours) if each.lora_id not in used), None)
    if first is None or len(used) < scheduler.max_loras_per_batch:
        return set()
    kept = {each.lora_id for each in (*others, *here) if not is_ours(each)}
    able = [(count, str(adapter), adapter) for adapter, count in used.items() if adapter not in kept]
    if not able:
        return set()
    leaves = min(able)[2]
    return {each for each in ours if each.lora_id == leaves}


def waits_for_adapter(scheduler: Any, reqs: Sequence[Any], running: Any, batch: Any) -> bool:
    """Return whether the first of these, which SGLang did not take, may only lack a place for its adapter.

    `batch`: the prompts that it took in this step, or None.
    """
    if not (reqs and scheduler.enable_lora):
        return False
    if scheduler.lora_drainer is not None or scheduler.enable_lora_overlap_loading:
        return True  # SGLang has reasons of its own to wait
    used = {each.lora_id for each in running.reqs if not each.finished()}
    used |= set() if batch is None else {each.lora_id for each in batch.reqs}
    return len(used | {reqs[0].lora_id}) > scheduler.max_loras_per_batch
