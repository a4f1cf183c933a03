"""Prefixes that the next request of each end of the scan will use: kept in the cache until it comes."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

LEAST = 16  # tokens that are worth it
MOST = 0.1  # of the KV cache, that one end may keep: pins without a bound would starve admission


class Pin(NamedTuple):
    req: Any
    node: Any
    root: Any


@dataclass(eq=False)
class Pins:
    """Of one scheduler's radix cache, at most one an end. `capacity`: tokens of KV cache."""

    tree: Any
    capacity: int
    tokens: int = 0
    _held: dict[int, Pin] = field(default_factory=dict[int, Pin])

    def keep(self, wanted: list[Any], again: bool) -> None:
        """Keep what is cached for these requests, one an end or None, and let go of the rest.

        `again`: the cache has changed, so that more may be there for the same request.
        """
        held = [self._held.get(end) for end in range(len(wanted))]
        if not again and all(
            (pin.req if pin is not None else None) is req for pin, req in zip(held, wanted, strict=True)
        ):
            return
        before, self._held, self.tokens = self._held, {}, 0
        for end, req in enumerate(wanted):
            if req is not None:
                self._pin(end, req)
        for pin in before.values():  # last, for what is kept must not be free in between
            self._let_go(pin)

    def _pin(self, end: int, req: Any) -> None:
        found = self.tree.match_prefix(MatchPrefixParams(RadixKey(req.origin_input_ids, req.extra_key)))
        size = len(found.device_indices)
        if LEAST <= size <= MOST * self.capacity:
            self.tree.inc_lock_ref(found.last_device_node)
            self._held[end] = Pin(req, found.last_device_node, self.tree.root_node)
            self.tokens += size

    def _let_go(self, pin: Pin) -> None:
        if pin.root is self.tree.root_node:  # the cache was not flushed meanwhile
            self.tree.dec_lock_ref(pin.node)
