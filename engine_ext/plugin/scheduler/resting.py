"""Leaves decodes of batches out of one step, so that it ends in time for online requests (OOCO algorithm 2).

SGLang decodes all that is in its running batch. Those left out are in a batch of their own while it decides a step and
launches it, and come back before the next one. Their KV cache and their request slots stay theirs.
"""

from collections.abc import Callable, Mapping
from copy import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.arrays import Column
from engine_ext.coserve.predictor import Load
from engine_ext.plugin.scheduler.admission import admission_of
from engine_ext.plugin.scheduler.member import Member
from engine_ext.plugin.scheduler.online import length
from engine_ext.plugin.scheduler.radix import is_radix_cache


def can_rest(scheduler: Any, running: Any) -> bool:
    """Return whether a part of this batch can be left out of a step, and join it again, with nothing lost.

    SGLang's penalties and processors of logits hold a state that cannot be divided. Other caches, and batches with
    images or drafts, have tensors of their own for what decodes. Adapters are counted by those that decode.
    """
    sampling = running.sampling_info
    if running.is_empty() or sampling is None or running.return_logprob or running.spec_info is not None:
        return False
    has_state = sampling.penalizer_orchestrator.is_required or sampling.has_custom_logit_processor
    has_images = any(each is not None for each in running.multimodal_inputs or ())
    is_plain = is_radix_cache(scheduler.tree_cache) and not running.model_config.is_encoder_decoder
    return is_plain and not (has_state or has_images or scheduler.enable_lora)


def split(running: Any, members: Mapping[Any, Member], may_rest: bool) -> tuple[Load, Column, Column, list[Any]]:
    """Return the load of the decodes that are in any step, and the requests that a step may leave out, with columns.

    The columns are their KV tokens, and for how many steps running each was left out. `members`: the requests of
    batches. One that is aborted ends by decoding once more, so it may not rest.
    """
    able = list[Any]()
    count = tokens = 0
    for req in running.reqs:
        if req.finished():
            continue
        if may_rest and req in members and req.to_finish is None:
            able.append(req)
        else:
            count, tokens = count + 1, tokens + length(req)
    kv = np.array([length(req) for req in able], dtype=np.int64)
    skipped = np.array([members[req].skipped for req in able], dtype=np.int64)
    return Load(0, 0.0, 0, count, tokens), kv, skipped, able


def set_apart(running: Any, reqs: set[Any]) -> Any:
    """Take these requests out of the batch that decodes, and return them as a batch of their own."""
    resting = copy(running)
    resting.sampling_info = copy(running.sampling_info)
    resting.filter_batch(keep_indices=[place for place, req in enumerate(running.reqs) if req in reqs])
    running.filter_batch(keep_indices=[place for place, req in enumerate(running.reqs) if req not in reqs])
    own = copy(running.sampling_info.penalizer_orchestrator)  # of no use yet, but the next request may need one
    own.batch, own.penalizers = resting, {kind: kind(own) for kind in own.penalizers}
    resting.sampling_info.penalizer_orchestrator = own
    return resting


def join(running: Any, resting: Any) -> Any:
    """Return the batch of all that decodes."""
    if running.is_empty():
        resting.batch_is_full = running.batch_is_full
        return resting
    running.merge_batch(resting)
    return running


class HoldingKV:
    """Tells SGLang's check of the KV cache after each step who holds tokens beside the last step's requests.

    It replaces the checker's view of the batch that decodes, of which some may rest. The check is off unless
    SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY is set.
    """

    def __init__(self, scheduler: Any, ask_sglang: Callable[[], Any]) -> None:
        self._scheduler, self._ask_sglang = scheduler, ask_sglang

    def __call__(self) -> Any:
        running, apart = self._ask_sglang(), admission_of(self._scheduler).resting
        if apart is None:
            return running
        if running is None or running is self._scheduler.last_batch:  # SGLang counts the last batch anyway
            return apart
        return SimpleNamespace(reqs=[*running.reqs, *apart.reqs], is_empty=lambda: False)

    @classmethod
    def show_to(cls, scheduler: Any) -> None:
        checker = scheduler.invariant_checker
        if not isinstance(checker.get_running_batch, cls):
            checker.get_running_batch = cls(scheduler, checker.get_running_batch)


def correct_positions(_result: Any, batch: Any, running_batch: Any) -> None:
    """Correct the positions of decodes that ride in a batch of prompts.

    With the overlap schedule SGLang takes it that the last token of each is still being computed, which is not so for
    one that rested in the step before.
    """
    if running_batch.seq_lens_cpu is not None:
        riding = len(running_batch.reqs)
        batch.prefix_lens[len(batch.prefix_lens) - riding :] = (running_batch.seq_lens_cpu - 1).tolist()


HOOKS = [("sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running", correct_positions, HookType.AFTER)]
