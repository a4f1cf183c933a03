"""Bounds how many nodes of SGLang's radix cache a prompt may pass, so that no look-up holds the scheduler for long.

Each prompt that begins like another one and differs after it splits a node or adds one. Thousands of prompts, each the
beginning of the next one, make a path as deep, and SGLang walks it in Python several times for each prompt and answer:
2,500 nodes take a tenth of a second. So nodes of a deep path become one again where no running request ends between
them, and what branches off there is evicted. Where a path is too deep still, what lies beyond its bound counts as not
cached, and prompts that would make it deeper keep their KV cache to themselves. Conversations and documents stay far
below the bound.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.plugins.hook_registry import HookType

FEWEST = 128  # nodes that any path may have,
TOKENS = 128  # and one more for each of so many tokens


class Reach(NamedTuple):
    """How far a key gets in a tree: the tokens and nodes that match, and whether it would get beyond the bound."""

    tokens: int
    nodes: list[Any]
    is_over: bool


def most_nodes(tokens: int) -> int:
    """Return the nodes that a path of so many tokens may have."""
    return FEWEST + tokens // TOKENS


def is_bounded(tree: Any) -> bool:
    """Return whether the bound holds in this tree: some path of it is deeper, or was."""
    return bool(getattr(tree, "batchweave_deep", False))


def reach(tree: Any, key: Any) -> Reach:
    """Follow a key in a radix cache, up to the bound, and change nothing."""
    node, nodes, tokens = tree.root_node, list[Any](), 0
    while len(key):
        node = node.children.get(key.child_key(tree.page_size))
        if node is None:
            break
        size = node.key.match(key, page_size=tree.page_size)
        if len(nodes) + 1 > most_nodes(tokens + size):
            return Reach(tokens, nodes, True)
        nodes.append(node)
        tokens, key = tokens + size, key[size:]
        if size < len(node.key):
            break
    return Reach(tokens, nodes, False)


def _shortened(tree: Any, key: Any) -> Reach:
    """Follow a key; make nodes that it passes one, as long as it gets beyond the bound and that helps.

    Only where something is inserted: while SGLang sorts what waits, it remembers nodes that nobody has locked, and
    ranks look up at different times but insert alike.
    """
    found = reach(tree, key)
    while found.is_over and _join(tree, found.nodes):
        found = reach(tree, key)
    return found


def _join(tree: Any, path: list[Any]) -> int:
    """Join nodes of a path where all who use one use the next one; return how many went.

    The lowest node of those stays, because requests may end at it; at the others nobody ends, as their locks show.
    Other children of these are then in nobody's use.
    """
    gone, first = 0, 0
    for place in range(1, len(path) + 1):
        above = path[place - 1]
        if place < len(path) and above.lock_ref == path[place].lock_ref:
            for child in [each for each in above.children.values() if each is not path[place]]:
                _evict(tree, child)
            continue
        if place - first > 1:
            _make_one(tree, path[first:place])
            gone += place - first - 1
        first = place
    return gone


def _evict(tree: Any, node: Any) -> None:
    """Evict a node and all below it, of which nobody uses any."""
    below = [node]
    for each in below:
        below.extend(each.children.values())
    for each in reversed(below):
        tree.token_to_kv_pool_allocator.free_segment(each.value, start_pos=0)
        tree._delete_leaf(each)
        tree._record_remove_event(each)


def _make_one(tree: Any, nodes: list[Any]) -> None:
    top, last, ids = nodes[0], nodes[-1], array("q")
    parent, name = top.parent, top.key.child_key(tree.page_size)
    for each in nodes:
        ids.extend(each.key.raw_token_ids())
    last.key, last.value = RadixKey(ids, top.key.extra_key), torch.cat([each.value for each in nodes])
    last.parent, last.hash_value = parent, None
    last.last_access_time = max(each.last_access_time for each in nodes)
    last.priority, last.hit_count = max(each.priority for each in nodes), max(each.hit_count for each in nodes)
    parent.children[name] = last


def within(tree: Any, key: Any) -> Any:
    """Return the part of a key that a look-up may follow: all of it in a tree without deep paths."""
    if not _can_be_bounded(tree) or not is_bounded(tree):
        return key
    found = reach(tree, key)
    return key[: found.tokens] if found.is_over else key


def match(original: Callable[..., Any], tree: Any, params: Any) -> Any:
    """Look a prompt up, no deeper than the bound."""
    if not _can_be_bounded(tree):
        return original(tree, params)
    if is_bounded(tree):
        return original(tree, replace(params, key=within(tree, params.key.page_aligned(tree.page_size))))
    result: Any = original(tree, params)
    if _depth(tree, result.last_device_node) > most_nodes(len(result.device_indices)):
        tree.batchweave_deep = True
    return result


def cache_unfinished(original: Callable[..., Any], tree: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """Insert what a request has computed, unless its path would be too deep: then its KV cache stays its own."""
    ids = req.get_fill_ids()
    if may_insert(tree, RadixKey(ids, req.extra_key)):
        original(tree, req, *args, **kwargs)
        return
    own = tree.req_to_token_pool.req_to_token[req.req_pool_idx, : len(ids)]
    req.prefix_indices = own.to(dtype=torch.int64, copy=True)  # as without a radix cache, for its next chunk


def cache_finished(
    original: Callable[..., Any], tree: Any, req: Any, is_insert: bool = True, *, kv_len_to_handle: int
) -> Any:
    """Insert what a request leaves, unless its path would be too deep."""
    ids = (req.origin_input_ids + req.output_ids)[:kv_len_to_handle]
    is_insert = is_insert and may_insert(tree, RadixKey(ids, req.extra_key))
    return original(tree, req, is_insert, kv_len_to_handle=kv_len_to_handle)


def may_insert(tree: Any, key: Any) -> bool:
    """Return whether a look-up finds all of a key once it is inserted; SGLang relies on that. Shortens its path."""
    if not _can_be_bounded(tree) or not is_bounded(tree):
        return True
    key = key.page_aligned(tree.page_size)
    found = _shortened(tree, key)
    return not found.is_over and len(found.nodes) + (found.tokens < len(key)) <= most_nodes(len(key))


def _can_be_bounded(tree: Any) -> bool:
    """Caches with copies in host memory look up in a way of their own, and those of drafts by pairs of tokens."""
    return type(tree) is RadixCache and not tree.is_eagle


def _depth(tree: Any, node: Any) -> int:
    depth = 0
    while node is not tree.root_node:
        node, depth = node.parent, depth + 1
    return depth


_CACHE = "sglang.srt.mem_cache.radix_cache.RadixCache"
HOOKS = [
    (f"{_CACHE}.match_prefix", match, HookType.AROUND),
    (f"{_CACHE}.cache_unfinished_req", cache_unfinished, HookType.AROUND),
    (f"{_CACHE}.cache_finished_req", cache_finished, HookType.AROUND),
]
