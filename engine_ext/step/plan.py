"""Holds what a step does, in words that any engine can carry out."""

from typing import NamedTuple


class Room(NamedTuple):
    """What online prompts need free: so many KV `tokens`, and a request `slot`. `tokens` is 0 if they need nothing.

    `must`: the next chunk of one of them is computed whether there is room or not.
    """

    tokens: int
    slot: bool
    must: bool


class StepPlan(NamedTuple):
    """What a step does, beside who rests, which `decide` writes into an array.

    `budget`: the prompt tokens of all. `admitted`: so many of the scan's `admitted`, the first ones. `left_out`: how
    many decodes of batches rest. `parks`: the batch's prompt in chunks is stopped where it is. `yields`: it leaves the
    online prompts their part of the budget. `room`: what these need, for which requests of batches leave the engine.
    `limit_s`: the most seconds that the step may take, but for what batches are owed. `is_cut`: batches get fewer
    prompt tokens than there is room for.
    """

    budget: int
    admitted: int
    left_out: int
    parks: bool
    yields: bool
    room: Room
    limit_s: float
    is_cut: bool
