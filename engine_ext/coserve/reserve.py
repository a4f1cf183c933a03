"""Keeps KV cache free for online requests: up to what they held at most times of the last hour."""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.tuning import BEFORE_S, BINS, LEAST_RESERVE, RESERVE_MEMORY_S, RESERVE_QUANTILE, TOO_SELDOM


class OnlineKv(NamedTuple):
    """How long online requests have held how much of the KV cache: seconds by share, float64 [BINS]."""

    seconds: Floats
    capacity: int
    now: Column


def new_online_kv(capacity: int) -> OnlineKv:
    seconds = np.zeros(BINS)
    seconds[0] = BEFORE_S
    return OnlineKv(seconds, int(capacity), np.zeros(1, dtype=np.int64))


@compiled
def note_online_kv(held: OnlineKv, kv_tokens: int, seconds: float) -> None:
    """Note that online requests have held so many KV tokens for so many seconds."""
    held.seconds[:] *= np.exp(-seconds / RESERVE_MEMORY_S)
    # Bin 0 is for an engine without online requests.
    held.now[0] = max(0, kv_tokens)
    held.seconds[min(BINS - 1, -(-held.now[0] * BINS // held.capacity))] += seconds


@compiled
def reserve(held: OnlineKv) -> int:
    """Return the KV tokens to keep free for online requests, beside what they hold now; 0 where there were none."""
    total, so_far, at = held.seconds.sum(), 0.0, 0
    if total - held.seconds[0] < TOO_SELDOM * total:
        return 0
    while at < BINS - 1 and so_far + held.seconds[at] < RESERVE_QUANTILE * total:
        so_far += held.seconds[at]
        at += 1
    usual = at * held.capacity // BINS
    return int(max(LEAST_RESERVE * held.capacity, usual - held.now[0]))
