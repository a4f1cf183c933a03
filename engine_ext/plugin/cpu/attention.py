"""Computes attention on a CPU: of new tokens alone, and with the same bits in any batch where that is asked for.

Then it is computed in float64, and rounded once to the model's dtype. Torch's kernels sum a row in an order that
depends on the lengths around it. In float64 that difference vanishes in the rounding, so an answer at temperature 0
does not depend on the order of execution or on what the cache held.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from torch.nn.functional import scaled_dot_product_attention

from engine_ext.plugin.options import handed_over

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
ROWS = 512  # queries at one time, whose mask has 8 bytes for each key


def decode(original: Callable[..., Any], backend: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    # SGLang casts keys and values to the query's dtype, and the result to the output's.
    return original(backend, _widened(query), *args, **kwargs)


def _widened(values: Any) -> Any:
    options = handed_over()
    # Otherwise in float32: torch takes 2.2 ms for one query over 4,000 keys in bfloat16, and 0.3 ms in float32.
    return values.double() if options is None or options.cpu_threads is None else values.float()


def extend(
    original: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    extend_prefix_lens: Any,
    extend_seq_lens: Any,
    encoder_lens: Any = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Any:
    """Run the attention of new tokens alone.

    SGLang computes that of each cached token too, and drops it: a step whose requests share a long prompt took as long
    as if nothing were cached. Shapes are SGLang's: `query` and `output` [tokens, heads, size], the caches [slots,
    heads, size].
    """
    if encoder_lens is not None or not causal or sliding_window_size not in (None, -1):
        lengths = (seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa, causal)
        places = (k_cache, v_cache, req_to_token, req_pool_indices)
        return original(backend, _widened(query), output, *places, *lengths, is_cross_attn, sliding_window_size)
    lengths = zip(req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    wide, begin = _widened(query[:0]).dtype, 0
    for pool, prefix, new in lengths:
        slots = req_to_token[pool, : prefix + new]
        keys, values = (cache[slots].to(wide).movedim(0, 1).unsqueeze(0) for cache in (k_cache, v_cache))
        at_once = ROWS if prefix else new
        for first in range(0, new, at_once):
            rows = query[begin + first : begin + min(first + at_once, new)]
            seen = prefix + first + len(rows)
            found = scaled_dot_product_attention(
                rows.to(wide).movedim(0, 1).unsqueeze(0),
                keys[:, :, :seen],
                values[:, :, :seen],
                attn_mask=torch.ones(len(rows), seen, dtype=torch.bool).tril(seen - len(rows)) if prefix else None,
                is_causal=not prefix,
                enable_gqa=enable_gqa,
                scale=scaling,
            )
            output[begin + first : begin + first + len(rows)] = found.squeeze(0).movedim(1, 0)
        begin += new
    return output


HOOKS = [
    (f"{_BACKEND}._run_sdpa_forward_extend", extend, HookType.AROUND),
    (f"{_BACKEND}._run_sdpa_forward_decode", decode, HookType.AROUND),
]
