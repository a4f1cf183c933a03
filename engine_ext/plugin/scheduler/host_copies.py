"""Knows which of SGLang's caches keep what a request had computed, and waits for their copies in host memory.

With `--enable-hierarchical-cache` (HiCache) SGLang copies KV cache to host memory, and brings it back before it is used
if somebody needed the room in between. Until a copy is done, its room on the device is not free.
"""

from typing import Any

from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache


def is_plain(tree: Any) -> bool:
    """Return whether the cache is SGLang's radix cache, with or without copies in host memory.

    Others, such as those of models with sliding windows, lock and free what is in use in ways of their own.
    """
    return type(tree) is RadixCache or type(tree) is HiRadixCache


def follow_the_step(scheduler: Any) -> None:
    """Let copies that begin from now on wait for the step that runs, which may still compute what they copy.

    SGLang itself copies only what is computed. We take requests off while their next token is being computed.
    """
    tree = scheduler.tree_cache
    if type(tree) is HiRadixCache:
        tree.cache_controller.write_stream.wait_stream(scheduler.forward_stream)


def finish(scheduler: Any) -> None:
    """Wait until the copies that have begun are done, so that the room of those who left is free now.

    It takes as long as the step that runs and the copies. Call it on all ranks or on none, because SGLang lets them
    agree on which copies are done.
    """
    tree = scheduler.tree_cache
    if type(tree) is HiRadixCache:
        for copy in tree.cache_controller.ack_write_queue:
            copy.finish_event.synchronize()
        tree.check_hicache_events()
