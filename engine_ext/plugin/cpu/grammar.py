"""Provides structured output without a GPU; SGLang pins xgrammar's bitmask and applies it by GPU kernels only."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

_MODULE = "sglang.srt.constrained.xgrammar_backend"


def allocate_bitmask(vocab_size: int, batch_size: int) -> Any:
    """Return an int32 mask [batch_size, ceil(vocab_size / 32)] in pageable memory, with all tokens allowed."""
    import torch
    from xgrammar import bitmask_dtype, get_bitmask_shape

    return torch.full(get_bitmask_shape(batch_size, vocab_size), -1, dtype=bitmask_dtype)


def apply_mask(original: Callable[..., None], *owner: Any, logits: Any, vocab_mask: Any) -> None:
    """Apply a mask; `owner`: the grammar, or the backend where a request that only thinks has none."""
    import xgrammar

    if logits.device.type == "cpu":
        xgrammar.apply_token_bitmask_inplace(logits, vocab_mask)
    else:
        original(*owner, logits=logits, vocab_mask=vocab_mask)


HOOKS = [
    (f"{_MODULE}._allocate_token_bitmask", allocate_bitmask, HookType.REPLACE),
    (f"{_MODULE}.XGrammarGrammar.apply_vocab_mask", apply_mask, HookType.AROUND),
    (f"{_MODULE}.XGrammarGrammarBackend.apply_vocab_mask", apply_mask, HookType.AROUND),
]
