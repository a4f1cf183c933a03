"""Online requests through the API and a worker's door, over real sockets; the engine behind the door is scripted.

tests/engine/test_sglang.py has the real engine.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import delete, update

from service.api import remembered
from service.db.tables import DEFAULT_PROJECT, DrainedWorker
from service.db.tenant_tables import ApiKey, Project, Role, Tier
from service.queue.leases import Leases
from service.queue.progress import Heartbeat
from service.tenants.keys import new_key
from service.worker.loop import Worker
from tests.conftest import Clock
from tests.integration.harness import ScriptedEngine, jsonl, line
from tests.integration.online_harness import MODEL, PIECES, OnlineHarness, ScriptedOnlineEngine, asked
from tests.integration.serving import CHAT, serve
from tests.waiting import until


async def test_a_stream_and_a_whole_answer_come_through(online: OnlineHarness) -> None:
    engine = ScriptedOnlineEngine()
    async with online.door("w", engine):
        whole = await online.post(asked())
        assert whole.status_code == 200
        assert whole.headers["content-type"] == "application/json"
        assert whole.json()["id"] == whole.headers["x-request-id"].replace("req_", "chatcmpl-")
        async with online.client() as client:
            stream = await client.chat.completions.create(**asked(stream=True))
            got = [chunk.choices[0].delta.content async for chunk in stream]
    assert got == [f"{number} " for number in range(PIECES)]
    assert engine.streams[0].closed.is_set()


async def test_requests_that_come_at_once_find_the_worker(online: OnlineHarness) -> None:
    """Those that came during the API's first look at the workers found none."""
    async with online.door("w", ScriptedOnlineEngine()):
        answers = await asyncio.gather(*(online.post(asked()) for _ in range(8)))
    assert [each.status_code for each in answers] == [200] * 8


async def test_a_client_that_hangs_up_ends_its_request(online: OnlineHarness) -> None:
    for engine in (ScriptedOnlineEngine(waits=True), ScriptedOnlineEngine(stops_after=2)):
        async with online.door("w", engine) as door:
            task = asyncio.create_task(_read(online, asked(stream=True)))
            async with asyncio.timeout(30):
                await engine.began.wait()
                while engine.stops_after is not None and not engine.streams:
                    await asyncio.sleep(0.01)
                task.cancel()
                await (engine.cancelled if engine.waits else engine.streams[0].closed).wait()
                while door.in_flight:
                    await asyncio.sleep(0.01)
    async with httpx.AsyncClient(base_url=online.url) as client:
        figures = (await client.get("/metrics")).text
    left = f'batchweave_online_requests_total{{model="{MODEL}",outcome="client_left",tier="default"}}'
    assert left in figures
    assert 'route="/v1/chat/completions",status="499"' in figures


async def _read(online: OnlineHarness, body: dict[str, Any]) -> None:
    async with online.client() as client:
        async for _ in await client.chat.completions.create(**body):
            pass


async def test_a_worker_that_is_lost_before_its_answer_is_replaced(online: OnlineHarness) -> None:
    for stream in (False, True):
        engines = {name: ScriptedOnlineEngine(waits=True) for name in ("a", "b")}
        async with online.door("a", engines["a"]) as first, online.door("b", engines["b"]) as second:
            task = asyncio.create_task(online.post(asked(stream=stream)))
            async with asyncio.timeout(30):
                while not any(engine.began.is_set() for engine in engines.values()):
                    await asyncio.sleep(0.01)
                lost, door = ("a", first) if engines["a"].began.is_set() else ("b", second)
                for name in engines:
                    engines[name].waits = name == lost
                await online.lose(door)
                answer = await task
        assert answer.status_code == 200
        assert sum(len(engine.asked) for engine in engines.values()) == 2


async def test_a_stream_whose_worker_is_lost_ends_with_an_error(online: OnlineHarness) -> None:
    engine = ScriptedOnlineEngine(stops_after=2)
    async with online.door("w", engine) as door, online.client() as client:
        stream = await client.chat.completions.create(**asked(stream=True))
        got = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        await online.lose(door)
        with pytest.raises(openai.APIError, match="lost while it answered"):
            await anext(stream)
    assert got == ["0 ", "1 "]


async def test_a_lost_response_ends_with_an_error_of_its_own_form(online: OnlineHarness) -> None:
    """Its events have types, and clients look at these."""
    body = {"model": MODEL, "input": "a private matter", "stream": True}
    async with (
        online.door("w", ScriptedOnlineEngine(stops_after=2)) as door,
        httpx.AsyncClient(base_url=online.url) as client,
        client.stream("POST", "/v1/responses", json=body) as answer,
    ):
        lines = aiter(answer.aiter_lines())
        await anext(lines)
        await online.lose(door)
        *_, kind, data = [line async for line in lines if line]
    error = json.loads(data.removeprefix("data: "))
    assert (kind, error["type"], error["code"]) == ("event: error", "error", "worker_lost")
    assert error["error"]["code"] == "worker_lost"


async def test_a_request_that_two_workers_did_not_survive_is_not_tried_again(online: OnlineHarness) -> None:
    engines = [ScriptedOnlineEngine(waits=True) for _ in range(3)]
    async with AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(online.door(f"w{n}", each)) for n, each in enumerate(engines)]
        task = asyncio.create_task(online.post(asked()))
        left = dict(zip(doors, engines, strict=True))
        async with asyncio.timeout(30):
            while not task.done():
                for door, engine in list(left.items()):
                    if engine.began.is_set():
                        del left[door]
                        await online.lose(door)
                await asyncio.sleep(0.01)
    assert len(left) == 1, "two ran it"
    answer = task.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
    assert answer.headers["x-should-retry"] == "false"


async def test_a_worker_that_stops_passes_its_requests_on(online: OnlineHarness) -> None:
    """However many stop, the request is not taken for what killed them; a stream that has begun ends with an error."""
    async with AsyncExitStack() as stack:
        left: dict[Any, ScriptedOnlineEngine] = {}
        for number in range(4):
            engine = ScriptedOnlineEngine(waits=True)
            left[await stack.enter_async_context(online.door(f"w{number}", engine))] = engine
        task = asyncio.create_task(online.post(asked()))
        async with asyncio.timeout(30):
            while len(left) > 1:
                for door, engine in list(left.items()):
                    if engine.began.is_set():
                        del left[door]
                        await door.close(0)
                await asyncio.sleep(0.01)
            [(last, engine)] = left.items()
            await engine.began.wait()
            last.end_all()
            answer = await task
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert "x-should-retry" not in answer.headers
    for number in range(4):
        await Heartbeat(online.harness.redis).leave(f"w{number}")
    async with online.door("w", ScriptedOnlineEngine(stops_after=1)) as door, online.client() as client:
        stream = await client.chat.completions.create(**asked(stream=True))
        await anext(stream)
        await door.close(0)
        with pytest.raises(openai.APIError, match="The worker is stopping"):
            await anext(stream)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_that_kills_workers_is_refused(online: OnlineHarness, streams: bool) -> None:
    """Other requests are still answered."""
    killer = asked(max_tokens=7, stream=streams)
    for number in range(2):
        engine = ScriptedOnlineEngine(waits=not streams, stops_after=1)
        async with (
            online.door(f"w{number}", engine) as door,
            httpx.AsyncClient(base_url=online.url, timeout=60) as client,
        ):
            if streams:
                async with client.stream("POST", CHAT, json=killer) as answer:
                    lines = aiter(answer.aiter_lines())
                    await anext(lines)
                    await online.lose(door)
                    assert "worker_lost" in [line async for line in lines if line][-1]
            else:
                task = asyncio.create_task(client.post(CHAT, json=killer))
                await engine.began.wait()
                await online.lose(door)
                await task

    async def is_refused() -> bool:
        answer = await online.post(killer)
        return answer.status_code == 400 and answer.json()["error"]["code"] == "request_kills_workers"

    async with online.door("w", ScriptedOnlineEngine()):
        await until(is_refused)
        assert (await online.post(asked(max_tokens=8))).status_code == 200


@pytest.mark.parametrize("engine", [ScriptedOnlineEngine(fails=True), ScriptedOnlineEngine(aborts=True)])
async def test_an_engine_that_fails_is_said_without_the_text(
    online: OnlineHarness, engine: ScriptedOnlineEngine, capfd: pytest.CaptureFixture[str]
) -> None:
    async with online.door("w", engine):
        answer = await online.post(asked())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
    said = capfd.readouterr()
    assert "private" not in answer.text + said.out + said.err


async def test_who_takes_no_requests_is_passed_over(online: OnlineHarness) -> None:
    nobody = await online.post(asked())
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "no_worker")
    engine = ScriptedOnlineEngine()
    async with online.door("w", engine):
        await asyncio.sleep(1.1)  # after which the API looks again
        online.reason = "it is drained"
        refused = await online.post(asked())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"]
        online.reason = None
        assert (await online.post(asked())).status_code == 200
    assert len(engine.asked) == 1


@asynccontextmanager
async def at_work(
    online: OnlineHarness, batches: ScriptedEngine, online_engine: ScriptedOnlineEngine
) -> AsyncGenerator[None, None]:
    """A worker with a door."""
    settings = online.settings.model_copy(update={"online_host": "127.0.0.1", "worker_name": "w"})
    harness, stop = online.harness, asyncio.Event()
    parts = (harness.database, harness.storage, harness.redis, batches, settings, harness.clock, 100)
    task = asyncio.create_task(Worker(*parts, online=online_engine).run(stop))
    await until(Heartbeat(harness.redis).alive)
    try:
        yield
    finally:
        stop.set()
        await task


@pytest.mark.slow
async def test_a_worker_takes_online_requests_until_it_is_drained_or_stops(online: OnlineHarness) -> None:
    async with at_work(online, ScriptedEngine(), ScriptedOnlineEngine()):
        assert (await online.post(asked())).status_code == 200
        async with online.harness.database.write() as session:
            session.add(DrainedWorker(name="w", since=0))
        await until(online.refuses)
        async with online.harness.database.write() as session:
            await session.execute(delete(DrainedWorker))
        await until(online.serves)
    assert (await online.post(asked())).status_code == 503


async def test_a_suspect_slice_never_runs_beside_online_requests(online: OnlineHarness) -> None:
    harness = online.harness
    batch_id = await harness.submit(jsonl(line(n) for n in range(4)))
    await harness.plan()
    leases = Leases(harness.database, "dead", "test-model", harness.settings.lease_s)
    for _ in range(3):  # deaths make it suspect
        assert await leases.claim(1)
        assert await harness.expire_leases() == 1
    await harness.redis.flushall()  # so that no worker hears of it yet
    batches, online_engine = ScriptedEngine(hold=asyncio.Event()), ScriptedOnlineEngine(stops_after=1)
    async with at_work(online, batches, online_engine):
        assert batches.hold is not None
        task = asyncio.create_task(_read(online, asked(stream=True)))
        async with asyncio.timeout(30):
            await online_engine.began.wait()
        await harness.reconciler.run_once()
        await until(online.refuses)
        await asyncio.sleep(0.2)
        assert not batches.runs, "the slice waits for the stream to end"
        task.cancel()

        async def runs() -> bool:
            return bool(batches.runs)

        await until(runs)
        assert (await online.post(asked())).status_code == 503
        batches.hold.set()
        await harness.until_ended(batch_id)
        await until(online.serves)


@pytest.mark.parametrize(
    ("body", "path", "status", "code"),
    [
        (b"{", CHAT, 400, "invalid_json"),
        (b"[1]", CHAT, 400, "invalid_json"),
        (b'{"model": "\xff"}', CHAT, 400, "invalid_json"),
        (b'{"a":' + b"[" * 300 + b"]" * 300 + b"}", CHAT, 400, "invalid_json"),
        ({"messages": []}, CHAT, 400, "missing_required_parameter"),
        ({"model": MODEL, "messages": []}, CHAT, 400, "missing_required_parameter"),
        ({"model": MODEL}, "/v1/completions", 400, "missing_required_parameter"),
        (asked(model=["x"]), CHAT, 400, "invalid_request"),
        (asked(model="a\0b"), CHAT, 404, "model_not_found"),
        (asked(model="unknown"), CHAT, 404, "model_not_found"),
        (asked(service_tier="best"), CHAT, 400, "invalid_request"),
        (asked(service_tier=["flex"]), CHAT, 400, "invalid_request"),
        (asked(n=1000), CHAT, 400, "invalid_request"),
        (asked(regex="(a+)+"), CHAT, 400, "invalid_request"),
        (b" " * (9 * 2**20), CHAT, 413, "body_too_large"),
    ],
)
async def test_a_bad_request_is_refused_before_it_reaches_a_worker(
    online: OnlineHarness, body: Any, path: str, status: int, code: str
) -> None:
    engine = ScriptedOnlineEngine()
    async with online.door("w", engine):
        answer = await online.post(body, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert not engine.asked


async def test_online_requests_need_a_key_where_batches_do(online: OnlineHarness, clock: Clock) -> None:
    engine = ScriptedOnlineEngine()
    with serve(online.settings.model_copy(update={"auth": "keys"}), clock) as url:
        async with online.door("w", engine), httpx.AsyncClient(base_url=url) as client:
            for headers in ({}, {"Authorization": "Bearer bw-unknown"}):
                assert (await client.post(CHAT, json=asked(), headers=headers)).status_code == 401
    assert not engine.asked


async def test_a_request_has_the_class_of_its_key_or_a_weaker_one(online: OnlineHarness, clock: Clock) -> None:
    """A stronger one is not given, as with OpenAI; the answer says which it was."""
    engine, keys = (
        ScriptedOnlineEngine(),
        {tier: new_key(DEFAULT_PROJECT, "ana", Role.USER, 0, None, tier) for tier in (None, *Tier)},
    )
    async with online.harness.database.write() as session:
        session.add_all([row for _, row in keys.values()])
        await session.execute(update(Project).values(tier=Tier.FLEX))
    with serve(online.settings.model_copy(update={"auth": "keys"}), clock) as url:
        async with online.door("w", engine), httpx.AsyncClient(base_url=url) as client:
            for own, (text, _) in keys.items():
                for given in (None, "auto", "priority", "default", "flex"):
                    body = asked() if given is None else asked(service_tier=given)
                    await client.post(CHAT, json=body, headers={"Authorization": f"Bearer {text}"})
                strongest = own or Tier.FLEX
                weaker = ["flex" if strongest is Tier.FLEX else "default", "flex"]
                assert engine.tiers == [strongest, strongest, strongest, *weaker]
                engine.tiers.clear()


async def test_a_worker_that_would_be_late_is_passed_over(online: OnlineHarness) -> None:
    busy, idle = ScriptedOnlineEngine(late=("default",)), ScriptedOnlineEngine()
    async with online.door("busy", busy):
        answer = await online.post(asked())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) > 0
        assert (await online.post(asked(service_tier="flex"))).status_code == 200
        async with online.door("idle", idle):
            await until(online.serves)
    assert busy.tiers == ["flex"]


async def test_a_revoked_key_ends_within_a_minute(
    online: OnlineHarness, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, row = new_key(DEFAULT_PROJECT, "ana", Role.USER, 0, None)
    async with online.harness.database.write() as session:
        session.add(row)
    with serve(online.settings.model_copy(update={"auth": "keys"}), clock) as url:
        async with online.door("w", ScriptedOnlineEngine()), httpx.AsyncClient(base_url=url) as client:
            headers = {"Authorization": f"Bearer {text}"}
            assert (await client.post(CHAT, json=asked(), headers=headers)).status_code == 200
            async with online.harness.database.write() as session:
                await session.execute(update(ApiKey).values(revoked_at=1))
            monkeypatch.setattr(remembered, "AGAIN_S", 0.0)

            async def is_refused() -> bool:
                return (await client.post(CHAT, json=asked(), headers=headers)).status_code == 401

            await until(is_refused)


async def test_texts_are_in_no_log(online: OnlineHarness, capfd: pytest.CaptureFixture[str]) -> None:
    async with online.door("w", ScriptedOnlineEngine(stops_after=1)) as door, online.client() as client:
        stream = await client.chat.completions.create(**asked(stream=True))
        await anext(stream)
        await online.lose(door)
        with pytest.raises(openai.APIError):
            await anext(stream)
    said = capfd.readouterr()
    assert "lost while it answered" in said.out
    assert "private" not in said.out + said.err
