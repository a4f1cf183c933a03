"""Simulates the radix cache over the nodes of the window's own prefix tree, with LRU eviction of unused nodes."""

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column, Records, new_records
from engine_ext.compiled import compiled

Heap = list[tuple[int, int]]  # time of last use, node; entries that are no longer valid are skipped


class CacheTokens:
    """Counts the tokens of the cache, and those computed for it.

    Tokens of the cache are `free`, `locked` or `evictable`. `computed` is the prompt tokens computed so far, and
    `quadratic` their quadratic work. `uses` counts uses of the cache; it is the clock of LRU.
    """

    free: int
    locked: int
    evictable: int
    computed: int
    uses: int
    quadratic: float


class Cache(NamedTuple):
    """Holds the cache by node of the tree.

    `parent` is as in the tree, `begin` the node's place in its prompts, `size` its tokens, `quadratic` their quadratic
    work; `users` is the number of running requests that use it, `children` that of its cached children, `used` the time
    of its last use. `extra` is output tokens kept behind a leaf. `cached` says whether the node is in the cache, or
    will be once it is computed; `ready` says whether that is done, and until then `stashed` is how many of its tokens
    chunks have computed. `tokens`, one record, has the sums.
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
    tokens: Records[CacheTokens]


def new_cache(parent: Column, begin: Column, end: Column, capacity: int) -> Cache:
    nodes = len(parent)
    cached = np.zeros(nodes, dtype=np.bool_)
    cached[0] = True  # the root holds nothing
    users = np.zeros(nodes, dtype=np.int64)
    users[0] = 1  # and is never evicted
    tokens = new_records(CacheTokens, 1)
    tokens[0].free = capacity
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
    """Return an empty heap; the compiler infers its type from an element that is then removed."""
    heap = [(0, 0)]
    heap.pop()
    return heap


@compiled
def evictable_leaves(cache: Cache) -> Heap:
    """Return the heap of evictable leaves of a cache that is in use."""
    heap = empty_heap()
    for node in range(1, len(cache.parent)):
        if cache.cached[node] and cache.users[node] == 0 and cache.children[node] == 0:
            heappush(heap, (int(cache.used[node]), node))
    return heap


@compiled
def missing(cache: Cache, leaf: int) -> int:
    """Return the prompt tokens of the leaf's path that are not cached."""
    tokens, node = 0, leaf
    while not cache.cached[node]:
        tokens += cache.size[node]
        node = cache.parent[node]
    return tokens


@compiled
def unlocked(cache: Cache, leaf: int) -> int:
    """Return the tokens that locking the leaf's path would take from the free or evictable ones."""
    tokens, node = 0, leaf
    while cache.users[node] == 0:
        tokens += cache.size[node]
        node = cache.parent[node]
    return tokens


@compiled
def twice(cache: Cache, leaf: int) -> tuple[int, float]:
    """Return the tokens of the leaf's path that another request is computing now, and their quadratic work."""
    tokens, quadratic, node = 0, 0.0, leaf
    while not cache.ready[node]:
        if cache.cached[node]:
            tokens += cache.size[node] - cache.stashed[node]
            quadratic += cache.quadratic[node] - work_of_first(cache, node, cache.stashed[node])
        node = cache.parent[node]
    return tokens, quadratic


@compiled
def work_of_first(cache: Cache, node: int, tokens: int) -> float:
    """Return the quadratic work of the first `tokens` tokens of a node."""
    begin = float(cache.begin[node])
    return (begin + tokens) ** 2 - begin**2


@compiled
def work_of_next(end: int, left: int, tokens: int) -> float:
    """Return the quadratic work of the next `tokens` of the `left` last tokens of a prompt with `end` tokens.

    A chunk attends to all tokens before it, so the last chunk of a prompt takes longer than the first.
    """
    begin = float(end - left)
    return (begin + tokens) ** 2 - begin**2


@compiled
def stash(cache: Cache, leaf: int, tokens: int) -> None:
    """Record that the first `tokens` tokens of the leaf's path are cached, as SGLang caches every chunk."""
    node = leaf
    while not cache.ready[node]:
        cache.stashed[node] = min(max(tokens - cache.begin[node], 0), cache.size[node])
        node = cache.parent[node]


@compiled
def lock(cache: Cache, heap: Heap, leaf: int) -> tuple[int, float]:
    """Lock the path of a request that starts; return the tokens of it to compute, and their quadratic work.

    There must be room for `unlocked` tokens. Tokens that are being computed count as cached, so they are computed once.
    """
    tokens, quadratic, node = 0, 0.0, leaf
    while node != 0:
        if cache.users[node] == 0:
            if cache.cached[node]:
                cache.tokens[0].evictable -= cache.size[node]
            else:
                cache.tokens[0].free -= cache.size[node]
                cache.cached[node] = True
                cache.stashed[node] = 0
                cache.children[cache.parent[node]] += 1
                tokens += cache.size[node]
                quadratic += cache.quadratic[node]
            cache.tokens[0].locked += cache.size[node]
        cache.users[node] += 1
        node = cache.parent[node]
    make_free(cache, heap, 0)
    return tokens, quadratic


@compiled
def make_ready(cache: Cache, leaf: int) -> None:
    """Make what a request has computed available to requests that start from now on."""
    node = leaf
    while not cache.ready[node]:
        cache.ready[node] = True
        node = cache.parent[node]


@compiled
def touch(cache: Cache, leaf: int) -> None:
    """Count what is cached of the leaf's path as used now."""
    cache.tokens[0].uses += 1
    now, node = cache.tokens[0].uses, leaf
    while node != 0:
        if cache.ready[node]:
            cache.used[node] = now
        node = cache.parent[node]


@compiled
def grow(cache: Cache, heap: Heap, tokens: int) -> bool:
    """Lock this many more tokens for outputs; return whether there was room."""
    if cache.tokens[0].free + cache.tokens[0].evictable < tokens:
        return False
    make_free(cache, heap, tokens)
    cache.tokens[0].free -= tokens
    cache.tokens[0].locked += tokens
    return True


@compiled
def release(cache: Cache, heap: Heap, leaf: int, outputs: int, kept: bool) -> None:
    """Unlock the path of a request that ends or is retracted; keep its output tokens behind the leaf, or free them."""
    cache.tokens[0].locked -= outputs
    if kept:
        cache.extra[leaf] += outputs
        cache.tokens[0].evictable += outputs
    else:
        cache.tokens[0].free += outputs
    cache.tokens[0].uses += 1
    now, node = int(cache.tokens[0].uses), leaf
    while node != 0:
        cache.users[node] -= 1
        cache.used[node] = now
        if cache.users[node] == 0:
            cache.tokens[0].locked -= cache.size[node]
            cache.tokens[0].evictable += cache.size[node]
            if cache.children[node] == 0:
                heappush(heap, (now, int(node)))
        node = cache.parent[node]


@compiled
def make_free(cache: Cache, heap: Heap, tokens: int) -> None:
    """Evict the least recently used leaves until `tokens` tokens are free."""
    while cache.tokens[0].free < tokens and len(heap) > 0:
        time, node = heappop(heap)
        if not cache.cached[node] or cache.users[node] > 0 or cache.children[node] > 0:
            continue
        if cache.used[node] > time:  # it was touched since
            heappush(heap, (int(cache.used[node]), node))
            continue
        tokens = cache.size[node] + cache.extra[node]
        cache.extra[node] = 0
        cache.cached[node], cache.ready[node] = False, False
        cache.tokens[0].evictable -= tokens
        cache.tokens[0].free += tokens
        parent = cache.parent[node]
        cache.children[parent] -= 1
        if parent != 0 and cache.users[parent] == 0 and cache.children[parent] == 0:
            heappush(heap, (int(cache.used[parent]), int(parent)))
