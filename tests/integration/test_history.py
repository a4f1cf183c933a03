"""What the dashboard keeps over time: points for its charts, the pace of batches, and workers that fell silent."""

import re
from typing import Any

import httpx
import pytest
from redis import Redis as SyncRedis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from service.jobs.historian import Historian
from service.metrics.history import MOST_SHOWN, History
from service.queue import keys, progress
from service.queue.counts import Counts
from service.queue.leases import Leases
from service.queue.progress import Heartbeat, Starting, note_exit
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.waiting import until


async def test_history_is_noted_once_in_ten_seconds(pages: httpx.AsyncClient, harness: Harness, clock: Clock) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(20)))
    await harness.plan()
    state = {"name": "w", "model": "m", "input_tokens_per_second": 5.0, "engine": [{"running": 2}, {"running": 3}]}
    await Heartbeat(harness.redis).beat("w", state)
    assert await Leases(harness.database, "w", "test-model", 30).claim(1)
    historian = Historian(harness.database, harness.redis, clock)
    assert await historian.run_once()
    assert not await historian.run_once()
    [point] = (await pages.get("/overview.json")).json()["points"]
    assert (point["unfinished"], point["running"], point["input_tokens_per_second"]) == (20, 5, 5.0)
    assert (await pages.get(f"/batches/{batch_id}/points.json")).json()["points"] == [[int(clock.now), 0, 0, 0, 0]]


async def test_a_week_is_kept_with_fewer_points(pages: httpx.AsyncClient, harness: Harness, clock: Clock) -> None:
    history, now = History(harness.redis), int(clock.now)
    for at in range(now - 2 * 24 * 3600, now + 1, 600):
        await history.note({"at": at, "kv_capacity": 200, "kv_of_left": 50, "reads_per_second": 0.25})
    spans = {
        name: [point["at"] for point in (await pages.get(f"/overview.json?range={name}")).json()["points"]]
        for name in ("15m", "1h", "24h", "7d", "nonsense")
    }
    assert [len(spans[name]) for name in ("15m", "1h", "24h", "nonsense")] == [2, 7, 145, 7]
    assert spans["7d"] == [spans["7d"][0]]  # all came within one turn of two minutes
    assert all(at >= now - 3600 for at in spans["1h"])
    [point, *_] = (await pages.get("/overview.json?range=1h")).json()["points"]
    assert (point["kv_left"], point["reads"], point["cached"]) == (25.0, 25.0, None)


async def test_a_worker_that_falls_silent_is_told_of_once(
    pages: httpx.AsyncClient, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REDIS_YOUNG_S", 0)
    heart = Heartbeat(harness.redis)
    state = {
        "model": "test-model",
        "slices": 0,
        "requests": 0,
        "machine": "the CPU of a",
        "started_at": 0,
        "is_timed": False,
    }
    for name in ("left", "died", "alive"):
        await heart.beat(name, {**state, "name": name})
    await heart.leave("left")
    await harness.redis.delete(keys.worker("died"))  # as if its time had passed
    for _ in range(2):
        assert [each["name"] for each in await heart.alive()] == ["alive"]
    events = await heart.events()
    begun = [("start", "left"), ("start", "died"), ("start", "alive")]
    assert [each[1:3] for each in events] == [*begun, ("stop", "left"), ("death", "died")]
    at = events[-1].at
    harness.clock.now = at + 60
    page = (await pages.get("/workers")).text
    assert [words in page for words in ("alive</b> became ready", "left</b> shut down cleanly")] == [True, True]
    assert "died</b> fell silent" in page
    told = (await pages.get("")).text
    assert "Died or fell silent in the last 12 h: died 1 min ago." in told
    assert "No figure: the cost model does not describe" in told
    marks = (await pages.get("/overview.json")).json()["marks"]
    assert {("death", "died fell silent"), ("start", "died became ready")} <= {
        (each["kind"], each["text"]) for each in marks
    }
    assert len(marks) == 5
    harness.clock.now = at + 13 * 3600
    assert "fell silent in the last 12 h" not in (await pages.get("")).text
    await heart.beat("died", {**state, "name": "died"})
    assert "died</b> was heard again" in (await pages.get("/workers")).text


async def test_an_end_that_up_saw_is_told_with_its_last_words(
    pages: httpx.AsyncClient, harness: Harness, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "REDIS_YOUNG_S", 0)
    heart = Heartbeat(harness.redis)
    await heart.beat("w", {"name": "w", "model": "test-model"})
    with SyncRedis.from_url(redis_url) as client:
        note_exit(client, "w", "signal SIGSEGV: <b>bad kernel</b>", 3.0, is_worker=True)
        note_exit(client, "planner", "exit code 1", 3.0, is_worker=False)
    assert await heart.alive() == []
    assert [each.kind for each in await heart.events()] == ["exit", "exit", "start"]
    assert await heart.deaths() == 2
    harness.clock.now = (await heart.events())[0].at + 60
    page = (await pages.get("/workers")).text
    assert "w</b> died: signal SIGSEGV: &lt;b&gt;bad kernel&lt;/b&gt;" in page
    begins = Starting(redis_url, "w", {"model": "test-model", "host": "h"})
    begins.begin()
    try:
        await until(lambda: _is_starting(heart))
        assert "start 2 in ten minutes; the last one died, signal SIGSEGV" in (await pages.get("/workers")).text
    finally:
        begins.end()


async def _is_starting(heart: Heartbeat) -> bool:
    return bool((await heart.everyone())[1])


async def test_many_starts_do_not_push_out_a_death(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDIS_YOUNG_S", 0)
    monkeypatch.setattr(progress, "MOST_EVENTS", 3)
    await Heartbeat(harness.redis).beat("died", {})
    await harness.redis.delete(keys.worker("died"))
    await Heartbeat(harness.redis).alive()
    for number in range(5):
        await Heartbeat(harness.redis).beat(f"w{number}", {})
    found = await Heartbeat(harness.redis).events()
    assert sorted(each[1:3] for each in found) == [("death", "died"), *(("start", f"w{n}") for n in (2, 3, 4))]


async def test_a_start_that_could_not_be_noted_is_noted_later(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    heart = Heartbeat(harness.redis)
    await heart.leave("never-began")
    with monkeypatch.context() as broken:
        broken.setattr(harness.redis, "time", _lost)
        with pytest.raises(RedisConnectionError):
            await heart.beat("w", {"name": "w"})
    assert await heart.alive() == [{"name": "w"}]
    await heart.beat("w", {"name": "w"})
    assert [each[1:3] for each in await heart.events()] == [("start", "w")]


async def _lost() -> None:
    raise RedisConnectionError("cut")


async def test_a_planner_that_reports_no_more_is_missed(pages: httpx.AsyncClient, harness: Harness) -> None:
    await Historian(harness.database, harness.redis, harness.clock).run_once()
    for seconds, is_missed in ((50, False), (50, True)):
        harness.clock.now += seconds
        assert ("No planner has reported for 1 min 40 s" in (await pages.get("")).text) == is_missed
    assert "No planner" not in (await pages.get("/batches")).text


async def test_a_planner_that_never_reported_is_missed_once_a_batch_waits(
    pages: httpx.AsyncClient, harness: Harness
) -> None:
    harness.clock.now += 1000
    assert "No planner" not in (await pages.get("")).text
    await harness.submit(jsonl([line(1)]))
    for seconds, is_missed in ((50, False), (50, True)):
        harness.clock.now += seconds
        assert ("A batch has waited to be checked for 1 min 40 s" in (await pages.get("")).text) == is_missed
    await harness.plan()
    assert "no planner runs" not in (await pages.get("")).text  # though Redis has forgotten what it said


async def test_a_redis_that_was_away_makes_no_deaths(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "REDIS_YOUNG_S", 10**9)
    heart = Heartbeat(harness.redis)
    await heart.beat("w", {"name": "w"})
    await harness.redis.delete(keys.worker("w"))
    assert await heart.alive() == []
    assert [each.kind for each in await heart.events()] == ["start"]
    await heart.beat("w", {"name": "w"})
    assert await heart.alive() == [{"name": "w"}]


async def test_a_redis_that_does_not_say_its_age_still_tells_who_lives(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refused(*_: Any) -> None:
        raise ResponseError("unknown command 'INFO'")

    heart = Heartbeat(harness.redis)
    for name in ("died", "alive"):
        await heart.beat(name, {"name": name})
    await harness.redis.delete(keys.worker("died"))
    monkeypatch.setattr(harness.redis, "info", refused)
    assert await heart.alive() == [{"name": "alive"}]
    assert [each.name for each in await heart.events() if each.kind == "death"] == ["died"]


async def test_a_batchs_history_is_thinned_and_has_its_end(harness: Harness) -> None:
    history = History(harness.redis)
    for at in range(3000):
        await history.note_batch("batch_x", at, Counts(completed=at // 2))  # every second one tells nothing new
    points = await history.batch_points("batch_x")
    assert len(points) <= MOST_SHOWN
    assert points[-1][:2] == [2998, 1499]
    assert [point[1] for point in points] == sorted({point[1] for point in points})
    stored: Any = await harness.redis.llen("batchweave:history:batch_x")  # pyright: ignore[reportGeneralTypeIssues]
    assert stored <= 2 * MOST_SHOWN


async def test_a_rest_is_drawn_as_one(harness: Harness) -> None:
    history = History(harness.redis)
    for at, answers in ((0, 1), (10, 2), (20, 2), (100, 3)):
        await history.note_batch("batch_x", at, Counts(completed=answers))
    assert [point[:2] for point in await history.batch_points("batch_x")] == [[0, 1], [10, 2], [90, 2], [100, 3]]


async def test_the_time_until_all_is_done_is_by_the_pace_of_answers(pages: httpx.AsyncClient, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(100)))
    await harness.plan()
    await Heartbeat(harness.redis).beat("w", {"name": "w", "model": "test-model", "slices": 0, "requests": 0})
    historian = Historian(harness.database, harness.redis, harness.clock)
    assert await Leases(harness.database, "w", "test-model", 30).claim(1)
    await historian.run_once()
    await harness.progress.state(1, {batch_id: Counts(completed=60)})
    await harness.redis.delete(keys.HISTORY_TURN)  # as if its time had passed
    harness.clock.now += 600
    await historian.run_once()
    point = (await pages.get("/overview.json")).json()["points"][-1]
    assert (point["unfinished"], round(point["answers_per_second"], 3)) == (40, 0.1)
    assert "6 min 40 s" in (await pages.get("")).text


async def test_short_batches_count_for_the_pace_too(harness: Harness) -> None:
    historian = Historian(harness.database, harness.redis, harness.clock)
    await historian.run_once()
    for _ in range(2):
        batch_id = await harness.submit(jsonl(line(n) for n in range(30)))
        await harness.plan()
        async with harness.working(ScriptedEngine()):
            await harness.until_ended(batch_id)
            await harness.redis.delete(keys.HISTORY_TURN)
            harness.clock.now += 600
            await historian.run_once()
        assert (await History(harness.redis).last())["answers_per_second"] == pytest.approx(0.05, abs=1e-4)


async def test_the_pace_of_a_batch_is_of_its_last_minute(pages: httpx.AsyncClient, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(100)))
    await harness.plan()
    history, now = History(harness.redis), int(harness.clock.now)
    for at in range(20):
        counts = Counts(completed=at, input_tokens=9 * at, output_tokens=100 * at if at < 10 else 10 * at + 900)
        await history.note_batch(batch_id, now - 190 + 10 * at, counts)
    assert await history.paces([batch_id, "batch_x"], now) == {batch_id: 1.0}
    assert re.search(r"the last minute</dt><dd>\s*1\s*</dd>", (await pages.get(f"/batches/{batch_id}")).text)
    assert await history.paces([batch_id], now + 61) == {}
