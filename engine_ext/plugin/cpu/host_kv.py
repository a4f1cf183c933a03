"""Lets SGLang keep copies of KV cache in host memory (HiCache) on a CPU, where its copies are kernels for GPUs only."""

from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.pool_host import base
from sglang.srt.plugins.hook_registry import HookType

_POOL = "sglang.srt.mem_cache.pool_host.mha.MHATokenToKVPoolHost"
_LAYOUTS = ("layer_first", "page_first")  # those in which SGLang has a view of each layer, whole


def create(original: Callable[..., None], pool: Any, *args: Any, **kwargs: Any) -> None:
    """Create the pool in pageable memory: on a CPU, host and device memory are the same.

    SGLang would leave 10 GB of the host's memory free, which is more than a small or a busy machine has.
    """
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    original(pool, *args, **{**kwargs, "pin_memory": False})
    if pool.layout not in _LAYOUTS:
        raise ValueError(f"on a CPU --hicache-mem-layout is one of {', '.join(_LAYOUTS)}, not {pool.layout}")


def copy_to_host(host: Any, device: Any, host_indices: Any, device_indices: Any, io_backend: str) -> None:
    """Copy these tokens' keys and values of all layers."""
    for layer in range(host.layer_num):
        host.k_data_refs[layer][host_indices] = device.k_buffer[layer][device_indices]
        host.v_data_refs[layer][host_indices] = device.v_buffer[layer][device_indices]


def copy_to_device(host: Any, device: Any, host_indices: Any, device_indices: Any, layer: int, io_backend: str) -> None:
    """Bring these tokens' keys and values of one layer back."""
    device.k_buffer[layer][device_indices] = host.k_data_refs[layer][host_indices]
    device.v_buffer[layer][device_indices] = host.v_data_refs[layer][host_indices]


HOOKS = [
    (f"{_POOL}.__init__", create, HookType.AROUND),
    (f"{_POOL}.backup_from_device_all_layer", copy_to_host, HookType.REPLACE),
    (f"{_POOL}.load_to_device_per_layer", copy_to_device, HookType.REPLACE),
]
