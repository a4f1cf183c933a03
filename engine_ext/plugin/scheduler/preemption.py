"""Takes requests of batches off the engine for online requests, and leaves what they have computed in the radix cache.

A request that comes again finds its KV cache there, unless somebody needed the room: then it computes one token again
(HyGen 4.1, "maintain their execution state"). SGLang's own retraction gives the KV cache up at once.
"""

from typing import Any

from sglang.srt.mem_cache.common import release_kv_cache

from engine_ext.plugin.scheduler.radix import is_radix_cache


def can_park(scheduler: Any) -> bool:
    """Return whether the chunked prefill can be stopped where it is, without losing what it has computed.

    SGLang attributes logprobs to prompts by their place in the step, and caches other than the radix cache free what
    is in use in ways of their own.
    """
    return not scheduler.chunked_req.return_logprob and is_radix_cache(scheduler.tree_cache)


def park(scheduler: Any) -> Any:
    """Stop the chunked prefill and return its request; what it has computed stays in the cache for as long as it can.

    Do so between two steps, and do not show the request to SGLang again in the next one: with the overlap schedule the
    result of its last chunk is still to come, which SGLang drops as that of a retracted request.
    """
    req, scheduler.chunked_req = scheduler.chunked_req, None
    release_kv_cache(req, scheduler.tree_cache)
    req.reset_for_retract()
    return req


def can_take_off(scheduler: Any) -> bool:
    """Return whether decoding requests can be taken off: other caches free what is in use in ways of their own."""
    return is_radix_cache(scheduler.tree_cache)


def keeps_its_answer(req: Any) -> bool:
    """Return whether a decoding request gets the same answer if it is taken off.

    SGLang does not tell its penalties what a retracted request has generated, and attributes the logprobs of prompts by
    their place in a step that may still run.
    """
    params = req.sampling_params
    penalized = params.frequency_penalty or params.presence_penalty or params.repetition_penalty != 1.0
    return not (penalized or params.min_new_tokens or req.return_logprob)


def release(scheduler: Any, req: Any) -> None:
    """Give up what a decoding request holds; its KV cache stays in the radix cache until somebody needs the room.

    Then take it out of the batch (`leave`), and do not show it to SGLang again in the same step. With the overlap
    schedule its next token is still being computed; SGLang drops it as that of a retracted request.
    """
    release_kv_cache(req, scheduler.tree_cache)
    req.reset_for_retract()


def leave(running: Any, reqs: list[Any]) -> None:
    """Take released requests out of the batch that decodes."""
    if reqs:
        gone = set(reqs)
        running.filter_batch(keep_indices=[place for place, req in enumerate(running.reqs) if req not in gone])
        running.batch_is_full = False
