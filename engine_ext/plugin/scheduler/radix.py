"""Says which of SGLang's caches keep what a request had computed when it leaves the engine."""

from typing import Any

from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache


def is_radix_cache(tree: Any) -> bool:
    """Return whether this is SGLang's radix cache, with or without copies in host memory.

    Other caches, such as those of models with sliding windows, lock and free what is in use in ways of their own.
    """
    return type(tree) is RadixCache or type(tree) is HiRadixCache
