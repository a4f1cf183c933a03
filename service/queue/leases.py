"""Leases on slices: each change one SQL statement, fenced by an epoch that grows with every claim.

They live in SQL and not in Redis, so that wiping Redis cannot give a slice to two workers.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from sqlalchemy import case, tuple_, update

from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import Slice, SliceBatch, SliceStatus
from service.queue.counts import Counts

DEATHS_TO_TRY = 2  # one may be chance; then the slice is tried in parts
ALONE_DEATHS_TO_REFUSE = 2  # so many of a request by itself are its own doing


@dataclass(frozen=True, slots=True)
class Trial:
    """A slice whose workers died: it runs alone, `size` requests at a time.

    `alone_deaths`: how many of these deaths the request at `place` met alone in the engine.
    """

    size: int
    place: int | None
    alone_deaths: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on a slice, good while the row still has this epoch; `trial` if the slice is suspect."""

    slice_id: int
    epoch: int
    window_id: int
    first: int
    count: int
    trial: Trial | None = None


class Leases:
    def __init__(self, database: Database, owner: str, lease_s: float, clock: Callable[[], float]) -> None:
        self._database = database
        self._owner = owner
        self._lease_s = lease_s
        self._clock = clock

    async def claim(self, slice_id: int) -> Lease | None:
        """Take the slice if it is ready; None when it is not to be had."""
        now = self._clock()
        async with self._database.write() as session:
            row = (
                await session.execute(
                    update(Slice)
                    .where(Slice.id == slice_id, Slice.status == SliceStatus.READY)
                    .values(
                        status=SliceStatus.LEASED,
                        owner=self._owner,
                        epoch=Slice.epoch + 1,
                        lease_until=now + self._lease_s,
                    )
                    .returning(Slice)
                )
            ).scalar_one_or_none()
        if row is None:
            return None
        suspect = row.deaths >= DEATHS_TO_TRY
        trial = Trial(row.trial or row.count, row.trial_place, row.alone_deaths) if suspect else None
        return Lease(row.id, row.epoch, row.window_id, row.first, row.count, trial)

    async def begin_trial(self, lease: Lease, size: int, place: int) -> bool:
        """Note what runs next, before it does: `size` requests from the one at `place` on; False for a stale lease."""
        async with self._database.write() as session:
            result = await session.execute(
                update(Slice)
                .where(Slice.id == lease.slice_id, Slice.epoch == lease.epoch, Slice.status == SliceStatus.LEASED)
                .values(
                    trial=size,
                    trial_place=place,
                    trial_epoch=lease.epoch,
                    alone_deaths=case((Slice.trial_place == place, Slice.alone_deaths), else_=0),
                )
            )
            return rows_changed(result) == 1

    async def renew(self, leases: Iterable[Lease]) -> set[Lease]:
        """Extend these leases; returns those that are still ours."""
        held = {(lease.slice_id, lease.epoch): lease for lease in leases}
        if not held:
            return set()
        async with self._database.write() as session:
            rows = await session.execute(
                update(Slice)
                .where(tuple_(Slice.id, Slice.epoch).in_(held), Slice.status == SliceStatus.LEASED)
                .values(lease_until=self._clock() + self._lease_s)
                .returning(Slice.id, Slice.epoch)
            )
            return {held[slice_id, epoch] for slice_id, epoch in rows}

    async def finish(self, lease: Lease, counts: dict[str, Counts]) -> bool:
        """Mark the slice done with its counts by batch; False, and nothing changed, for a stale lease."""
        async with self._database.write() as session:
            result = await session.execute(
                update(Slice)
                .where(Slice.id == lease.slice_id, Slice.epoch == lease.epoch, Slice.status == SliceStatus.LEASED)
                .values(status=SliceStatus.DONE, owner=None, lease_until=None)
            )
            if rows_changed(result) != 1:
                return False
            for batch_id, count in counts.items():
                await session.execute(
                    update(SliceBatch)
                    .where(SliceBatch.slice_id == lease.slice_id, SliceBatch.batch_id == batch_id)
                    .values(**asdict(count))
                )
            return True

    async def give_back(self, lease: Lease) -> bool:
        """Make the slice ready again; False for a stale lease."""
        async with self._database.write() as session:
            result = await session.execute(
                update(Slice)
                .where(Slice.id == lease.slice_id, Slice.epoch == lease.epoch, Slice.status == SliceStatus.LEASED)
                .values(status=SliceStatus.READY, owner=None, lease_until=None)
            )
            return rows_changed(result) == 1

    async def give_back_leftovers(self) -> int:
        """At a worker's start: what a process of the same name held when it died is ready again."""
        async with self._database.write() as session:
            result = await session.execute(
                update(Slice).where(Slice.owner == self._owner, Slice.status == SliceStatus.LEASED).values(_died())
            )
            return rows_changed(result)


def _died() -> dict[Any, Any]:
    """A slice whose worker is gone is ready again; a trial that it did not survive goes on with half as many.

    A lease that had begun no trial says nothing of the slice: its worker died of others.
    """
    tried = Slice.trial_epoch == Slice.epoch
    return {
        "status": SliceStatus.READY,
        "owner": None,
        "lease_until": None,
        "deaths": Slice.deaths + 1,
        "trial": case((tried & (Slice.trial > 1), Slice.trial // 2), else_=Slice.trial),
        "alone_deaths": case((tried & (Slice.trial == 1), Slice.alone_deaths + 1), else_=Slice.alone_deaths),
    }


async def free_expired(database: Database, now: float) -> int:
    """Make ready what is leased to workers whose time is up."""
    async with database.write() as session:
        result = await session.execute(
            update(Slice).where(Slice.status == SliceStatus.LEASED, Slice.lease_until < now).values(_died())
        )
        return rows_changed(result)
