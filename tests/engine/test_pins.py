"""Prefixes kept in SGLang's own radix cache."""

from array import array
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from engine_ext.plugin.scheduler.pins import Pins


class Pool:
    """Counts what the cache gives back, and frees nothing: there is no KV cache."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.freed = 0

    def free_segment(self, indices: torch.Tensor, start_pos: int) -> None:
        self.freed += len(indices)


@dataclass(eq=False)
class Req:
    origin_input_ids: Any
    extra_key: str | None = None


def ids(first: int, count: int) -> Any:
    return array("q", range(first, first + count))


@pytest.fixture
def tree() -> Any:
    return RadixCache.create_simulated(mock_allocator=Pool())


def insert(tree: Any, tokens: Any) -> None:
    tree.insert(InsertParams(key=RadixKey(tokens, None), value=torch.arange(len(tokens))))


def cached(tree: Any, tokens: Any) -> int:
    return len(tree.match_prefix(MatchPrefixParams(RadixKey(tokens, None))).device_indices)


def test_what_the_next_ones_use_is_not_evicted_until_they_change(tree: Any) -> None:
    left, right, other = ids(0, 100), ids(1000, 200), ids(5000, 300)
    for tokens in (left, right, other):
        insert(tree, tokens)
    pins = Pins(tree, 10_000)
    pins.keep([Req(left + ids(90_000, 5)), Req(right)], again=False, room=10_000)
    assert pins.tokens == 300
    tree.evict(EvictParams(num_tokens=600))
    assert (cached(tree, left), cached(tree, right), cached(tree, other)) == (100, 200, 0)
    pins.keep([Req(right)], again=False, room=10_000)
    tree.evict(EvictParams(num_tokens=600))
    assert (cached(tree, left), cached(tree, right)) == (0, 200)
    pins.release()
    assert pins.tokens == 0
    assert tree.protected_size() == 0
    tree.evict(EvictParams(num_tokens=600))
    assert tree.evictable_size() == 0


def test_the_same_request_is_looked_up_again_when_more_is_cached(tree: Any) -> None:
    waiting = Req(ids(0, 400))
    insert(tree, ids(0, 100))
    pins = Pins(tree, 10_000)
    pins.keep([waiting], again=False, room=10_000)
    insert(tree, ids(0, 300))
    pins.keep([waiting], again=False, room=10_000)
    assert pins.tokens == 100
    pins.keep([waiting], again=True, room=10_000)
    assert pins.tokens == tree.protected_size() == 300


def test_what_runs_is_not_kept_by_pins(tree: Any) -> None:
    system, more = ids(0, 100), ids(0, 160)
    insert(tree, system)
    insert(tree, more)
    pins = Pins(tree, 10_000)
    pins.keep([Req(more), Req(system)], again=False, room=10_000)
    assert pins.tokens == 160
    running = tree.match_prefix(MatchPrefixParams(RadixKey(system, None))).last_device_node
    tree.inc_lock_ref(running)
    assert pins.tokens == 60
    tree.dec_lock_ref(running)
    assert pins.tokens == 160


def test_a_prefix_that_runs_takes_no_room(tree: Any) -> None:
    insert(tree, ids(0, 300))
    tree.inc_lock_ref(tree.match_prefix(MatchPrefixParams(RadixKey(ids(0, 300), None))).last_device_node)
    pins = Pins(tree, 10_000)
    pins.keep([Req(ids(0, 300))], again=False, room=1)
    node = tree.match_prefix(MatchPrefixParams(RadixKey(ids(0, 300), None))).last_device_node
    assert (node.lock_ref, pins.tokens) == (2, 0)
    tree.dec_lock_ref(node)
    assert pins.tokens == 300


def test_too_much_is_not_kept_and_too_little_neither(tree: Any) -> None:
    insert(tree, ids(0, 1100))
    insert(tree, ids(5000, 10))
    pins = Pins(tree, 10_000)
    pins.keep([Req(ids(0, 1100)), Req(ids(5000, 10))], again=False, room=10_000)
    assert pins.tokens == tree.protected_size() == 0


def test_pins_leave_room_for_what_runs(tree: Any) -> None:
    """They may have what is free beside it, the first end before the second, and give back what no longer is."""
    left, right = Req(ids(0, 300)), Req(ids(5000, 200))
    for each in (left, right):
        insert(tree, each.origin_input_ids)
    pins = Pins(tree, 10_000)
    pins.keep([left, right], again=False, room=400)
    assert pins.tokens == tree.protected_size() == 300
    pins.keep([left, right], again=False, room=250)
    assert pins.tokens == tree.protected_size() == 200
    pins.keep([left, right], again=False, room=0)
    assert pins.tokens == tree.protected_size() == 0


def test_a_flush_leaves_nothing_to_let_go_of(tree: Any) -> None:
    insert(tree, ids(0, 100))
    pins = Pins(tree, 10_000)
    pins.keep([Req(ids(0, 100))], again=False, room=10_000)
    tree.reset()
    pins.release()
    assert tree.protected_size() == 0
    insert(tree, ids(0, 100))
    assert tree.evictable_size() == 100


def test_a_prefix_of_both_ends_counts_once_and_nothing_is_asked_twice(tree: Any) -> None:
    insert(tree, ids(0, 100))
    both = [Req(ids(0, 100) + ids(7000, 3)), Req(ids(0, 100) + ids(8000, 3))]
    pins = Pins(tree, 10_000)
    pins.keep(both, again=False, room=10_000)
    assert pins.tokens == tree.protected_size() == 100
    tree.match_prefix = None  # asking again would fail
    pins.keep(list(both), again=False, room=10_000)
    pins.release()
    assert tree.protected_size() == 0


def test_caches_that_lock_in_their_own_way_are_left_alone(tree: Any) -> None:
    class Other(RadixCache):
        pass

    other = Other.create_simulated(mock_allocator=Pool())
    other.__class__ = Other
    insert(other, ids(0, 100))
    pins = Pins(other, 10_000)
    pins.keep([Req(ids(0, 100))], again=False, room=10_000)
    assert other.protected_size() == 0
