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
    req_pool_indices: Any,
    seq_lens: Any,
    encoder_lens: Any = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Any:
    """Run the attention of one new token for each request. Shapes: see `extend`."""
    if encoder_lens is not None or is_cross_attn or sliding_window_size not in (None, -1):
        places = (k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
        more = (encoder_lens, scaling, enable_gqa, causal, is_cross_attn, sliding_window_size)
        return original(backend, _widened(query), output, *places, *more)  # SGLang casts all to the query's dtype
    requests = _requests(req_to_token, req_pool_indices, seq_lens, [1] * len(seq_lens))
    return _run(query, output, k_cache, v_cache, requests, scaling, enable_gqa)


def extend(
    original: Callable[..., Any],
    backend: Any,
    query: Any,
    output: Any,
    k_cache: Any,
    v_cache: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    extend_prefix_lens: Any,
    extend_seq_lens: Any,
    encoder_lens: Any = None,
    scaling: float | None = None,
    enable_gqa: bool = False,
    causal: bool = False,
    is_cross_attn: bool = False,
    sliding_window_size: int | None = None,
) -> Any:
    """Run the attention of new tokens alone.

    SGLang computes that of each cached token too, and drops it: a step whose requests share a long prompt took as long
    as if nothing were cached. Shapes are SGLang's: `query` and `output` [tokens, heads, size], the caches [slots,
    heads, size].
    """
    if encoder_lens is not None or not causal or sliding_window_size not in (None, -1):
        lengths = (seq_lens, extend_prefix_lens, extend_seq_lens, encoder_lens, scaling, enable_gqa, causal)
        places = (k_cache, v_cache, req_to_token, req_pool_indices)
        return original(backend, _widened(query), output, *places, *lengths, is_cross_attn, sliding_window_size)
    requests = _requests(req_to_token, req_pool_indices, seq_lens, extend_seq_lens.tolist())
    return _run(query, output, k_cache, v_cache, requests, scaling, enable_gqa)


def _widened(values: Any) -> Any:
    options = handed_over()
    # Otherwise in float32: torch takes 2.2 ms for one query over 4,000 keys in bfloat16, and 0.3 ms in float32.
    return values.double() if options is None or options.cpu_threads is None else values.float()


def _requests(req_to_token: Any, pools: Any, lengths: Any, news: Sequence[int]) -> list[_Tokens]:
    """Return the requests' tokens, from SGLang's table [requests, tokens] of slots."""
    table = req_to_token.numpy()
    wanted = zip(pools.tolist(), lengths.tolist(), news, accumulate(news, initial=0), strict=False)
    return [_Tokens(table[pool, :length], new, first) for pool, length, new, first in wanted]


def _run(
    query: Any, output: Any, k_cache: Any, v_cache: Any, requests: list[_Tokens], scaling: float | None, gqa: bool
) -> Any:
    wide = _widened(query[:0]).dtype
    for shared, members in _groups(requests):
        slots = np.concatenate([members[0].slots[:shared], *(each.slots[shared:] for each in members)])
        at = torch.from_numpy(slots)
        keys, values = (cache[at].to(wide).movedim(0, 1).unsqueeze(0) for cache in (k_cache, v_cache))
        count = sum(each.new for each in members)
        rows_of = torch.from_numpy(np.concatenate([np.arange(each.first, each.first + each.new) for each in members]))
        at_once = count if count == len(slots) else ROWS  # nothing is cached: no mask is needed
        for first in range(0, count, at_once):
            where = rows_of[first : first + at_once]
            rows = query[where]
            # Queries of one request see nothing behind the last of them.
            seen = len(slots) - count + first + len(rows) if len(members) == 1 else len(slots)
            found = scaled_dot_product_attention(
                rows.to(wide).movedim(0, 1).unsqueeze(0),
                keys[:, :, :seen],
                values[:, :, :seen],
                attn_mask=None if count == len(slots) else _mask(shared, members, len(rows), seen),
                is_causal=count == len(slots),
                enable_gqa=gqa,
                scale=scaling,
            )
            output[where] = found.squeeze(0).movedim(1, 0).to(output.dtype)
    return output


def _groups(requests: list[_Tokens]) -> Iterator[tuple[int, list[_Tokens]]]:
    """Divide the requests into those that share a long cached prefix, of so many tokens.

    One alone shares nothing. A group's queries are computed at once, and what its members have for themselves is
    shorter than the prefix, because each query looks at all of it.
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
            yield (shared if len(members) > 1 else 0), members
        shared, own, rows, members = len(each.slots) - each.new, each.new, each.new, [each]
    if members:
        yield (shared if len(members) > 1 else 0), members


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


def _mask(shared: int, members: list[_Tokens], rows: int, keys: int) -> torch.Tensor | None:
    """Return which keys each query sees, bool [rows, keys]: the shared ones, and its own request's up to itself.

    None: it sees all.
    """
    if rows == 1 and len(members) == 1:
        return None
    if len(members) == 1:
        return torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows)
    mask = torch.zeros(rows, keys, dtype=torch.bool)
    mask[:, :shared] = True
    row, key = 0, shared
    for each in members:
        own = len(each.slots) - shared
        mask[row : row + each.new, key : key + own] = torch.ones(each.new, own, dtype=torch.bool).tril(own - each.new)
        row, key = row + each.new, key + own
    return mask


HOOKS = [
    (f"{_BACKEND}._run_sdpa_forward_extend", extend, HookType.AROUND),
    (f"{_BACKEND}._run_sdpa_forward_decode", decode, HookType.AROUND),
]
