"""Knows for which requests SGLang has no room because of their LoRA adapters, of which it runs only so many at once."""

from collections.abc import Sequence
from typing import Any


def waits_for_adapter(scheduler: Any, reqs: Sequence[Any], running: Any, batch: Any) -> bool:
    """Return whether SGLang did not take the first of these because other requests use all of its adapters' places.

    `batch`: the prompts that it took in this step, or None. A request without an adapter needs a place too.
    """
    if not (reqs and scheduler.enable_lora):
        return False
    used = {each.lora_id for each in running.reqs if not each.finished()}
    used |= set() if batch is None else {each.lora_id for each in batch.reqs}
    return len(used | {reqs[0].lora_id}) > scheduler.max_loras_per_batch
