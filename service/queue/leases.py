"""Manages the leases on slices: each change is one SQL transaction, fenced by an epoch that grows with every claim.

Leases live in SQL and not in Redis, so that wiping Redis cannot give a slice to two workers. They expire by the
database's clock, so that no host's clock can end them.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, case, exists, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from service.db.clock import now_s
from service.db.moves import rows_changed
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, DrainedWorker, Slice, SliceBatch, SliceStatus, fixed
from service.objects.shards import Told, told
from service.queue.counts import Counts
from service.queue.parts import Part, offsets_of, places_of
from service.queue.urgency import urgent_at

ABSURD_LEASES = 10  # a lease with more than so many lease times left was given by a wrong clock
DEATHS_TO_TRY = 2  # one death may be chance; after two the slice is tried in parts
ALONE_DEATHS_TO_REFUSE = 2  # a request that was alone in the engine at so many deaths has caused them


@dataclass(frozen=True, slots=True)
class Trial:
    """A slice whose workers died: it runs alone, `size` requests at a time.

    `alone_deaths`: at how many of these deaths the request at `place` was alone in the engine.
    """

    size: int
    place: int | None
    alone_deaths: int


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on a slice, valid while the row still has this epoch; `trial` is set if the slice is suspect.

    `first`, `count` and `offsets` say which requests it has (`parts.py`). `before`: what is known of the segments of
    earlier leases.
    """

    slice_id: int
    epoch: int
    window_id: int
    first: int
    count: int
    trial: Trial | None = None
    offsets: bytes | None = None
    before: tuple[tuple[int, int | None], ...] = ()


class BatchEnded(Exception):
    """A batch was cancelled, or has expired, before its requests were handed over."""


class Leases:
    def __init__(
        self, database: Database, owner: str, model: str, lease_s: float, adapters: Collection[str] = ()
    ) -> None:
        """Prepare the leases of the worker `owner`, which serves `model` and `adapters`, for `lease_s` seconds each."""
        self._database = database
        self._owner = owner
        self._model = model
        self._lease_s = lease_s
        self._adapters = list(adapters)

    async def claim(self, slice_id: int) -> Lease | None:
        """Lease the slice if it is ready and of this worker's model and adapters; return None if it is not.

        A drained worker gets none, from the moment of the drain on.

        An announcement may be older than the database, whose ids then mean other slices.
        """
        # An engine would answer a request for an adapter that it lacks with an error, and that answer would be final.
        others = (
            exists()
            .where(SliceBatch.slice_id == slice_id, Batch.id == SliceBatch.batch_id)
            .where(Batch.adapter.is_not(None), Batch.adapter.not_in(self._adapters))
        )
        is_drained = exists().where(DrainedWorker.name == self._owner)
        async with self._database.write() as session:
            row = (
                await session.execute(
                    update(Slice)
                    .where(Slice.id == slice_id, Slice.model == self._model, Slice.status == SliceStatus.READY)
                    .where(~others, ~is_drained)
                    .values(
                        status=SliceStatus.LEASED,
                        owner=self._owner,
                        epoch=Slice.epoch + 1,
                        lease_until=now_s() + self._lease_s,
                    )
                    .returning(Slice)
                )
            ).scalar_one_or_none()
            if row is None:
                return None
            await _move_shares(session, [slice_id], SliceStatus.LEASED)
        suspect = row.deaths >= DEATHS_TO_TRY
        trial = Trial(row.trial or row.count, row.trial_place, row.alone_deaths) if suspect else None
        before = tuple(told(row.segments, row.epoch - 1))
        return Lease(row.id, row.epoch, row.window_id, row.first, row.count, trial, row.offsets, before)

    def _holds(self, lease: Lease) -> ColumnElement[bool]:
        """Return the condition that this worker still holds the lease.

        A database that lost its last commits, as after a failover, may have given the same epoch to another worker.
        """
        mine = (Slice.id == lease.slice_id) & (Slice.epoch == lease.epoch) & (Slice.owner == self._owner)
        return mine & (Slice.status == SliceStatus.LEASED)

    async def begin_trial(self, lease: Lease, size: int, place: int) -> bool:
        """Record, before they run, the next `size` requests from `place` on; return False for a stale lease."""
        async with self._database.write() as session:
            result = await session.execute(
                update(Slice)
                .where(self._holds(lease))
                .values(
                    trial=size,
                    trial_place=place,
                    trial_epoch=lease.epoch,
                    alone_deaths=case((Slice.trial_place == place, Slice.alone_deaths), else_=0),
                )
            )
            return rows_changed(result) == 1

    async def renew(self, leases: Iterable[Lease]) -> set[Lease]:
        """Extend these leases; return those that this worker still holds."""
        by_epoch = {(lease.slice_id, lease.epoch): lease for lease in leases}
        if not by_epoch:
            return set()
        mine = tuple_(Slice.id, Slice.epoch).in_(by_epoch) & (Slice.owner == self._owner)
        async with self._database.write() as session:
            rows = await session.execute(
                update(Slice)
                .where(mine, Slice.status == SliceStatus.LEASED)
                .values(lease_until=now_s() + self._lease_s)
                .returning(Slice.id, Slice.epoch)
            )
            return {by_epoch[slice_id, epoch] for slice_id, epoch in rows}

    async def finish(self, lease: Lease, counts: dict[str, Counts], segments: Told) -> bool:
        """Mark the slice done with its counts by batch, and note how many segments each epoch has.

        For a stale lease change nothing and return False.
        """
        async with self._database.write() as session:
            result = await session.execute(
                update(Slice)
                .where(self._holds(lease))
                .values(status=SliceStatus.DONE, lease_until=None, segments=_said(segments, lease.epoch))
            )
            if rows_changed(result) != 1:
                return False
            await _end_shares(session, lease.slice_id, counts)
            await _move_shares(session, [lease.slice_id], SliceStatus.DONE)  # those of batches that are deleted
            return True

    async def finish_shares(self, lease: Lease, counts: dict[str, Counts]) -> bool:
        """Mark these batches' shares of the slice done, while it has others; return False for a stale lease.

        A batch whose requests are all answered does not wait for those of others.
        """
        async with self._database.write() as session:
            held = select(Slice.id).where(self._holds(lease)).with_for_update()
            if (await session.scalars(held)).one_or_none() is None:
                return False
            await _end_shares(session, lease.slice_id, counts)
            return True

    async def give_back(self, lease: Lease, segments: Told) -> bool:
        """Make the slice ready again, with what is known of its segments; return False for a stale lease."""
        async with self._database.write() as session:
            result = await session.execute(
                update(Slice).where(self._holds(lease)).values({**_ready(), "segments": _said(segments, lease.epoch)})
            )
            if rows_changed(result) != 1:
                return False
            await _move_shares(session, [lease.slice_id], SliceStatus.READY)
            return True

    async def hand_over(self, lease: Lease, kept: NDArray[np.int64], given: Sequence[Part]) -> bool:
        """Move these parts out of a slice into new ready slices; return False for a stale lease.

        `kept`: the places in the window's order that the slice keeps. Raises BatchEnded if a batch of a part no longer
        runs.
        """
        async with self._database.write() as session:
            row = (await session.scalars(select(Slice).where(self._holds(lease)).with_for_update())).one_or_none()
            if row is None:
                return False
            row.offsets, row.count = offsets_of(row.first, kept), len(kept)
            # With an epoch, as a lease would give it: the planner plans nothing again that was ever leased.
            told = {
                "window_id": row.window_id,
                "model": row.model,
                "first": row.first,
                "epoch": 1,
                "segments": _said([], 1),
                "deaths": row.deaths,
            }
            new = [Slice(**told, count=len(each.places), offsets=offsets_of(row.first, each.places)) for each in given]
            session.add_all(new)
            await session.flush()
            session.add_all(
                SliceBatch(slice_id=slice_.id, batch_id=batch_id, total=total)
                for slice_, part in zip(new, given, strict=True)
                for batch_id, total in part.batches.items()
            )
            for batch_id in sorted({batch_id for part in given for batch_id in part.batches}):
                shares = [part.batches[batch_id] for part in given if batch_id in part.batches]
                share = (SliceBatch.slice_id == lease.slice_id) & (SliceBatch.batch_id == batch_id)
                await session.execute(update(SliceBatch).where(share).values(total=SliceBatch.total - sum(shares)))
                more = {"slices": Batch.slices + len(shares), "slices_left": Batch.slices_left + len(shares)}
                runs = (Batch.id == batch_id) & (Batch.status == BatchStatus.IN_PROGRESS)
                if rows_changed(await session.execute(update(Batch).where(runs).values(more))) != 1:
                    raise BatchEnded(batch_id)
            return True

    async def places(self, lease: Lease) -> NDArray[np.int64] | None:
        """Return the places in the window's order of the slice's requests; None for a stale lease.

        It waits for a transaction that changes them, such as one whose end the caller does not know.
        """
        async with self._database.write() as session:
            row = (await session.scalars(select(Slice).where(self._holds(lease)).with_for_update())).one_or_none()
        return None if row is None else places_of(row.first, row.count, row.offsets)


# A finished batch takes no more counts: its finalizer has set the final ones.
_TAKES_COUNTS = Batch.status.in_(["in_progress", "finalizing", "cancelling"])


def _added(count: Counts) -> dict[Any, Any]:
    """Return the values of a batch's row after one more slice is done: its answers added, one slice fewer left."""
    more = {name: getattr(Batch, name) + value for name, value in asdict(count).items() if value}
    rest = Batch.planned - Batch.completed - Batch.failed - count.answered
    return {**more, "slices_left": Batch.slices_left - 1, "urgent_at": urgent_at(rest)}


def _said(segments: Told, epoch: int) -> list[list[int | None]]:
    """Return what Slice.segments says once this is known of all epochs up to this one."""
    own = dict(segments).get(epoch, 0)
    return [*([each, count] for each, count in segments if count != 0 and each != epoch), [epoch, own]]


def _ready() -> dict[Any, Any]:
    return {"status": SliceStatus.READY, "owner": None, "lease_until": None}


async def _move_shares(session: AsyncSession, slice_ids: Iterable[int], to: SliceStatus) -> None:
    """Set the status of these slices' shares of batches to that of the slices; what is done stays so."""
    mine = SliceBatch.slice_id.in_(list(slice_ids)) & (SliceBatch.status != SliceStatus.DONE)
    await session.execute(update(SliceBatch).where(mine).values(status=to))


async def _end_shares(session: AsyncSession, slice_id: int, counts: dict[str, Counts]) -> None:
    """Mark these shares of a slice done, and count their answers, each share once."""
    for batch_id, count in sorted(counts.items()):  # in a fixed order, or two workers could deadlock
        share = (SliceBatch.slice_id == slice_id) & (SliceBatch.batch_id == batch_id)
        said = {"status": SliceStatus.DONE, "completed": count.completed, "failed": count.failed}
        left = share & (SliceBatch.status != SliceStatus.DONE)
        if rows_changed(await session.execute(update(SliceBatch).where(left).values(said))):
            await session.execute(update(Batch).where(Batch.id == batch_id, _TAKES_COUNTS).values(_added(count)))


async def _free(session: AsyncSession, which: ColumnElement[bool], values: dict[Any, Any]) -> int:
    """Make the leased slices that match ready again; return how many."""
    leased = (Slice.status == fixed(SliceStatus.LEASED)) & which
    freed = (await session.scalars(update(Slice).where(leased).values(values).returning(Slice.id))).all()
    if freed:
        await _move_shares(session, freed, SliceStatus.READY)
    return len(freed)


def _died() -> dict[Any, Any]:
    """Return the values that free a slice whose worker died; a trial that was running is halved.

    Under a lease that had begun no trial, the death says nothing about the slice: the worker died of others.
    """
    tried = Slice.trial_epoch == Slice.epoch
    return {
        **_ready(),
        "deaths": Slice.deaths + 1,
        "trial": case((tried & (Slice.trial > 1), Slice.trial // 2), else_=Slice.trial),
        "alone_deaths": case((tried & (Slice.trial == 1), Slice.alone_deaths + 1), else_=Slice.alone_deaths),
    }


_IS_EXPIRED = (Slice.status == fixed(SliceStatus.LEASED)) & (Slice.lease_until < now_s())


async def owners_of_expired(database: Database) -> set[str]:
    """Return the workers that did not renew a lease in time."""
    async with database.read() as session:
        return {owner or "" for owner in await session.scalars(select(Slice.owner).where(_IS_EXPIRED).distinct())}


async def free_expired(database: Database, owners: Collection[str], dead: bool) -> int:
    """Make the slices ready whose leases these workers did not renew; return how many.

    `dead`: the workers have died. An expired lease alone says nothing about the slice: its worker may be cut off.
    """
    if not owners:
        return 0
    async with database.write() as session:
        expired = Slice.owner.in_(owners) & (Slice.lease_until < now_s())
        return await _free(session, expired, _died() if dead else _ready())


async def free_held(database: Database, owner: str) -> int:
    """Free the slices that a worker of this name held when it died, by the word of who knows that it did."""
    async with database.write() as session:
        return await _free(session, Slice.owner == owner, _died())


async def shorten_absurd(database: Database, lease_s: float) -> int:
    """Shorten leases that end far in the future to one lease time from now; return how many.

    The database's clock was wrong when they were given. Live workers renew them.
    """
    until = now_s() + ABSURD_LEASES * lease_s
    absurd = (Slice.status == fixed(SliceStatus.LEASED)) & (Slice.lease_until > until)
    async with database.read() as session:
        if (await session.scalars(select(Slice.id).where(absurd).limit(1))).one_or_none() is None:
            return 0
    async with database.write() as session:
        return rows_changed(await session.execute(update(Slice).where(absurd).values(lease_until=now_s() + lease_s)))
