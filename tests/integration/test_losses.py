"""Online requests that kill workers, as all processes of the API remember them."""

from typing import Any

import pytest
from redis.asyncio import Redis

from service.queue import keys, losses
from service.queue.losses import Losses
from tests.waiting import until

KILLER, VICTIM = "a" * 64, "b" * 64


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "LOOK_S", 0.0)


async def test_one_worker_blames_nobody_and_two_are_told_to_every_process(redis: Redis) -> None:
    """However often it ran the request."""
    one, other = Losses(redis), Losses(redis)
    for _ in range(5):
        for each in (KILLER, VICTIM):
            one.lost("worker-a 1", each)
    await until(lambda: redis.exists(keys.lost(VICTIM)))
    assert not await one.refuses(KILLER)
    other.lost("worker-a 2", KILLER)
    await until(lambda: one.refuses(KILLER))
    assert await other.refuses(KILLER)
    assert not await one.refuses(VICTIM)


async def test_who_hangs_up_is_remembered_for_a_while(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that hangs is killed when the client that asked may be gone."""
    found = Losses(redis)
    for worker in ("a", "b"):
        found.left(worker, KILLER)
        found.left("c", VICTIM)
        found.lost(worker, "another")
    await until(lambda: found.refuses(KILLER))
    monkeypatch.setattr(losses, "LEFT_S", 0.0)
    found.lost("c", "another")
    found.lost("d", VICTIM)
    await until(lambda: redis.exists(keys.lost(VICTIM)))
    assert not await found.refuses(VICTIM)


async def test_a_refusal_ends(redis: Redis) -> None:
    found = Losses(redis)
    for worker in ("a", "b"):
        found.lost(worker, KILLER)
    await until(lambda: found.refuses(KILLER))
    for key in (keys.lost(KILLER), keys.REFUSED):
        assert 0 < await redis.ttl(key) <= losses.KEEP_S
    now, _ = await redis.time()
    until_s: Any = await redis.zscore(keys.REFUSED, KILLER)
    assert 0 < until_s - now <= losses.KEEP_S
    await redis.zadd(keys.REFUSED, {KILLER: now})
    assert not await found.refuses(KILLER)


async def test_only_the_latest_are_kept(redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MOST_REFUSED", 3)
    found = Losses(redis)
    for number in range(5):
        for worker in ("a", "b"):
            found.lost(worker, f"{number}")
        await until(lambda: redis.zscore(keys.REFUSED, f"{number}"))  # noqa: B023
    assert await redis.zcard(keys.REFUSED) == 3


async def test_without_redis_nobody_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    away = Redis(unix_socket_path=str(tmp_path_factory.mktemp("no") / "redis.sock"))
    found = Losses(away)
    for worker in ("a", "b"):
        found.lost(worker, KILLER)
    assert not await found.refuses(KILLER)
    await found.close()
    await away.aclose()
