"""Pins the cached prefixes that the next request of each end of the scan will use, until it comes."""

import operator
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from engine_ext.plugin.scheduler.radix import is_radix_cache

LEAST = 16  # tokens; shorter prefixes are not worth a pin
MOST = 0.1  # share of the KV cache that one end may pin: pins without a bound would starve admission


class Pin(NamedTuple):
    node: Any
    root: Any


@dataclass(eq=False)
class Pins:
    """The pins in one scheduler's radix cache, at most one per end. `capacity`: tokens of KV cache.

    Nothing is pinned in caches other than SGLang's radix cache, such as those of models with sliding windows, because
    they lock in ways of their own.
    """

    tree: Any
    capacity: int
    _wanted: list[Any] = field(default_factory=list[Any])
    _pins: list[Pin] = field(default_factory=list[Pin])

    @property
    def tokens(self) -> int:
        """The KV tokens that pins alone keep; what running requests use as well is theirs."""
        locks, nodes = Counter[int](), dict[int, Any]()
        for pin in self._pins:
            for node in _path(pin.node, pin.root):
                locks[id(node)] += 1
                nodes[id(node)] = node
        return sum(len(node.key) for name, node in nodes.items() if node.lock_ref == locks[name])

    def keep(self, wanted: list[Any], again: bool, room: int) -> None:
        """Pin what is cached for these requests, up to `room` tokens in all, and release all other pins.

        `again`: the cache has changed, so that it may hold more for the same requests.
        """
        is_same = len(wanted) == len(self._wanted) and all(map(operator.is_, wanted, self._wanted))
        if is_same and not again and self.tokens <= room:
            return
        before, self._pins, self._wanted = self._pins, [], wanted
        for pin in before:
            if pin.root is self.tree.root_node:  # the cache was not flushed since
                self.tree.dec_lock_ref(pin.node)
        for req in wanted:
            room -= self._pin(req, room)

    def release(self) -> None:
        """Release all pins."""
        self.keep([], again=False, room=0)

    def _pin(self, req: Any, room: int) -> int:
        """Pin what is cached for this request, unless that is too little or too much.

        Returns the tokens that nobody had locked before.
        """
        if not is_radix_cache(self.tree):
            return 0
        found = self.tree.match_prefix(MatchPrefixParams(RadixKey(req.origin_input_ids, req.extra_key)))
        size, path = len(found.device_indices), _path(found.last_device_node, self.tree.root_node)
        taken = sum(len(node.key) for node in path if node.lock_ref == 0)
        if not LEAST <= size <= MOST * self.capacity or taken > room:
            return 0
        self.tree.inc_lock_ref(found.last_device_node)
        self._pins.append(Pin(found.last_device_node, self.tree.root_node))
        return taken


def _path(node: Any, root: Any) -> Iterator[Any]:
    """Yield the nodes of a prefix, the last first, without the root."""
    while node is not root:
        yield node
        node = node.parent
