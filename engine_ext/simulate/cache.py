"""The radix cache over the nodes of the window's own prefix tree, with LRU eviction of what nobody uses."""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column, new_record
from engine_ext.compiled import compiled

Heap = list[tuple[int, int]]  # time of last use, node; what is not valid any more is skipped


class CacheTokens:
    """Tokens that are `free`, `locked` and `evictable`; prompt tokens `computed` so far, with their `quadratic` work.

    `uses`: how often something was used, as the clock of LRU.
    """

    free: int
    locked: int
    evictable: int
    computed: int
    uses: int
    quadratic: float


class Cache(NamedTuple):
    """The cache by node: `parent`, `begin` in its prompts, `size` in tokens, `users` that run, cached `children`, time
    `used` last.

    `extra`: output tokens kept behind a leaf; `cached`: whether it is there, or will be when what computes it is done;
    `ready`: whether that is done, and `stashed`: tokens of it that chunks have computed until then. `tokens`: the sums.
    """

    parent: Column
    begin: Column
    size: Column
    quadratic: NDArray[np.float64]
    users: Column
    children: Column
    used: Column
    extra: Column
    cached: NDArray[np.bool_]
    ready: NDArray[np.bool_]
    stashed: Column
    tokens: CacheTokens


def new_cache(parent: Column, begin: Column, end: Column, capacity: int) -> Cache:
    nodes = len(parent)
    cached = np.zeros(nodes, dtype=np.bool_)
    cached[0] = True  # the root holds nothing
    users = np.zeros(nodes, dtype=np.int64)
    users[0] = 1  # and never leaves
    tokens = new_record(CacheTokens)
    tokens.free = capacity
    return Cache(
        parent=parent.copy(),
        begin=begin.copy(),
        size=end - begin,
        quadratic=(end.astype(np.float64) ** 2 - begin.astype(np.float64) ** 2),
        users=users,
        children=np.zeros(nodes, dtype=np.int64),
        used=np.zeros(nodes, dtype=np.int64),
        extra=np.zeros(nodes, dtype=np.int64),
        cached=cached,
        ready=cached.copy(),
        stashed=np.zeros(nodes, dtype=np.int64),
        tokens=tokens,
    )


@compiled
def empty_heap() -> Heap:
    """Emptied, for the compiler tells a list's type by what was in it."""
    heap = [(0, 0)]
    heap.pop()
    return heap


@compiled
def evictable_leaves(cache: Cache) -> Heap:
    """The heap of a cache that is in use."""
    heap = empty_heap()
    for node in range(1, len(cache.parent)):
        if cache.cached[node] and cache.users[node] == 0 and cache.children[node] == 0:
            heappush(heap, (int(cache.used[node]), node))
    return heap


@compiled
def missing(cache: Cache, leaf: int) -> int:
    """Prompt tokens of the leaf's path that are not cached."""
    tokens, node = 0, leaf
    while not cache.cached[node]:
        tokens += cache.size[node]
        node = cache.parent[node]
    return tokens


@compiled
def unlocked(cache: Cache, leaf: int) -> int:
    """Tokens that locking the leaf's path would take from what is free or evictable."""
    tokens, node = 0, leaf
    while cache.users[node] == 0:
        tokens += cache.size[node]
        node = cache.parent[node]
    return tokens


@compiled
def twice(cache: Cache, leaf: int) -> tuple[int, float]:
    """Tokens of the leaf's path that another request is computing now, and their quadratic work."""
    tokens, quadratic, node = 0, 0.0, leaf
    while not cache.ready[node]:
        if cache.cached[node]:
            tokens += cache.size[node] - cache.stashed[node]
            quadratic += cache.quadratic[node] - work_of_first(cache, node, cache.stashed[node])
        node = cache.parent[node]
    return tokens, quadratic


@compiled
def work_of_first(cache: Cache, node: int, tokens: int) -> float:
    """Quadratic work of the first so many tokens of a node."""
    begin = float(cache.begin[node])
    return (begin + tokens) ** 2 - begin**2


@compiled
def stash(cache: Cache, leaf: int, tokens: int) -> None:
    """The first so many tokens of the leaf's path are computed and in the cache, as SGLang keeps every chunk."""
    node = leaf
    while not cache.ready[node]:
        cache.stashed[node] = min(max(tokens - cache.begin[node], 0), cache.size[node])
        node = cache.parent[node]


@compiled
def lock(cache: Cache, heap: Heap, leaf: int) -> tuple[int, float]:
    """A request starts: lock its path, cached or to be computed. Tokens to compute, and their quadratic work.

    There must be room for `unlocked` tokens. What is being computed counts as cached, so it is computed once.
    """
    tokens, quadratic, node = 0, 0.0, leaf
    while node != 0:
        if cache.users[node] == 0:
            if cache.cached[node]:
                cache.tokens.evictable -= cache.size[node]
            else:
                cache.tokens.free -= cache.size[node]
                cache.cached[node] = True
                cache.stashed[node] = 0
                cache.children[cache.parent[node]] += 1
                tokens += cache.size[node]
                quadratic += cache.quadratic[node]
            cache.tokens.locked += cache.size[node]
        cache.users[node] += 1
        node = cache.parent[node]
    make_free(cache, heap, 0)
    return tokens, quadratic


@compiled
def make_ready(cache: Cache, leaf: int) -> None:
    """What a request has computed is there for those that start from now on."""
    node = leaf
    while not cache.ready[node]:
        cache.ready[node] = True
        node = cache.parent[node]


@compiled
def touch(cache: Cache, leaf: int) -> None:
    """Count what is cached of the leaf's path as used now."""
    cache.tokens.uses += 1
    now, node = cache.tokens.uses, leaf
    while node != 0:
        if cache.ready[node]:
            cache.used[node] = now
        node = cache.parent[node]


@compiled
def grow(cache: Cache, heap: Heap, tokens: int) -> bool:
    """Lock so many tokens more for outputs; whether there was room."""
    if cache.tokens.free + cache.tokens.evictable < tokens:
        return False
    make_free(cache, heap, tokens)
    cache.tokens.free -= tokens
    cache.tokens.locked += tokens
    return True


@compiled
def release(cache: Cache, heap: Heap, leaf: int, outputs: int, kept: bool) -> None:
    """A request ends, or is retracted: unlock its path; its output tokens stay behind the leaf, or are given up."""
    cache.tokens.locked -= outputs
    if kept:
        cache.extra[leaf] += outputs
        cache.tokens.evictable += outputs
    else:
        cache.tokens.free += outputs
    cache.tokens.uses += 1
    now, node = int(cache.tokens.uses), leaf
    while node != 0:
        cache.users[node] -= 1
        cache.used[node] = now
        if cache.users[node] == 0:
            cache.tokens.locked -= cache.size[node]
            cache.tokens.evictable += cache.size[node]
            if cache.children[node] == 0:
                heappush(heap, (now, int(node)))
        node = cache.parent[node]


@compiled
def make_free(cache: Cache, heap: Heap, tokens: int) -> None:
    """Evict the least recently used leaves until so many tokens are free."""
    while cache.tokens.free < tokens and len(heap) > 0:
        time, node = heappop(heap)
        if not cache.cached[node] or cache.users[node] > 0 or cache.children[node] > 0:
            continue
        if cache.used[node] > time:  # it was touched meanwhile
            heappush(heap, (int(cache.used[node]), node))
            continue
        held = cache.size[node] + cache.extra[node]
        cache.extra[node] = 0
        cache.cached[node], cache.ready[node] = False, False
        cache.tokens.evictable -= held
        cache.tokens.free += held
        parent = cache.parent[node]
        cache.children[parent] -= 1
        if parent != 0 and cache.users[parent] == 0 and cache.children[parent] == 0:
            heappush(heap, (int(cache.used[parent]), int(parent)))
