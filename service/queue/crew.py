"""Tells the workers of one model about each other, so that each holds no more than its share of what remains.

Each worker writes into Redis what it has in hand. What remains changes only as requests are answered, however workers
divide it, so that a look that is a moment old still serves.
"""

import json
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from service.queue import keys, roll

LEAST = 8  # fewer requests are not worth handing over


@dataclass(frozen=True, slots=True)
class Hand:
    """What a worker has in hand.

    `requests`: those not answered yet. `pace`: answers per second while it is busy; 0 if it is not known. `full_at`:
    the requests that its engine runs at once. `slices`: the ids of its slices and of the last ones that it finished.
    """

    requests: int
    pace: float
    full_at: int
    slices: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: bytes) -> "Hand | None":
        """Read what `str` wrote; return None for the line of another version."""
        try:
            said = json.loads(text)
            return cls(int(said[0]), float(said[1]), int(said[2]), tuple(int(each) for each in said[3]))
        except (ValueError, TypeError, LookupError):
            return None

    def __str__(self) -> str:
        return json.dumps([self.requests, self.pace, self.full_at, self.slices], separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of a model, as one of them sees them.

    `waiting`: requests of slices that no worker has; infinity if there are more than are announced.
    """

    others: tuple[Hand, ...] = ()
    waiting: float = 0.0

    def share(self, mine: Hand) -> float:
        """Return how many requests this worker would hold if all that remain were divided by the workers' paces."""
        return self._shares(mine)[0]

    def give(self, mine: Hand) -> tuple[int, int]:
        """Return how many requests this worker should hand over, and to how many workers.

        Only a worker whose engine is not full is given any, and only when none wait for a worker.
        """
        share, *theirs = self._shares(mine)
        surplus = mine.requests - share
        if self.waiting or surplus < max(LEAST, share / 4):
            return 0, 0
        lacks = [due - each.requests for due, each in zip(theirs, self.others, strict=True) if _is_hungry(each)]
        lacking = [more for more in lacks if more >= LEAST]
        return int(min(surplus, sum(lacking))), len(lacking)

    def _shares(self, mine: Hand) -> list[float]:
        """Return the shares of this worker and of the others. A pace that is not known is the mean of the others."""
        hands = [mine, *self.others]
        known = [each.pace for each in hands if each.pace > 0]
        weights = [each.pace or (sum(known) / len(known) if known else 1.0) for each in hands]
        remain = self.waiting + sum(each.requests for each in hands)
        return [remain * weight / sum(weights) for weight in weights]


def _is_hungry(hand: Hand) -> bool:
    return hand.requests < hand.full_at


class CrewBoard:
    """Reads and writes what the workers of one model have in hand."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._redis = redis
        self._key = keys.crew(model)
        self._call = redis.register_script(roll.CALL)

    async def look(self, name: str = "", mine: Hand | None = None) -> dict[str, Hand]:
        """Write what the worker `name` has in hand, and return what each other one has."""
        found: Any = await self._call(keys=[self._key], args=roll.arguments(name, "" if mine is None else str(mine)))
        return {name: hand for name, line in roll.members(found).items() if (hand := Hand.parse(line)) is not None}

    async def leave(self, name: str) -> None:
        await self._redis.hdel(self._key, name)  # pyright: ignore[reportGeneralTypeIssues]
