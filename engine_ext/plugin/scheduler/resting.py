"""Leaves decodes of batches out of one step, so that it ends in time for online requests (OOCO algorithm 2).

SGLang decodes all that is in its running batch. Those left out are in a batch of their own while it decides a step and
launches it, and come back before anybody looks again. Their KV cache and their request slots stay theirs.
"""

from copy import copy
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixCache


def can_rest(scheduler: Any, running: Any) -> bool:
    """Return whether a part of this batch can be left out of a step, and join it again, with nothing lost.

    SGLang's penalties and processors of logits hold a state that two batches cannot share. Other caches, and batches
    with images or drafts, have tensors of their own for what decodes.
    """
    sampling = running.sampling_info
    if running.is_empty() or sampling is None or running.return_logprob or running.spec_info is not None:
        return False
    has_state = sampling.penalizer_orchestrator.is_required or sampling.has_custom_logit_processor
    has_images = any(each is not None for each in running.multimodal_inputs or ())
    is_plain = type(scheduler.tree_cache) is RadixCache and not running.model_config.is_encoder_decoder
    return is_plain and not (has_state or has_images)


def set_apart(running: Any, reqs: set[Any]) -> Any:
    """Take these requests out of the batch that decodes, and return them as a batch of their own."""
    resting = copy(running)
    resting.sampling_info = copy(running.sampling_info)
    places = [place for place, req in enumerate(running.reqs) if req in reqs]
    resting.filter_batch(keep_indices=places)
    running.filter_batch(keep_indices=[place for place, req in enumerate(running.reqs) if req not in reqs])
    return resting


def join(running: Any, resting: Any) -> Any:
    """Return the batch of all that decodes."""
    if running.is_empty():
        resting.batch_is_full = running.batch_is_full
        return resting
    running.merge_batch(resting)
    return running
