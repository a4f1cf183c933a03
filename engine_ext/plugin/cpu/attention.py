"""Computes attention on a CPU: of new tokens alone, of a shared prefix once for all that share it, and with the same
bits in any batch where that is asked for.

Then it is computed in float64, and rounded once to the model's dtype. Torch's kernels sum a row in an order that
depends on the lengths around it. In float64 that difference vanishes in the rounding, so an answer at temperature 0
does not depend on the order of execution or on what the cache held.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.plugins.hook_registry import HookType
from torch.nn.functional import scaled_dot_product_attention

from engine_ext.plugin.options import handed_over

_BACKEND = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
ROWS = 512  # queries at one time, whose mask has a byte for each key
LEAST_SHARED = 64  # tokens of a prefix that is read once for all that share it
PLACES = (0, 64, 256, 1024, 4096)  # of tokens by whose slots requests with common prefixes are found


class _Tokens(NamedTuple):
    """The tokens of one request: the slots of their keys and values, of which the last `new` have queries.

    `first`: the row of the first of these queries.
    """

    slots: NDArray[Any]
    new: int
    first: int


def decode(
    original: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    pools: Any,
    seq_lens: Any,
    encoder_lens: Any = None,
    **options: Any,
) -> Any:
    """Run the attention of one new token for each request. Shapes: see `extend`."""
    if not _is_plain(encoder_lens, options):
        places = (k_cache, v_cache, req_to_token, pools, seq_lens, encoder_lens)
        return original(backend, _widened(query), output, *places, **options)  # SGLang casts all to the query's dtype
    requests = _requests(req_to_token, pools, seq_lens, [1] * len(seq_lens))
    return _run(query, output, k_cache, v_cache, requests, options)


def extend(
    original: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    pools: Any,
    seq_lens: Any,
    prefix_lens: Any,
    new_lens: Any,
    encoder_lens: Any = None,
    **options: Any,
) -> Any:
    """Run the attention of new tokens alone.

    SGLang computes that of each cached token too, and drops it: a step whose requests share a long prompt took as long
    as if nothing were cached. Shapes are SGLang's: `query` and `output` [tokens, heads, size], the caches [slots,
    heads, size].
    """
    if not (_is_plain(encoder_lens, options) and options.get("causal")):
        places = (k_cache, v_cache, req_to_token, pools, seq_lens, prefix_lens, new_lens, encoder_lens)
        return original(backend, _widened(query), output, *places, **options)
    requests = _requests(req_to_token, pools, seq_lens, new_lens.tolist())
    return _run(query, output, k_cache, v_cache, requests, options)


def _is_plain(encoder_lens: Any, options: dict[str, Any]) -> bool:
    """Return whether each token sees all before it in its own request, and nothing else."""
    has_window = options.get("sliding_window_size") not in (None, -1)
    return encoder_lens is None and not options.get("is_cross_attn") and not has_window


def _widened(values: Any) -> Any:
    options = handed_over()
    # Otherwise in float32: torch takes 2.2 ms for one query over 4,000 keys in bfloat16, and 0.3 ms in float32.
    return values.double() if options is None or options.cpu_threads is None else values.float()


def _requests(req_to_token: Any, pools: Any, lengths: Any, news: Sequence[int]) -> list[_Tokens]:
    """Return the requests' tokens, from SGLang's table [requests, tokens] of slots."""
    table = req_to_token.numpy()
    wanted = zip(pools.tolist(), lengths.tolist(), news, accumulate(news, initial=0), strict=False)
    return [_Tokens(table[pool, :length], new, first) for pool, length, new, first in wanted]


class _Layer(NamedTuple):
    """What attention reads and writes in one layer; `wide` is the dtype in which it is computed."""

    query: Any
    output: Any
    k_cache: Any
    v_cache: Any
    wide: Any
    options: dict[str, Any]

    def keys_and_values(self, slots: NDArray[Any]) -> list[Any]:
        """Return those of these slots, [1, heads, slots, size]."""
        at = torch.from_numpy(slots)
        return [cache[at].to(self.wide).movedim(0, 1).unsqueeze(0) for cache in (self.k_cache, self.v_cache)]

    def attend(self, rows: Any, keys: Any, values: Any, mask: Any, is_causal: bool = False) -> None:
        """Write the attention of these queries, of which each sees what the mask says, or all."""
        found = scaled_dot_product_attention(
            self.query[rows].to(self.wide).movedim(0, 1).unsqueeze(0),
            keys,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            enable_gqa=self.options.get("enable_gqa", False),
            scale=self.options.get("scaling"),
        )
        self.output[rows] = found.squeeze(0).movedim(1, 0).to(self.output.dtype)


def _run(query: Any, output: Any, k_cache: Any, v_cache: Any, requests: list[_Tokens], options: dict[str, Any]) -> Any:
    layer = _Layer(query, output, k_cache, v_cache, _widened(query[:0]).dtype, options)
    for shared, members in _groups(requests):
        if len(members) == 1:
            _alone(layer, members[0])
        else:
            _together(layer, shared, members)
    return output


def _alone(layer: _Layer, tokens: _Tokens) -> None:
    keys, values = layer.keys_and_values(tokens.slots)
    prefix, new = len(tokens.slots) - tokens.new, tokens.new
    if not prefix:
        layer.attend(slice(tokens.first, tokens.first + new), keys, values, None, is_causal=True)
        return
    for begin in range(0, new, ROWS):
        end = min(begin + ROWS, new)
        seen = prefix + end
        mask = None if end - begin == 1 else torch.ones(end - begin, seen, dtype=torch.bool).tril(prefix + begin)
        layer.attend(slice(tokens.first + begin, tokens.first + end), keys[:, :, :seen], values[:, :, :seen], mask)


def _together(layer: _Layer, shared: int, members: list[_Tokens]) -> None:
    """Run the attention of requests whose first `shared` tokens are the same: each sees these, and its own others."""
    slots = np.concatenate([members[0].slots[:shared], *(each.slots[shared:] for each in members)])
    rows = np.concatenate([np.arange(each.first, each.first + each.new) for each in members])
    mask = torch.zeros(len(rows), len(slots), dtype=torch.bool)
    mask[:, :shared] = True
    row, key = 0, shared
    for each in members:
        own = len(each.slots) - shared
        mask[row : row + each.new, key : key + own] = torch.ones(each.new, own, dtype=torch.bool).tril(own - each.new)
        row, key = row + each.new, key + own
    keys, values = layer.keys_and_values(slots)
    layer.attend(torch.from_numpy(rows), keys, values, mask)


def _groups(requests: list[_Tokens]) -> Iterator[tuple[int, list[_Tokens]]]:
    """Divide the requests into those that share a long cached prefix, of so many tokens.

    A group's queries are computed at once, at most ROWS, and what its members have for themselves is shorter than the
    prefix, because each query looks at all of it.
    """
    shared, own, rows, members = 0, 0, 0, list[_Tokens]()
    for each in sorted(requests, key=_beginning):
        if members:
            common = _common(members[0], each, shared)
            beside = own + len(members) * (shared - common) + len(each.slots) - common
            if common >= LEAST_SHARED and beside <= common and rows + each.new <= ROWS:
                shared, own, rows = common, beside, rows + each.new
                members.append(each)
                continue
            yield shared, members
        shared, own, rows, members = len(each.slots) - each.new, each.new, each.new, [each]
    if members:
        yield shared, members


def _beginning(each: _Tokens) -> tuple[int, ...]:
    cached = len(each.slots) - each.new
    return tuple(int(each.slots[place]) for place in PLACES if place < cached)


def _common(first: _Tokens, other: _Tokens, most: int) -> int:
    """Return how many cached tokens the two have in the same slots at their beginnings, up to `most`."""
    most = min(most, len(other.slots) - other.new)
    if not most or first.slots[0] != other.slots[0]:
        return 0
    differs = first.slots[:most] != other.slots[:most]
    found = int(differs.argmax())
    return found if differs[found] else most


HOOKS = [
    (f"{_BACKEND}._run_sdpa_forward_extend", extend, HookType.AROUND),
    (f"{_BACKEND}._run_sdpa_forward_decode", decode, HookType.AROUND),
]
