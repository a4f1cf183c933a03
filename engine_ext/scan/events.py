"""Tells a scan's state what happened to requests since the last step, or since its plan was begun.

A plan is made beside the steps, from the requests as they were when it began. When it is ready, the events since then
bring its state up to date; the same events, step by step, keep the state that is in use.
"""

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column
from engine_ext.compiled import brief, compiled
from engine_ext.scan.books import (
    admit,
    bring_forward,
    dropped,
    finished,
    left_out,
    prefilled,
    put_back,
    retracted,
    set_aside,
    take_back,
)
from engine_ext.scan.state import State

# What happened, and the value that comes with it. Machine code knows no enumerations of classes.
TICK = 0  # a step was decided: output tokens that each decoding request got
ADMITTED = 1  # at which side
PREFILLED = 2
FINISHED = 3  # output tokens
DROPPED = 4  # output tokens
RETRACTED = 5  # output tokens
PUT_BACK = 6  # the engine did not take what was just admitted
SET_ASIDE = 7  # the engine refused it again and again; it waits for another plan
TAKEN_BACK = 8  # it waited, and will not run
FORGOTTEN = 9  # nothing needs to be known of it any more; no state has to hear that
LEFT_OUT = 10  # it decodes again: steps in which others got a token and it got none
KINDS = 11

Event = tuple[int, int, int]  # what happened, to which request, and its value


def table_of(events: list[Event], places: Column) -> NDArray[np.int64]:
    """Return the events as a table, with each request's place in a plan; those of requests that it lacks are left out.

    `places`: the place of each request, or -1; requests beyond its end have none.
    """
    known: list[Event] = []
    for kind, request, value in events:
        place = places.item(request) if request < len(places) else -1
        if place >= 0 or kind == TICK:
            known.append((kind, place, value))
    return np.array(known, dtype=np.int64).reshape(-1, 3)


@brief
def replay(state: State, events: NDArray[np.int64]) -> None:
    """Bring the state up to date with these events, in their order."""
    is_out = _take_out_admitted(state, events)
    for kind, request, value in events:
        if kind == TICK:
            state.totals[0].clock += value
            state.totals[0].own_kv += value * state.totals[0].decoding
        elif kind == ADMITTED:
            if not is_out[request]:
                _take_from_front(state, request)
            admit(state, request, value)
        elif kind == PREFILLED:
            prefilled(state, request)
        elif kind == FINISHED:
            finished(state, request, value)
        elif kind == DROPPED:
            dropped(state, request, value)
        elif kind == LEFT_OUT:
            left_out(state, request, value)
        else:
            is_out[request] = False
            _wait(state, kind, request, value)


@compiled
def _wait(state: State, kind: int, request: int, tokens: int) -> None:
    """Note that a request waits again, or that it waits no longer."""
    if kind == RETRACTED:
        retracted(state, request, tokens)
    elif kind == PUT_BACK:
        put_back(state, request)
    elif kind == SET_ASIDE:
        set_aside(state, request)
    elif kind == TAKEN_BACK:
        take_back(state, request)


@compiled
def _take_out_admitted(state: State, events: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Take the requests that these events admit out of both queues, wherever they stand, and return which they are."""
    is_out = np.zeros(len(state.requests), dtype=np.bool_)
    some = False
    for kind, request, _ in events:
        if kind == ADMITTED:
            is_out[request] = some = True
    if not some:
        return is_out
    for side in range(2):
        queue = state.queues[side]
        kept = queue.first
        for at in range(queue.first, queue.last):
            request = state.waiting[side, at]
            if not is_out[request]:
                state.waiting[side, kept] = request
                kept += 1
        queue.last = kept
    return is_out


@compiled
def _take_from_front(state: State, request: int) -> None:
    """Take out a request that returned to a queue, where it stands among the first."""
    for side in range(2):
        queue = state.queues[side]
        for at in range(queue.first, queue.last):
            if state.waiting[side, at] == request:
                bring_forward(state, side, at)
                queue.first += 1
                return
