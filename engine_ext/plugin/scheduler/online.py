"""Puts online requests, those without our mark, before the requests of batches in one scheduler.

Their prompts come first in each step, the step is as long as they need, SGLang's reservation for their answers holds,
and a batch's request is retracted before any of them.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.common import release_kv_cache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.marks import KIND

LOOKED_UP = 64  # waiting requests of which the cached part is looked up in each step


class Demand(NamedTuple):
    """What online requests need of the next step.

    `tokens`: prompt tokens, of those that wait and of a chunked prefill, up to the largest step. `waiting`: how many
    wait. `reserved`: KV tokens that SGLang reserves for answers to come.
    """

    tokens: int
    waiting: int
    reserved: int


NOBODY = Demand(0, 0, 0)


def is_ours(req: Any) -> bool:
    """Return whether one of our workers marked the request."""
    params = req.sampling_params.custom_params
    return isinstance(params, dict) and KIND in params


def demand(scheduler: Any, running: Iterable[Any], most: int) -> Demand:
    """Return what online requests need; `running` are the decoding ones, `most` is the largest step in tokens."""
    waiting, continued = scheduler.waiting_queue, scheduler.chunked_req
    ratio = scheduler.new_token_ratio_tracker.current
    tokens, reserved = 0, int(sum(ratio * reservation(req) for req in running))
    if continued is not None and not is_ours(continued):
        tokens += uncomputed_tokens(continued)
        reserved += reservation(continued)
    for place, req in enumerate(waiting):
        if tokens >= most:
            break
        cached = cached_tokens(scheduler, req) if place < LOOKED_UP else 0
        rest = max(1, length(req) - cached)
        tokens += -(-rest // scheduler.page_size) * scheduler.page_size
        reserved += reservation(req)
    return Demand(min(tokens, most), len(waiting), reserved)


def length(req: Any) -> int:
    """Return how many tokens the request has so far: its prompt, and what was answered before a retraction."""
    return len(req.origin_input_ids) + len(req.output_ids)


def uncomputed_tokens(continued: Any) -> int:
    """Return the prompt tokens that a chunked prefill still has to compute."""
    return length(continued) - len(continued.prefix_indices)


def reservation(req: Any) -> int:
    """Return the KV tokens that SGLang reserves for the rest of an answer, before its new token ratio."""
    return min(max(0, req.sampling_params.max_new_tokens - len(req.output_ids)), CLIP_MAX_NEW_TOKENS)


def cached_tokens(scheduler: Any, req: Any) -> int:
    """Return how many tokens of the request's prompt are in SGLang's radix cache."""
    key = RadixKey(req.origin_input_ids, req.extra_key)
    return len(scheduler.tree_cache.match_prefix(MatchPrefixParams(key)).device_indices)


def can_park(scheduler: Any) -> bool:
    """Return whether the chunked prefill can be stopped where it is, without losing what it has computed.

    SGLang attributes logprobs to prompts by their place in the step, and caches other than the plain one free what is
    in use in ways of their own.
    """
    return not scheduler.chunked_req.return_logprob and type(scheduler.tree_cache) is RadixCache


def park(scheduler: Any) -> Any:
    """Stop the chunked prefill and return its request; what it has computed stays in the cache for as long as it can.

    Do so between two steps, and do not show the request to SGLang again in the next one: with the overlap schedule the
    result of its last chunk is still to come, which SGLang drops as that of a retracted request.
    """
    req, scheduler.chunked_req = scheduler.chunked_req, None
    release_kv_cache(req, scheduler.tree_cache)
    req.reset_for_retract()
    return req


def retraction_order(original: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> list[int]:
    """Return the order in which SGLang keeps requests, with ours last: it retracts from the end."""
    order = original(reqs, *args, **kwargs)
    return sorted(order, key=lambda index: is_ours(reqs[index]))


HOOKS = [
    (
        "sglang.srt.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
        retraction_order,
        HookType.AROUND,
    )
]
