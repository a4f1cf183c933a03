"""Fixes what kills the scheduler of SGLang 0.5.17, and all its requests, when different kinds share a step."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType


def write_output(original: Callable[..., None], result: Any, *args: Any, **kwargs: Any) -> None:
    """Handle a request that asks for the log probabilities of some tokens, beside one that does not.

    The latter has an empty list among the tensors, which SGLang would then treat as a tensor.
    """
    import torch

    if result.token_ids_logprobs_val is not None:
        values = [torch.empty(0) if isinstance(each, list) else each for each in result.token_ids_logprobs_val]
        result.token_ids_logprobs_val = values
    original(result, *args, **kwargs)


def preprocess(original: Callable[..., Any], sampler: Any, logits: Any, sampling_info: Any) -> Any:
    """Return logits [requests, vocabulary] in which each row has a token that may come.

    A row of only minus infinity gives probabilities that are not numbers, and the sampler fails on all rows. Such a row
    comes, for example, from a grammar that allows only the end and a `min_tokens` that forbids it. The request of the
    row ends when its grammar is given the token.
    """
    logits = original(sampler, logits, sampling_info)
    return logits.masked_fill_(logits.amax(dim=-1, keepdim=True) == float("-inf"), 0.0)


HOOKS = [
    ("sglang.srt.layers.logprob_processor.LogprobResult.write_output_to", write_output, HookType.AROUND),
    ("sglang.srt.layers.sampler.Sampler._preprocess_logits", preprocess, HookType.AROUND),
]
