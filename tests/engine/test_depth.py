"""Prompts that are beginnings of each other pass few nodes of SGLang's cache, and get the answers they get alone."""

import random
from array import array
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from engine_ext.plugin.scheduler.depth import is_bounded, match, may_insert, most_nodes, reach
from engine_ext.plugin.scheduler.radix import cached_tokens
from tests.engine.test_pins import Pool
from tests.engine.test_radix import Req, nodes
from tests.engine.test_real_scan import Real, Requests, running_real, tokens_of

LONGEST = 400


@pytest.fixture(scope="module")
def real(demo: Path, log: Path) -> Generator[Real, None, None]:
    with running_real(demo, log) as found:
        yield found


def growing_prompts() -> Requests:
    """Each prompt has one token more than the one before."""
    tokens = tokens_of(5)(LONGEST)
    return [(tokens[:size], 3) for size in range(LONGEST - 200, LONGEST)]


def shrinking_prompts() -> Requests:
    """Each prompt has one token less of the beginning than the one before, and ends otherwise."""
    tokens = tokens_of(6)
    prefix = tokens(LONGEST)
    return [(prefix[:size] + tokens(1), 3) for size in range(LONGEST, LONGEST - 200, -1)]


@pytest.mark.parametrize("workload", [growing_prompts, shrinking_prompts])
def test_answers_are_those_of_each_prompt_alone(real: Real, workload: Any) -> None:
    requests = workload()
    alone = [real.run("fcfs", [each], mixed=False)["answers"][0] for each in requests[::40]]
    ours = real.run(None, requests, mixed=True)
    assert ours["answers"][::40] == alone
    assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)
    assert ours["cached_tokens"] > 0.6 * sum(len(ids) for ids, _ in requests)


def test_a_look_up_in_a_deep_tree_passes_no_more_nodes_than_it_may() -> None:
    rng = random.Random(1)
    tree: Any = RadixCache.create_simulated(mock_allocator=Pool())
    tokens = array("q", rng.choices(range(9), k=2000))

    def look_up(size: int) -> Any:
        return match(RadixCache.match_prefix, tree, MatchPrefixParams(RadixKey(tokens[:size], None)))

    tree.insert(InsertParams(key=RadixKey(tokens, None), value=torch.arange(2000)))
    for size in range(1999, 1499, -1):  # each look-up splits a node
        assert len(look_up(size).device_indices) == size
    assert not is_bounded(tree)
    assert len(look_up(2000).device_indices) == 2000  # the last one that walks all of the path
    assert is_bounded(tree)
    key = RadixKey(tokens, None)
    assert reach(tree, key).is_over
    before = len(nodes(tree))
    found = look_up(2000)
    assert torch.equal(found.device_indices, torch.arange(len(found.device_indices)))
    assert 1500 <= len(found.device_indices) == cached_tokens(tree, Req(tokens)).tokens < 1500 + most_nodes(2000)
    assert len(nodes(tree)) == before, "SGLang remembers nodes while it looks others up"
    assert may_insert(tree, key)  # all nodes are one again
    assert torch.equal(look_up(2000).device_indices, torch.arange(2000))
    assert cached_tokens(tree, Req(tokens)).tokens == tree.evictable_size() == tree.total_size() == 2000


@pytest.mark.parametrize("page", [1, 4])
def test_what_may_be_inserted_is_found_as_a_whole(page: int) -> None:
    """In a tree of prompts that begin alike, end anywhere and are locked by chance."""
    rng = random.Random(page)
    tree: Any = RadixCache.create_simulated(mock_allocator=Pool(), page_size=page)
    tokens, refused = array("q", rng.choices(range(9), k=1500)), 0
    for _ in range(1500):
        ids = tokens[: rng.randrange(1, 1500)] + array("q", rng.choices(range(9), k=rng.randrange(3)))
        key = RadixKey(ids, None)
        if not may_insert(tree, key):
            refused += 1
            continue
        tree.insert(InsertParams(key=key, value=torch.arange(len(ids))))
        found = match(RadixCache.match_prefix, tree, MatchPrefixParams(key))
        assert len(found.device_indices) == len(ids) // page * page
        if rng.random() < 0.5:
            tree.inc_lock_ref(found.last_device_node)
    assert is_bounded(tree)
    assert refused > 0
    assert tree.total_size() == tree.evictable_size() + tree.protected_size()


def test_where_requests_end_a_path_is_followed_up_to_the_bound() -> None:
    """Every other node has another child, too."""
    tree: Any = RadixCache.create_simulated(mock_allocator=Pool())
    tokens, locked = array("q", range(1000)), list[Any]()

    def look_up(size: int) -> Any:
        return match(RadixCache.match_prefix, tree, MatchPrefixParams(RadixKey(tokens[:size], None)))

    for size in range(600, 1000):
        ids = tokens[:size] + array("q", [5000 + size]) if size % 2 else tokens[:size]
        tree.insert(InsertParams(key=RadixKey(ids, None), value=torch.arange(len(ids))))
        if size % 2 == 0:
            locked.append(tree.match_prefix(MatchPrefixParams(RadixKey(ids, None))).last_device_node)
            tree.inc_lock_ref(locked[-1])
    tree.insert(InsertParams(key=RadixKey(tokens, None), value=torch.arange(1000)))
    look_up(1000)
    assert is_bounded(tree)
    size = tree.total_size()
    found = look_up(1000)
    assert torch.equal(found.device_indices, torch.arange(len(found.device_indices)))
    assert 600 <= len(found.device_indices) <= 600 + 2 * most_nodes(1000)
    assert cached_tokens(tree, Req(tokens)).tokens == len(found.device_indices)
    assert len(reach(tree, RadixKey(tokens, None)).nodes) <= most_nodes(1000)
    assert tree.total_size() == tree.evictable_size() + tree.protected_size() == size
    assert not may_insert(tree, RadixKey(tokens, None))
    for each in locked:  # then all that branches off goes, and the path is one node again
        tree.dec_lock_ref(each)
    assert may_insert(tree, RadixKey(tokens, None))
    assert torch.equal(look_up(1000).device_indices, torch.arange(1000))
    assert tree.total_size() == tree.evictable_size() < size


def test_an_ordinary_conversation_is_not_bounded() -> None:
    """Each turn has a node for what is asked and one for the answer: 80 turns of 100 tokens."""
    assert most_nodes(80 * 100) >= 2 * 80
