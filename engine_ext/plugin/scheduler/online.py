"""Puts online requests, those without our mark, before the requests of batches in one scheduler.

Their prompts come first in each step, the step is as long as they need, SGLang's reservation for their answers holds,
and a batch's request is retracted before any of them.
"""

from typing import Any, NamedTuple

from sglang.srt.managers.schedule_policy import CLIP_MAX_NEW_TOKENS
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.coserve.slo import DEFAULT, NAMES
from engine_ext.plugin.marks import KIND, slo_of
from engine_ext.plugin.scheduler.radix import Cached, cached_tokens
from engine_ext.step.view import NO_ONLINE, Online

RANKS = {name: rank for rank, name in enumerate(NAMES)}  # of classes in the queue
LOOKED_UP = 64  # waiting requests of which the cached part is looked up in each step


class Demand(NamedTuple):
    """What online requests need of the next step.

    `decoding`: those that decode. `prompts`: those whose prompts wait or are being computed; `waiting`: how many of
    them wait. `tokens`: prompt tokens that these still have to compute, up to the largest step; `before`: those of the
    first of them that are computed. `kv`: KV tokens that the prompts which the step reaches will take. `first`: those
    that must be free for the one that is being computed and for the first that waits. `reserved`: KV tokens that SGLang
    reserves for answers to come.
    """

    decoding: list[Any]
    prompts: list[Any]
    waiting: int
    tokens: int
    before: int
    kv: int
    first: int
    reserved: int

    @property
    def needs(self) -> Online:
        """The same as a step sees it, where nobody knows deadlines."""
        prompts = len(self.prompts)
        return NO_ONLINE._replace(
            decoding=len(self.decoding),
            due=prompts,
            prompts=prompts,
            waiting=self.waiting,
            tokens=self.tokens,
            due_tokens=self.tokens,
            before=self.before,
            kv=self.kv,
            first=self.first,
            reserved=self.reserved,
        )


NOBODY = Demand([], [], 0, 0, 0, 0, 0, 0)


def is_ours(req: Any) -> bool:
    """Return whether one of our workers marked the request."""
    params = req.sampling_params.custom_params
    return isinstance(params, dict) and KIND in params


def rank(req: Any) -> int:
    """Return the place of an online request's class; 0 is the strongest."""
    return RANKS.get(slo_of(req), RANKS[DEFAULT])


def demand(scheduler: Any, decoding: list[Any], most: int) -> Demand:
    """Return what online requests need; `decoding` are those that decode, `most` is the largest step in tokens."""
    waiting, continued = scheduler.waiting_queue, scheduler.chunked_req
    ratio, page = scheduler.new_token_ratio_tracker.current, scheduler.page_size
    prompts, tokens, kv, before, first = list(waiting), 0, 0, 0, 0
    reserved = int(sum(ratio * reservation(req) for req in decoding))
    if continued is not None and not is_ours(continued):
        prompts.insert(0, continued)
        tokens, before = uncomputed_tokens(continued), len(continued.prefix_indices)
        kv = tokens
        reserved += reservation(continued)
        first = kv + reserved
    for place, req in enumerate(waiting):
        if tokens >= most:
            break
        cached = cached_tokens(scheduler.tree_cache, req) if place < LOOKED_UP else Cached(0)
        kv += -(-max(1, length(req) - cached.on_device) // page) * page
        tokens += -(-max(1, length(req) - cached.tokens) // page) * page
        if place == 0:  # what only the cache keeps of its prompt is free now, and in use then
            before = before or cached.tokens
            first = cached.on_device - cached.in_use + kv + reserved + reservation(req)
        reserved += reservation(req)
    return Demand(decoding, prompts, len(waiting), min(tokens, most), before, kv, first, reserved)


def those_here(scheduler: Any, running: Any) -> Demand:
    """Return the online requests of a scheduler that has no others, without what they need."""
    continued = scheduler.chunked_req
    prompts = [*scheduler.waiting_queue, *([] if continued is None else [continued])]
    return NOBODY._replace(decoding=running.reqs, prompts=prompts)


def length(req: Any) -> int:
    """Return how many tokens the request has so far: its prompt, and what was answered before a retraction."""
    return len(req.origin_input_ids) + len(req.output_ids)


def uncomputed_tokens(continued: Any) -> int:
    """Return the prompt tokens that a chunked prefill still has to compute."""
    return length(continued) - len(continued.prefix_indices)


def reservation(req: Any) -> int:
    """Return the KV tokens that SGLang reserves for the rest of an answer, before its new token ratio."""
    return min(max(0, req.sampling_params.max_new_tokens - len(req.output_ids)), CLIP_MAX_NEW_TOKENS)


def retraction_order(original: Any, reqs: list[Any], *args: Any, **kwargs: Any) -> list[int]:
    """Return the order in which SGLang keeps requests: stronger classes first, ours last. It retracts from the end."""
    order = original(reqs, *args, **kwargs)
    return sorted(order, key=lambda index: (is_ours(reqs[index]), rank(reqs[index])))


HOOKS = [
    (
        "sglang.srt.managers.schedule_batch.ScheduleBatch._get_decode_retraction_order",
        retraction_order,
        HookType.AROUND,
    )
]
