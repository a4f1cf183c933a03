"""Says what an engine is to do in one step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Step:
    """The decision for one step.

    `budget`: prompt tokens to compute, those of requests in prefill first. `admitted`: keys of the requests to admit,
    in this order.
    """

    budget: int
    admitted: list[int]


NOTHING = Step(0, [])
