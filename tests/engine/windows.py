"""Lets SGLang run a model with sliding windows on the CPU: its two pools, radix cache and scheduler are SGLang's own.

SGLang gives a platform from outside one pool, and its plain attention reads a window's layers where the other pool has
the tokens. On a GPU neither is so.
"""

from collections.abc import Callable
from typing import Any

WINDOW = 64


class _AsIfInside:
    """Our CPU platform, for which SGLang makes the pools that it makes for a GPU."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_out_of_tree(self) -> bool:
        return False


class _Places:
    """SGLang's table of a request's tokens, as places in the pool of windows."""

    def __init__(self, table: Any, in_windows: Any) -> None:
        self._table, self._in_windows = table, in_windows

    @property
    def req_to_token(self) -> "_Places":
        return self

    def __getitem__(self, at: Any) -> Any:
        return self._in_windows[self._table[at].long()]


def install() -> None:
    """Patch the process of an engine before it starts; the scheduler is forked from it."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.mem_cache import kv_cache_configurator

    kv_cache_configurator.current_platform = _AsIfInside(kv_cache_configurator.current_platform)  # type: ignore[assignment]
    for name in ("forward_extend", "forward_decode"):
        setattr(TorchNativeAttnBackend, name, _in_windows(getattr(TorchNativeAttnBackend, name)))


def _in_windows(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(backend: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        table, pool = backend.req_to_token_pool, backend.token_to_kv_pool
        if pool.layers_mapping[layer.layer_id][1]:
            layer.sliding_window_size = WINDOW - 1  # which the demo's layers do not say themselves
            backend.req_to_token_pool = _Places(table.req_to_token, pool.full_to_swa_index_mapping)
        try:
            return forward(backend, q, k, v, layer, *args, **kwargs)
        finally:
            backend.req_to_token_pool = table

    return run
