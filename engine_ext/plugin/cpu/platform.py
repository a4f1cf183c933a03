"""Runs SGLang's unmodified wheel on a CPU as an out-of-tree platform: for correctness and a first look, not speed."""

from collections.abc import Callable
from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


class CpuPlatform(CpuDeviceMixin, SRTPlatform):  # pyright: ignore[reportIncompatibleMethodOverride]
    """The CPU as a platform with torch-native kernels and KV pages of one token."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: Any) -> None:
        server_args.page_size = 1

    def get_device(self, device_id: int = 0) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> Callable[..., Any]:  # type: ignore[override]
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        def token_allocator(size: int, page_size: int, **kwargs: Any) -> Any:
            if page_size != 1:
                raise ValueError(f"the CPU platform supports only pages of one token, not {page_size}")
            return TokenToKVPoolAllocator(size, **kwargs)

        return token_allocator

    def get_dispatch_key_name(self) -> str:
        return "native"
