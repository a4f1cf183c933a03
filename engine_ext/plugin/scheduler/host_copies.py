"""Follows SGLang's copies of KV cache in host memory (HiCache), whose room is not free until they are done.

With `--enable-hierarchical-cache` SGLang copies KV cache to host memory, and brings it back before it is used if
somebody needed the room in between.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.plugins.hook_registry import HookType


@dataclass(eq=False)
class HostCopies:
    """Follows the copies of one scheduler's KV cache; does nothing where SGLang makes none.

    Call `begin_step` and `finish` on all ranks or on none: SGLang lets the ranks agree on which copies are done.
    """

    scheduler: Any
    _leaving: set[int] = field(default_factory=set[int])  # SGLang's ids of the copies of those who left the engine

    @property
    def are_made(self) -> bool:
        return type(self.scheduler.tree_cache) is HiRadixCache

    @property
    def loaded_tokens(self) -> int:
        """The tokens that came back from host memory so far."""
        return getattr(self.scheduler.tree_cache, "batchweave_loaded", 0)

    def begin_step(self) -> None:
        """Collect the copies that are done; those that begin from now on wait for the step that runs.

        SGLang collects them only where it looks for prompts. It copies what is computed, but requests leave while their
        next token is being computed, into room that they give up. On a CPU the streams do nothing.
        """
        if self.are_made:
            tree = self.scheduler.tree_cache
            tree.check_hicache_events()
            for stream in (tree.cache_controller.write_stream, tree.cache_controller.load_stream):
                stream.wait_stream(self.scheduler.forward_stream)
            self._leaving &= tree.ongoing_write_through.keys()

    @contextmanager
    def following(self) -> Generator[None, None, None]:
        """Note the copies that begin inside as those of a request that leaves the engine."""
        before = set(self.scheduler.tree_cache.ongoing_write_through) if self.are_made else set[int]()
        yield
        if self.are_made:
            self._leaving |= self.scheduler.tree_cache.ongoing_write_through.keys() - before

    @property
    def leaving_tokens(self) -> int:
        """The KV tokens that are in use only until the copies of those who left are done."""
        sizes = dict[int, int]()
        for copy in self._leaving:
            node = self.scheduler.tree_cache.ongoing_write_through[copy][0]
            while node.parent is not None and node.lock_ref == 1:
                sizes[node.id] = len(node.key)
                node = node.parent
        return sum(sizes.values())

    def finish(self) -> None:
        """Wait until all copies that have begun are done, and with them the step that runs."""
        if self.are_made:
            for copy in self.scheduler.tree_cache.cache_controller.ack_write_queue:
                copy.finish_event.synchronize()
            self.scheduler.tree_cache.check_hicache_events()
            self._leaving.clear()


def load_back(original: Callable[..., Any], tree: Any, *args: Any, **kwargs: Any) -> Any:
    """Count the tokens that SGLang brings back."""
    found = original(tree, *args, **kwargs)
    if found is not None:
        tree.batchweave_loaded = getattr(tree, "batchweave_loaded", 0) + len(found)
    return found


HOOKS = [("sglang.srt.mem_cache.hiradix_cache.HiRadixCache.load_back", load_back, HookType.AROUND)]
