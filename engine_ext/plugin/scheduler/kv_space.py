"""Tells how much of a scheduler's KV cache is free, whatever pools its model has."""

from dataclasses import dataclass
from typing import Any

from sglang.srt.mem_cache.allocator.swa import PureSWATokenToKVPoolAllocator, SWATokenToKVPoolAllocator

from engine_ext.scan.decide import ANY_NUMBER


@dataclass(frozen=True, slots=True)
class KVSpace:
    """The KV cache of one scheduler.

    `capacity`: its tokens. `window`: tokens of a sliding window, or 0 without one. A model with sliding windows has a
    second, smaller pool, of which a request holds one window however long it grows. That pool bounds how many requests
    run, and not how long they are. `has_state`: whether recurrent layers keep a state for each request.
    `is_all_windows`: whether all layers have windows, so that there is one pool, which SGLang calls that of windows.
    """

    allocator: Any
    cache: Any
    capacity: int
    window: int
    has_state: bool = False
    is_all_windows: bool = False

    @classmethod
    def of(cls, scheduler: Any) -> "KVSpace":
        allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
        capacity, has_state = int(scheduler.max_total_num_tokens), bool(cache.supports_mamba())
        window = int(scheduler.sliding_window_size or 0) if isinstance(allocator, SWATokenToKVPoolAllocator) else 0
        is_all_windows = isinstance(allocator, PureSWATokenToKVPoolAllocator)
        return cls(allocator, cache, capacity, window, has_state, is_all_windows)

    @property
    def free(self) -> int:
        """The tokens that are free or can be evicted, in the pool that grows with the answers."""
        if self.is_all_windows:
            return int(self.allocator.swa_available_size() + self.cache.swa_evictable_size())
        if self.window:  # the smaller pool would hide what is free in this one
            return int(self.allocator.full_available_size() + self.cache.full_evictable_size())
        if self.has_state:
            return int(self.allocator.available_size() + self.cache.full_evictable_size())
        return int(self.allocator.available_size() + self.cache.evictable_size())

    @property
    def windows(self) -> int:
        """How many more requests have room in the pool of windows; any number without such a pool."""
        if not self.window or self.is_all_windows:
            return ANY_NUMBER
        free = int(self.allocator.swa_available_size() + self.cache.swa_evictable_size())
        return max(0, free) // self.window
