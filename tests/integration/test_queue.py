"""Announcements and leases, the pieces that several workers share."""

import asyncio
import math
import random

import pytest
from redis.asyncio import Redis
from sqlalchemy import select, update

from service.db.sessions import Database
from service.db.tables import Slice, SliceStatus, Window
from service.queue.announcements import Announcements, Ready
from service.queue.connection import open_redis
from service.queue.counts import Counts
from service.queue.leases import Lease, Leases, free_expired, owners_of_expired
from service.queue.progress import Heartbeat, Progress

pytestmark = pytest.mark.dialects

LEASE_S = 36.0


def ready(*slice_ids: int, window: int = 1, pool: int = 0, project: str = "p") -> list[Ready]:
    return [Ready(each, 10, window, pool, project) for each in slice_ids]


async def test_slice_is_announced_once_and_in_order(redis: Redis) -> None:
    announcements = Announcements(redis, "m")
    assert await announcements.announce(ready(3, 1, 2)) == 3
    assert await announcements.announce(ready(3, 1, 2, 4)) == 1
    assert [await announcements.take() for _ in range(5)] == [3, 1, 2, 4, None]


async def test_what_nobody_has_taken_is_put_into_the_newest_order(redis: Redis) -> None:
    announcements = Announcements(redis, "m")
    assert await announcements.announce(ready(1, 2, 3, 4)) == 4
    assert await announcements.take() == 1
    assert await announcements.announce(ready(9, 1, 4, 2)) == 1  # the first is taken; the third is not ready any more
    assert [await announcements.take() for _ in range(4)] == [9, 4, 2, None]


async def test_no_more_is_announced_than_there_is_room(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.queue.announcements.MOST_ANNOUNCED", 3)
    announcements = Announcements(redis, "m")
    assert await announcements.waiting() == 0
    assert await announcements.announce(ready(1, 2, 3, 4)) == 3
    assert await announcements.waiting() == math.inf, "there may be more"
    assert await announcements.take() == 1
    assert await announcements.waiting() == math.inf
    assert await announcements.announce(ready(2, 3)) == 0
    assert await announcements.waiting() == 20
    assert await announcements.announce(ready(7, 1, 8, 2, 4)) == 2
    assert [await announcements.take() for _ in range(4)] == [7, 8, 2, None]


async def test_taken_slice_can_be_announced_again_once_it_was_claimed(redis: Redis) -> None:
    announcements = Announcements(redis, "m")
    await announcements.announce(ready(1))
    assert await announcements.take() == 1
    assert await announcements.announce(ready(1)) == 0
    await announcements.forget_taken(1)
    assert await announcements.announce(ready(1)) == 1


async def test_what_a_worker_took_and_died_is_announced_again(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    announcements = Announcements(redis, "m")
    await announcements.announce(ready(1))
    assert await announcements.take() == 1
    assert await announcements.announce(ready(1)) == 0
    monkeypatch.setattr("service.queue.announcements.CLAIM_S", 0)
    assert await announcements.announce(ready(1)) == 1
    assert await announcements.take() == 1


async def test_wiped_redis_announces_nothing(redis: Redis) -> None:
    announcements = Announcements(redis, "m")
    await announcements.announce(ready(1))
    await redis.flushall()
    assert await announcements.take() is None
    assert await announcements.announce(ready(1)) == 1
    assert await announcements.take() == 1


async def test_models_are_announced_apart(redis: Redis) -> None:
    await Announcements(redis, "a").announce(ready(1))
    assert await Announcements(redis, "b").take() is None


async def test_an_idle_worker_wakes_when_slices_are_announced(redis: Redis) -> None:
    announcements = Announcements(redis, "m")
    await announcements.announce(ready(1))
    await announcements.take()
    waits = asyncio.create_task(announcements.take(block_ms=8_000))
    await asyncio.sleep(0.05)
    assert await announcements.announce(ready(2)) == 1
    async with asyncio.timeout(7):
        assert await waits == 2


async def test_a_worker_takes_the_neighbours_of_its_slices(redis: Redis) -> None:
    announcements = Announcements(redis, "m")
    await announcements.announce(ready(1, 2, 3, 4, 5, 6, 7, 8))
    first, second = [await announcements.take() or 0], [await announcements.take(theirs=[1]) or 0]
    assert (first, second) == ([1], [5]), "the second worker begins in the middle of what the first comes to"
    for _ in range(3):
        first.append(await announcements.take(first, second) or 0)
        second.append(await announcements.take(second, first) or 0)
    assert (first, second) == ([1, 2, 3, 4], [5, 6, 7, 8])


async def test_the_first_announced_slice_says_whose_turn_it_is(redis: Redis) -> None:
    announcements = Announcements(redis, "m")
    await announcements.announce([*ready(20, pool=0), *ready(11, window=2), *ready(21, pool=1), *ready(12, window=2)])
    assert await announcements.take([11], [1]) == 20, "its neighbour is of another window"
    assert await announcements.take([20], [1]) == 11
    assert await announcements.take([11], [1]) == 21, "and of another pool"
    await announcements.announce([*ready(30), *ready(12, 13, project="other")])
    assert await announcements.take([11], [1]) == 30, "and of another project"
    assert await announcements.take([11], [1]) == 12


async def test_silent_worker_is_not_alive(redis: Redis) -> None:
    heartbeat = Heartbeat(redis, ttl_s=1)
    await heartbeat.beat("w", {"name": "w"})
    assert await heartbeat.alive() == [{"name": "w"}]
    await redis.pexpire("batchweave:worker:w", 1)
    await asyncio.sleep(0.01)
    assert await heartbeat.alive() == []


async def test_progress_without_redis_is_what_sql_knows(database: Database) -> None:
    nowhere = Progress(open_redis("unix:///nonexistent/redis.sock"))
    assert await nowhere.counts(database, "batch_x") == Counts(0, 0)


async def make_slices(database: Database, count: int) -> list[int]:
    async with database.write() as session:
        window = Window(model="m", plan_id="plan_x", created_at=0)
        session.add(window)
        await session.flush()
        slices = [Slice(window_id=window.id, model="m", first=n, count=1) for n in range(count)]
        session.add_all(slices)
        await session.flush()
        return [each.id for each in slices]


async def test_one_of_many_claims_wins(database: Database) -> None:
    [slice_id] = await make_slices(database, 1)
    claims = [Leases(database, f"w{n}", "m", 30).claim(slice_id) for n in range(12)]
    won = [lease for lease in await asyncio.gather(*claims) if lease]
    assert len(won) == 1


async def test_a_worker_never_leases_another_models_slice(database: Database) -> None:
    [slice_id] = await make_slices(database, 1)
    assert await Leases(database, "w", "another", 30).claim(slice_id) is None  # by an old announcement
    assert await Leases(database, "w", "m", 30).claim(slice_id)


async def pass_time(database: Database, seconds: float) -> None:
    """For leases, whose time is the database's."""
    async with database.write() as session:
        leased = update(Slice).where(Slice.status == SliceStatus.LEASED)
        await session.execute(leased.values(lease_until=Slice.lease_until - seconds))


async def test_leases_hold_under_random_moves(database: Database) -> None:
    """Workers claim, renew, finish, give back and fall silent at random; a model of the rules is the oracle."""
    rng = random.Random(7)
    slice_ids = await make_slices(database, 3)
    workers, now = [Leases(database, f"w{n}", "m", LEASE_S) for n in range(3)], 0.0
    epochs = dict.fromkeys(slice_ids, 0)
    holders: dict[int, tuple[int, float]] = {}  # slice -> epoch and end of the live lease
    finished: set[int] = set()
    deaths = dict.fromkeys(slice_ids, 0)
    issued: list[tuple[Leases, Lease]] = []
    for _ in range(250):
        worker, slice_id = rng.choice(workers), rng.choice(slice_ids)
        owner, lease = rng.choice(issued) if issued else (worker, None)
        move = rng.choice(["claim", "claim", "renew", "finish", "give_back", "wait", "free"])
        if move == "claim":
            free = slice_id not in finished and slice_id not in holders
            got = await worker.claim(slice_id)
            assert (got is not None) == free
            if got:
                assert (got.trial is not None) == (deaths[slice_id] >= 2)
                epochs[slice_id] += 1
                assert got.epoch == epochs[slice_id]
                holders[slice_id] = (got.epoch, now + LEASE_S)
                issued.append((worker, got))
        elif move == "wait":
            passed = rng.choice([10.0, 20.0, 50.0])  # far from a lease's length in any sum, for this takes time too
            await pass_time(database, passed)
            now += passed
        elif move == "free":
            late, dead = {key for key, (_, end) in holders.items() if end < now}, rng.random() < 0.5
            assert await free_expired(database, await owners_of_expired(database), dead) == len(late)
            for key in late:
                deaths[key] += dead
                del holders[key]
        elif lease is not None:
            live = holders.get(lease.slice_id, (0, 0.0))[0] == lease.epoch and lease.slice_id not in finished
            live = live and worker is owner
            if move == "renew":
                assert await worker.renew([lease]) == ({lease} if live else set())
                if live:
                    holders[lease.slice_id] = (lease.epoch, now + LEASE_S)
            elif move == "give_back":
                assert await worker.give_back(lease, []) == live
                if live:
                    del holders[lease.slice_id]
            elif rng.random() < 0.2:
                assert await worker.finish(lease, {}, []) == live
                if live:
                    finished.add(lease.slice_id)
                    del holders[lease.slice_id]
    async with database.read() as session:
        rows = (await session.scalars(select(Slice))).all()
    assert {row.id for row in rows if row.status == SliceStatus.DONE} == finished
    assert {row.id: row.epoch for row in rows} == epochs
    assert finished
    assert max(epochs.values()) > 5
