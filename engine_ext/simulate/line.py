"""Holds the requests that wait for a simulated engine, as they arrive, are taken, and come back."""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Column
from engine_ext.compiled import compiled
from engine_ext.simulate.shared_engine import DONE, NOBODY, WAITS, SharedEngine

DRAIN = 2.0  # times the arrivals' duration, after which an online request that has not ended never will


class Line(NamedTuple):
    """Who waits: online requests, those of the batch, and those taken off the engine, which go before the others.

    `at`: how many online requests have arrived, how far they and the batch are taken, how many of either kind were
    taken off, and how many of the batch were released.
    """

    order: Column
    online_again: Column
    batch_again: Column
    at: Column


ARRIVED, ONLINE, BATCH, ONLINE_AGAIN, BATCH_AGAIN, RELEASED = range(6)


def new_line(order: Column, requests: int) -> Line:
    """Return the line at the start; `order`: the batch's requests in the order in which they are taken."""
    return Line(order.copy(), np.zeros(requests, np.int64), np.zeros(requests, np.int64), np.zeros(6, np.int64))


@compiled
def wait(engine: SharedEngine, line: Line, batch: int, until_s: float, rate: float) -> bool:
    """Let time pass until the next request may come, or until the end; return False if nothing can happen any more.

    `rate`: how many of the batch's requests may begin per second.
    """
    totals, coming = engine.totals[0], batch + line.at[ARRIVED]
    next_s = (line.at[BATCH] + 0.01) / rate if line.at[BATCH] < line.at[RELEASED] else np.inf
    if totals.now_s < next_s < until_s:
        if coming < len(engine.requests):
            next_s = min(next_s, engine.requests[coming].arrives_s)
        totals.now_s = max(totals.now_s, next_s)
    elif coming < len(engine.requests):
        totals.now_s = max(totals.now_s, engine.requests[coming].arrives_s)
    elif totals.now_s < until_s:
        totals.now_s = until_s
    else:
        return False
    return True


@compiled
def arrive(engine: SharedEngine, line: Line, batch: int) -> None:
    requests, at = engine.requests, line.at
    while batch + at[ARRIVED] < len(requests):
        r = requests[batch + at[ARRIVED]]
        if r.arrives_s > engine.totals[0].now_s:
            break
        r.state = WAITS
        at[ARRIVED] += 1


@compiled
def release_group(engine: SharedEngine, line: Line, group: int) -> None:
    """Release the batch's next group once the one before has ended."""
    at = line.at
    if group == 0:
        at[RELEASED] = len(line.order)
        return
    if at[BATCH] < at[RELEASED] or at[BATCH_AGAIN] > 0:
        return
    for place in range(max(0, at[RELEASED] - group), at[RELEASED]):
        if engine.requests[line.order[place]].state != DONE:
            return
    for place in range(at[RELEASED], min(len(line.order), at[RELEASED] + group)):
        engine.requests[line.order[place]].arrives_s = engine.totals[0].now_s
    at[RELEASED] = min(len(line.order), at[RELEASED] + group)


@compiled
def put_back(engine: SharedEngine, line: Line) -> None:
    """Let those wait again that the last step took off the engine."""
    totals, at = engine.totals[0], line.at
    for k in range(totals.preempted):
        if engine.requests[engine.preempted[k]].online == 0:
            line.batch_again[at[BATCH_AGAIN]] = engine.preempted[k]
            at[BATCH_AGAIN] += 1
    put_back_online(engine, line)


@compiled
def put_back_online(engine: SharedEngine, line: Line) -> None:
    """Let the online requests wait again that the last step took off the engine, and forget the others."""
    totals, at = engine.totals[0], line.at
    for k in range(totals.preempted):
        if engine.requests[engine.preempted[k]].online == 1:
            line.online_again[at[ONLINE_AGAIN]] = engine.preempted[k]
            at[ONLINE_AGAIN] += 1
    totals.preempted = 0


@compiled
def next_online(line: Line, batch: int) -> int:
    at = line.at
    if at[ONLINE_AGAIN] > 0:
        return int(line.online_again[at[ONLINE_AGAIN] - 1])
    return int(batch + at[ONLINE]) if at[ONLINE] < at[ARRIVED] else NOBODY


@compiled
def waiting_online(line: Line) -> int:
    """Return how many online requests wait."""
    return int(line.at[ONLINE_AGAIN] + line.at[ARRIVED] - line.at[ONLINE])


@compiled
def nth_online(line: Line, batch: int, place: int) -> int:
    """Return the online request at this place of those that wait: first those that were taken off, the last first."""
    again = line.at[ONLINE_AGAIN]
    if place < again:
        return int(line.online_again[again - 1 - place])
    return int(batch + line.at[ONLINE] + place - again)


@compiled
def next_of_batch(line: Line) -> int:
    at = line.at
    if at[BATCH_AGAIN] > 0:
        return int(line.batch_again[at[BATCH_AGAIN] - 1])
    return int(line.order[at[BATCH]]) if at[BATCH] < at[RELEASED] else NOBODY


@compiled
def taken(engine: SharedEngine, line: Line, request: int) -> None:
    is_online, at = engine.requests[request].online == 1, line.at
    again, first = (ONLINE_AGAIN, ONLINE) if is_online else (BATCH_AGAIN, BATCH)
    if at[again] > 0:
        at[again] -= 1
    else:
        at[first] += 1
