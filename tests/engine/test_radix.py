"""Counts what SGLang's radix cache holds for a request as SGLang itself does, and changes nothing in it."""

import random
from array import array
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from engine_ext.plugin.scheduler.radix import cached_tokens
from tests.engine.test_pins import Pool


@dataclass(eq=False)
class Req:
    origin_input_ids: Any
    extra_key: str | None = None
    return_logprob: bool = False
    logprob_start_len: int = -1


def some_tokens(rng: random.Random) -> Any:
    """Return up to 40 of three tokens, so that many begin alike."""
    return array("q", rng.choices(range(3), k=rng.randrange(41)))


def nodes(tree: Any) -> list[Any]:
    """Return all nodes of the tree, the root's children first."""
    found = list(tree.root_node.children.values())
    for each in found:
        found.extend(each.children.values())
    return found


@pytest.mark.parametrize("page", [1, 4])
def test_counts_are_those_of_sglang(page: int) -> None:
    rng = random.Random(page)
    tree: Any = RadixCache.create_simulated(mock_allocator=Pool(), page_size=page)
    for _ in range(200):
        tokens, salt = some_tokens(rng), rng.choice([None, "salt"])
        tree.insert(InsertParams(key=RadixKey(tokens, salt), value=torch.arange(len(tokens))))
    for _ in range(500):
        req = Req(some_tokens(rng), rng.choice([None, "salt", "other"]))
        before = len(nodes(tree))
        found = cached_tokens(tree, req)
        assert len(nodes(tree)) == before  # SGLang would have split a node
        theirs = tree.match_prefix(MatchPrefixParams(RadixKey(req.origin_input_ids, req.extra_key)))
        assert found == (len(theirs.device_indices), 0, 0)


def test_tokens_whose_log_probabilities_are_wanted_count_as_not_cached() -> None:
    tree: Any = RadixCache.create_simulated(mock_allocator=Pool())
    tokens = array("q", range(40))
    tree.insert(InsertParams(key=RadixKey(tokens, None), value=torch.arange(40)))
    found = [cached_tokens(tree, Req(tokens, None, True, start)).tokens for start in (-1, 0, 25)]
    assert found == [40, 0, 25]


def test_counts_what_is_only_on_the_host() -> None:
    rng = random.Random(3)
    tree: Any = RadixCache.create_simulated(mock_allocator=Pool())
    for _ in range(100):
        tokens = some_tokens(rng)
        tree.insert(InsertParams(key=RadixKey(tokens, None), value=torch.arange(len(tokens))))
    tree.__class__ = HiRadixCache  # the same tree, whose nodes may have a copy in host memory; it needs a GPU to start
    for each in nodes(tree):
        each.host_value = each.value
        if each.parent.evicted or rng.random() < 0.3:
            each.value = None
    seen = set[bool]()
    for _ in range(300):
        req = Req(some_tokens(rng))
        found = cached_tokens(tree, req)
        theirs = tree.match_prefix(MatchPrefixParams(RadixKey(req.origin_input_ids, None)))
        assert found == (len(theirs.device_indices), theirs.host_hit_length, 0)
        seen.add(found.on_host > 0)
    assert seen == {True, False}


def test_counts_what_running_requests_use() -> None:
    tree: Any = RadixCache.create_simulated(mock_allocator=Pool())
    system, first, second = (array("q", range(begin, begin + 10)) for begin in (0, 100, 200))
    for tokens in (system + first, system + second):
        tree.insert(InsertParams(key=RadixKey(tokens, None), value=torch.arange(20)))
    tree.inc_lock_ref(tree.match_prefix(MatchPrefixParams(RadixKey(system + first, None))).last_device_node)
    assert cached_tokens(tree, Req(system + first)) == (20, 0, 20)
    assert cached_tokens(tree, Req(system + second)) == (20, 0, 10)
    assert cached_tokens(tree, Req(second)) == (0, 0, 0)


def test_what_is_looked_up_is_evicted_last() -> None:
    tree: Any = RadixCache.create_simulated(mock_allocator=Pool())
    for first in (0, 1):
        tree.insert(InsertParams(key=RadixKey(array("q", [first] * 10), None), value=torch.arange(10)))
    older, newer = tree.root_node.children[0], tree.root_node.children[1]
    assert older.last_access_time < newer.last_access_time
    cached_tokens(tree, Req(array("q", [0] * 5)))
    assert older.last_access_time > newer.last_access_time
    cached_tokens(tree, Req(array("q", [1] * 5)), touches=False)  # the first rank alone foresees
    assert older.last_access_time > newer.last_access_time
