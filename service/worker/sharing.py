"""Keeps a worker to its share of what its model's workers have left to do, and hands over what is beyond it."""

import math
import time
from collections import deque
from collections.abc import Collection

from redis.asyncio import Redis

from service.queue.announcements import Announcements
from service.queue.crew import Crew, CrewBoard, Hand
from service.queue.progress import Heartbeat
from service.worker.slice_run import SliceRun

LOOK_S = 0.5  # between two looks at the others while this worker has its share
REST_S = 5.0  # between two looks of a worker that has nothing to do, or nothing to give
AGAIN_S = 0.5  # the first pause after an engine had nothing to give; each further one is twice as long, up to REST_S
RATE_S = 60.0  # in which a rate forgets two thirds of what it knew
SURE = 8  # answers from which a rate is known
RECENT = 16  # finished slices whose neighbours this worker prefers


class AnswerRate:
    """Averages answers per second over the time in which the worker had requests."""

    def __init__(self) -> None:
        self._answers = self._seconds = 0.0
        self._before: tuple[float, int] | None = None  # when and how many, if it was busy at the last look

    def look(self, answered: int, is_busy: bool, now: float) -> None:
        if self._before is not None:
            at, before = self._before
            keep = math.exp(-(now - at) / RATE_S)
            self._answers = keep * self._answers + answered - before
            self._seconds = keep * self._seconds + now - at
        self._before = (now, answered) if is_busy else None

    @property
    def per_second(self) -> float:
        """Return the average, or 0 while it is not known."""
        return self._answers / self._seconds if self._answers >= SURE else 0.0


class Sharing:
    """One worker among those of its model. `full_at`: the requests that its engine runs at once."""

    def __init__(self, redis: Redis, announcements: Announcements, model: str, name: str, full_at: int) -> None:
        self._board = CrewBoard(redis, model)
        self._heartbeat = Heartbeat(redis)
        self._model = model
        self._announcements = announcements
        self._name = name
        self._full_at = full_at
        self._crew = Crew()
        self._names: set[str] = set()
        self._tries_at, self._pause_s = -math.inf, 0.0  # when to ask the engine again, after it had nothing to give
        self._rate = AnswerRate()
        self._ended = 0  # answers in slices that are done with
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._looked_at, self._told_idle, self._takes_part = -math.inf, False, False

    def let_go(self, run: SliceRun) -> None:
        """Note that the worker is done with a slice."""
        self._ended += run.answered
        self._recent.append(run.lease.slice_id)

    def slices(self, runs: Collection[SliceRun]) -> tuple[int, ...]:
        """Return the slices whose neighbours this worker prefers."""
        return (*(run.lease.slice_id for run in runs), *self._recent)

    @property
    def slices_of_others(self) -> list[int]:
        """Return the slices of all other workers, as of the last look."""
        return [slice_id for hand in self._crew.others for slice_id in hand.slices]

    async def may_take(self, runs: Collection[SliceRun]) -> bool:
        """Return whether this worker has less than its share."""
        mine = self._hand(runs)
        if not mine.requests:
            return True
        if mine.requests >= self._crew.share(mine) and time.monotonic() - self._looked_at > LOOK_S:
            await self.look(runs)
        return mine.requests < self._crew.share(mine)

    async def look(self, runs: Collection[SliceRun]) -> None:
        """Tell the others what this worker has, and see what they have."""
        self._looked_at, self._told_idle = time.monotonic(), not runs
        answered = self._ended + sum(run.answered for run in runs)
        self._rate.look(answered, bool(runs), self._looked_at)
        self._takes_part = True
        found = await self._board.look(self._name, self._hand(runs))
        self._names = {self._name, *found}
        self._crew = Crew(tuple(found.values()), await self._announcements.waiting())

    async def even_out(self, runs: Collection[SliceRun]) -> int:
        """Hand over what is beyond this worker's share to workers that run dry; return how many requests."""
        if not runs and self._told_idle and time.monotonic() - self._looked_at < REST_S:
            return 0
        await self.look(runs)
        most, workers = self._crew.give(self._hand(runs))
        if not most or time.monotonic() < self._tries_at or not await self._all_understand():
            return 0
        handed = 0
        for run in sorted(runs, key=lambda run: -run.lease.slice_id):  # what came last has begun least
            if handed < most:
                handed += await run.hand_over(most - handed, workers)
        self._pause_s = 0.0 if handed else min(2 * self._pause_s or AGAIN_S, REST_S)
        self._tries_at = time.monotonic() + self._pause_s
        return handed

    async def _all_understand(self) -> bool:
        """Return whether all workers of this model are in the crew.

        One of an older version is not, and would take a slice that was handed over for another.
        """
        alive = await self._heartbeat.alive()
        return all(
            state["name"] in self._names or state.get("drained") for state in alive if state["model"] == self._model
        )

    async def leave(self) -> None:
        """Take no part, because this worker takes no slices now."""
        if self._takes_part:
            await self._board.leave(self._name)
            self._takes_part = False

    def _hand(self, runs: Collection[SliceRun]) -> Hand:
        remaining = sum(run.remaining for run in runs)
        return Hand(remaining, round(self._rate.per_second, 3), self._full_at, self.slices(runs))
