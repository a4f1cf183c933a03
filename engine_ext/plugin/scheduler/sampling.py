"""What SGLang 0.5.17 gets wrong where requests of several kinds share a step: its scheduler dies, with all of them."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType


def write_output(original: Callable[..., None], result: Any, *args: Any, **kwargs: Any) -> None:
    """Of a request that asks for the log probabilities of some tokens, beside one that does not.

    The latter has an empty list among the tensors, which is then asked for its values as a tensor is.
    """
    import torch

    if result.token_ids_logprobs_val is not None:
        values = [torch.empty(0) if isinstance(each, list) else each for each in result.token_ids_logprobs_val]
        result.token_ids_logprobs_val = values
    original(result, *args, **kwargs)


def preprocess(original: Callable[..., Any], sampler: Any, logits: Any, sampling_info: Any) -> Any:
    """Logits [requests, vocabulary] of which each row has a token that may come.

    A row of minus infinity alone, as of a grammar that allows only the end and a `min_tokens` that forbids it, has
    probabilities that are no numbers, and the sampler fails on all rows. Its own request ends when the grammar is told.
    """
    logits = original(sampler, logits, sampling_info)
    return logits.masked_fill_(logits.amax(dim=-1, keepdim=True) == float("-inf"), 0.0)


HOOKS = [
    ("sglang.srt.layers.logprob_processor.LogprobResult.write_output_to", write_output, HookType.AROUND),
    ("sglang.srt.layers.sampler.Sampler._preprocess_logits", preprocess, HookType.AROUND),
]
