"""Says which of SGLang's caches keep what a request had computed when it leaves the engine, and how much they hold."""

import time
from typing import Any, NamedTuple

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.hiradix_cache import HiRadixCache
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from engine_ext.plugin.scheduler.depth import within


class Cached(NamedTuple):
    """The tokens of a prompt in SGLang's cache: `on_device`, of which running requests use `in_use`, and `on_host`."""

    on_device: int
    on_host: int = 0
    in_use: int = 0

    @property
    def tokens(self) -> int:
        return self.on_device + self.on_host


def is_radix_cache(tree: Any) -> bool:
    """Return whether this is SGLang's radix cache, with or without copies in host memory.

    Other caches, such as those of models with sliding windows, lock and free what is in use in ways of their own.
    """
    return type(tree) is RadixCache or type(tree) is HiRadixCache


def _may_be_cached(req: Any) -> Any:
    """Return the prompt's token ids without those whose log probabilities are wanted: SGLang computes them anyway."""
    ids = req.origin_input_ids
    return ids[: req.logprob_start_len] if req.return_logprob and req.logprob_start_len >= 0 else ids


def cached_tokens(tree: Any, req: Any, touches: bool = True) -> Cached:
    """Return how many tokens of the request's prompt are in SGLang's cache.

    SGLang's own look-up joins the places of these tokens on the device: a kernel for each request that waits, in each
    step. Their number is known on the host. As in SGLang, a look-up makes what it finds the last that is evicted, but
    not one that some ranks do not make (`touches`): ranks must evict alike. What is in use is told of radix caches.
    """
    key = RadixKey(_may_be_cached(req), req.extra_key)
    if not is_radix_cache(tree):
        if not touches:
            return Cached(0)
        found = tree.match_prefix(MatchPrefixParams(key))
        return Cached(len(found.device_indices), found.host_hit_length)
    if tree.disable:
        return Cached(0)
    key, _ = key.maybe_to_bigram_view(tree.is_eagle)
    key, node, on_device, on_host, in_use = within(tree, key.page_aligned(tree.page_size)), tree.root_node, 0, 0, 0
    now = time.monotonic()
    if touches:
        node.last_access_time = now
    while len(key):
        node = node.children.get(key.child_key(tree.page_size))
        if node is None:
            break
        if touches:
            node.last_access_time = now
        size = node.key.match(key, page_size=tree.page_size)
        if node.evicted:
            on_host += size
        else:
            on_device += size
            in_use += size if node.lock_ref > 0 else 0
        if size < len(node.key):
            break
        key = key[size:]
    return Cached(on_device, on_host, in_use)
