"""Says what each request takes of a step, by wrapping SGLang's PrefillAdder, which fills the step.

The scan has counted what its requests need, so nothing is reserved for their answers; for online ones SGLang's own
reservation holds. `admission_hooks.py` marks the batch whose adder these hooks mean.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.schedule_policy import AddReqResult
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.scheduler import online, turns
from engine_ext.plugin.scheduler.online import is_ours
from engine_ext.plugin.scheduler.radix import cached_tokens

_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"


def reserve_for_online(original: Callable[..., None], adder: Any, *args: Any, **kwargs: Any) -> None:
    """Reserve nothing for our running requests: the scan has counted what it expects them to hold."""
    original(adder, *args, **kwargs)
    if _admits(adder):
        theirs = [req for req in adder.running_batch.reqs if not is_ours(req)]
        adder.batchweave_reserved = sum(adder._get_running_request_total_token_offset(req) for req in theirs)
        adder.rem_total_token_offset = adder.cur_rem_token_offset + adder.batchweave_reserved


def add_one(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Reserve nothing for the output of a request that the scan admits, and what SGLang does for all others.

    Beside a prompt in chunks that left room to others, no second one is cut into chunks: SGLang would fail.
    """
    if getattr(adder, "batchweave_continues", False) and _uncached(adder, req) > adder.rem_chunk_tokens:
        return AddReqResult.OTHER
    if not _admits(adder):
        return original(adder, req, *args, **kwargs)
    if not is_ours(req):
        # Without what SGLang has reserved for a chunk of ours that ends in this step.
        adder.rem_total_token_offset = adder.cur_rem_token_offset + adder.batchweave_reserved
        found = original(adder, req, *args, **kwargs)
        adder.batchweave_reserved = adder.rem_total_token_offset - adder.cur_rem_token_offset
        return found
    to_come = online.reservation(req)
    adder.rem_total_token_offset = adder.cur_rem_token_offset + adder.batchweave_reserved - to_come
    try:
        return original(adder, req, *args, **kwargs)
    finally:
        adder.rem_total_token_offset = adder.cur_rem_token_offset + adder.batchweave_reserved


def continue_chunk(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Let a prompt that is computed in chunks leave room in the step to those that go first.

    SGLang gives such a prompt whole steps, one after the other. What it reserves for the answer of an online one holds.
    """
    left_out = _left_to_others(adder, req)
    if left_out:
        adder.rem_chunk_tokens -= left_out
    try:
        found = original(adder, req, *args, **kwargs)
        adder.batchweave_continues = found is not None
        return found
    finally:
        if left_out:
            adder.rem_chunk_tokens += left_out
        if _admits(adder) and not is_ours(req):
            adder.batchweave_reserved = adder.rem_total_token_offset - adder.cur_rem_token_offset


def _left_to_others(adder: Any, req: Any) -> int:
    """Return the prompt tokens of the step that a prompt in chunks leaves to others."""
    first, most = getattr(req, "batchweave_first", ()), adder.rem_chunk_tokens
    if not first or most is None or adder.is_hybrid_swa:  # there SGLang might cut the prompts of others, too
        return 0
    page, tree = adder.page_size, adder.tree_cache
    # What is in host memory counts as not cached: SGLang loads it back when it knows how much it computes.
    needed = (-(-max(1, online.length(each) - cached_tokens(tree, each).on_device) // page) * page for each in first)
    return max(0, most - turns.chunk_tokens(needed, most, adder.page_size))


def _uncached(adder: Any, req: Any) -> int:
    """Return how many tokens of whole pages SGLang would compute of a request."""
    return int(adder.ceil_paged_tokens(len(req.full_untruncated_fill_ids) - len(req.prefix_indices)))


def _admits(adder: Any) -> bool:
    """Return whether the adder works for `admit`, which marks the running batch that both are given."""
    return getattr(adder.running_batch, "batchweave_admits", False)


HOOKS = [
    (f"{_ADDER}.__init__", reserve_for_online, HookType.AROUND),
    (f"{_ADDER}.add_one_req", add_one, HookType.AROUND),
    (f"{_ADDER}.add_chunked_req", continue_chunk, HookType.AROUND),
]
