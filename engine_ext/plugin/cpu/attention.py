"""Gives attention on a CPU the same bits in any batch: computed in float64, rounded once to the model's dtype.

Torch's kernels sum a row in an order that depends on the lengths around it. In float64 that difference vanishes in the
rounding, so an answer at temperature 0 does not depend on the order of execution or on what the cache held.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"


def in_float64(original: Callable[..., Any], backend: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the attention with the query in float64."""
    # SGLang casts keys and values to the query's dtype, and the result to the output's.
    return original(backend, query.double(), *args, **kwargs)


HOOKS = [
    (f"{_BACKEND}._run_sdpa_forward_extend", in_float64, HookType.AROUND),
    (f"{_BACKEND}._run_sdpa_forward_decode", in_float64, HookType.AROUND),
]
