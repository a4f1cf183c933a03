"""Gives a benchmark's model random weights by which the KV cache decides the answers.

SGLang's dummy weights, norms included, are within 0.001 of 0, with one seed for all layers: all tokens are nearly as
likely, and answers hardly change if the KV cache is wrong.
"""

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

SPREAD = 0.02  # standard deviation, as most models begin their training


def fill(result: Any, model: torch.nn.Module, *_args: Any, **_kwargs: Any) -> Any:
    """Fill matrices with normal numbers, each with a seed of its own, and vectors (norms) with ones."""
    for number, weights in enumerate(model.parameters()):
        if not weights.is_floating_point():
            continue
        generator = torch.Generator(weights.device).manual_seed(number)
        if weights.dim() == 1:
            weights.data.fill_(1.0)
        else:
            weights.data.normal_(0.0, SPREAD, generator=generator)
    return result


HOOKS = [("sglang.srt.model_loader.loader.initialize_dummy_weights", fill, HookType.AFTER)]
