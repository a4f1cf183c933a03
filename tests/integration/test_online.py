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
from service.db.tables import DEFAULT_PROJECT, DrainedWorker, Model
from service.db.tenant_tables import ApiKey, Project, Role, Tier
from service.queue.leases import Leases
from service.queue.progress import Heartbeat
from service.tenants.keys import new_key
from service.worker.loop import Worker
from tests.conftest import Clock
from tests.integration.house import ScriptedEngine, jsonl, line
from tests.integration.serving import CHAT, serve
from tests.integration.shop import MODEL, PIECES, Shop, Teller, asked


async def test_a_stream_and_a_whole_answer_come_through(shop: Shop) -> None:
    engine = Teller()
    async with shop.door("w", engine):
        whole = await shop.post(asked())
        assert whole.status_code == 200
        assert whole.headers["content-type"] == "application/json"
        assert whole.json()["id"] == whole.headers["x-request-id"].replace("req_", "chatcmpl-")
        async with shop.client() as client:
            stream = await client.chat.completions.create(**asked(stream=True))
            got = [chunk.choices[0].delta.content async for chunk in stream]
    assert got == [f"{number} " for number in range(PIECES)]
    assert engine.streams[0].closed.is_set()


async def test_requests_that_come_at_once_find_the_worker(shop: Shop) -> None:
    """Those that came during the API's first look at the workers found none."""
    async with shop.door("w", Teller()):
        answers = await asyncio.gather(*(shop.post(asked()) for _ in range(8)))
    assert [each.status_code for each in answers] == [200] * 8


async def test_a_client_that_hangs_up_ends_its_request(shop: Shop) -> None:
    for engine in (Teller(waits=True), Teller(stops_after=2)):
        async with shop.door("w", engine) as door:
            task = asyncio.create_task(_read(shop, asked(stream=True)))
            async with asyncio.timeout(30):
                await engine.began.wait()
                while engine.stops_after is not None and not engine.streams:
                    await asyncio.sleep(0.01)
                task.cancel()
                await (engine.cancelled if engine.waits else engine.streams[0].closed).wait()
                while door.in_flight:
                    await asyncio.sleep(0.01)
    async with httpx.AsyncClient(base_url=shop.url) as client:
        figures = (await client.get("/metrics")).text
    left = f'batchweave_online_requests_total{{model="{MODEL}",outcome="client_left",tier="default"}}'
    assert left in figures
    assert 'route="/v1/chat/completions",status="499"' in figures


async def _read(shop: Shop, body: dict[str, Any]) -> None:
    async with shop.client() as client:
        async for _ in await client.chat.completions.create(**body):
            pass


async def test_a_worker_that_is_lost_before_its_answer_is_replaced(shop: Shop) -> None:
    for stream in (False, True):
        engines = {name: Teller(waits=True) for name in ("a", "b")}
        async with shop.door("a", engines["a"]) as first, shop.door("b", engines["b"]) as second:
            task = asyncio.create_task(shop.post(asked(stream=stream)))
            async with asyncio.timeout(30):
                while not any(engine.began.is_set() for engine in engines.values()):
                    await asyncio.sleep(0.01)
                lost, door = ("a", first) if engines["a"].began.is_set() else ("b", second)
                for name in engines:
                    engines[name].waits = name == lost
                await shop.lose(door)
                answer = await task
        assert answer.status_code == 200
        assert sum(len(engine.asked) for engine in engines.values()) == 2


async def test_a_stream_whose_worker_is_lost_ends_with_an_error(shop: Shop) -> None:
    engine = Teller(stops_after=2)
    async with shop.door("w", engine) as door, shop.client() as client:
        stream = await client.chat.completions.create(**asked(stream=True))
        got = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
        await shop.lose(door)
        with pytest.raises(openai.APIError, match="lost while it answered"):
            await anext(stream)
    assert got == ["0 ", "1 "]


async def test_a_lost_response_ends_with_an_error_of_its_own_form(shop: Shop) -> None:
    """Its events have types, and clients look at these."""
    body = {"model": MODEL, "input": "a private matter", "stream": True}
    async with (
        shop.door("w", Teller(stops_after=2)) as door,
        httpx.AsyncClient(base_url=shop.url) as client,
        client.stream("POST", "/v1/responses", json=body) as answer,
    ):
        lines = aiter(answer.aiter_lines())
        await anext(lines)
        await shop.lose(door)
        *_, kind, data = [line async for line in lines if line]
    error = json.loads(data.removeprefix("data: "))
    assert (kind, error["type"], error["code"]) == ("event: error", "error", "worker_lost")
    assert error["error"]["code"] == "worker_lost"


async def test_a_request_that_two_workers_did_not_survive_is_not_tried_again(shop: Shop) -> None:
    engines = [Teller(waits=True) for _ in range(3)]
    async with AsyncExitStack() as stack:
        doors = [await stack.enter_async_context(shop.door(f"w{n}", each)) for n, each in enumerate(engines)]
        task = asyncio.create_task(shop.post(asked()))
        left = dict(zip(doors, engines, strict=True))
        async with asyncio.timeout(30):
            while not task.done():
                for door, engine in list(left.items()):
                    if engine.began.is_set():
                        del left[door]
                        await shop.lose(door)
                await asyncio.sleep(0.01)
    assert len(left) == 1, "two ran it"
    answer = task.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_lost")
    assert answer.headers["x-should-retry"] == "false"


async def test_a_worker_that_stops_passes_its_requests_on(shop: Shop) -> None:
    """However many stop, the request is not taken for what killed them; a stream that has begun ends with an error."""
    async with AsyncExitStack() as stack:
        left: dict[Any, Teller] = {}
        for number in range(4):
            engine = Teller(waits=True)
            left[await stack.enter_async_context(shop.door(f"w{number}", engine))] = engine
        task = asyncio.create_task(shop.post(asked()))
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
        await Heartbeat(shop.house.redis).leave(f"w{number}")
    async with shop.door("w", Teller(stops_after=1)) as door, shop.client() as client:
        stream = await client.chat.completions.create(**asked(stream=True))
        await anext(stream)
        await door.close(0)
        with pytest.raises(openai.APIError, match="The worker is stopping"):
            await anext(stream)


@pytest.mark.parametrize("streams", [False, True])
async def test_a_request_that_kills_workers_is_refused(shop: Shop, streams: bool) -> None:
    """Other requests are still answered."""
    killer = asked(max_tokens=7, stream=streams)
    for number in range(2):
        engine = Teller(waits=not streams, stops_after=1)
        async with shop.door(f"w{number}", engine) as door, httpx.AsyncClient(base_url=shop.url, timeout=60) as client:
            if streams:
                async with client.stream("POST", CHAT, json=killer) as answer:
                    lines = aiter(answer.aiter_lines())
                    await anext(lines)
                    await shop.lose(door)
                    assert "worker_lost" in [line async for line in lines if line][-1]
            else:
                task = asyncio.create_task(client.post(CHAT, json=killer))
                await engine.began.wait()
                await shop.lose(door)
                await task

    async def is_refused() -> bool:
        answer = await shop.post(killer)
        return answer.status_code == 400 and answer.json()["error"]["code"] == "request_kills_workers"

    async with shop.door("w", Teller()):
        await shop.house.until(is_refused)
        assert (await shop.post(asked(max_tokens=8))).status_code == 200


@pytest.mark.parametrize("engine", [Teller(fails=True), Teller(aborts=True)])
async def test_an_engine_that_fails_is_said_without_the_text(
    shop: Shop, engine: Teller, capfd: pytest.CaptureFixture[str]
) -> None:
    async with shop.door("w", engine):
        answer = await shop.post(asked())
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
    said = capfd.readouterr()
    assert "private" not in answer.text + said.out + said.err


async def test_who_takes_no_requests_is_passed_over(shop: Shop) -> None:
    nobody = await shop.post(asked())
    assert (nobody.status_code, nobody.json()["error"]["code"]) == (503, "no_worker")
    engine = Teller()
    async with shop.door("w", engine):
        await asyncio.sleep(1.1)  # after which the API looks again
        shop.reason = "it is drained"
        refused = await shop.post(asked())
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"]
        shop.reason = None
        assert (await shop.post(asked())).status_code == 200
    assert len(engine.asked) == 1


@asynccontextmanager
async def at_work(shop: Shop, batches: ScriptedEngine, online: Teller) -> AsyncGenerator[None, None]:
    """A worker with a door."""
    settings = shop.settings.model_copy(update={"online_host": "127.0.0.1", "worker_name": "w"})
    house, stop = shop.house, asyncio.Event()
    parts = (house.database, house.storage, house.redis, batches, settings, house.clock, 100)
    task = asyncio.create_task(Worker(*parts, online=online).run(stop))
    await house.until(Heartbeat(house.redis).alive)
    try:
        yield
    finally:
        stop.set()
        await task


async def test_a_worker_takes_online_requests_until_it_is_drained_or_stops(shop: Shop) -> None:
    async with at_work(shop, ScriptedEngine(), Teller()):
        assert (await shop.post(asked())).status_code == 200
        async with shop.house.database.write() as session:
            session.add(DrainedWorker(name="w", since=0))
        await shop.house.until(shop.refuses)
        async with shop.house.database.write() as session:
            await session.execute(delete(DrainedWorker))
        await shop.house.until(shop.serves)
    assert (await shop.post(asked())).status_code == 503


async def test_a_suspect_slice_never_runs_beside_online_requests(shop: Shop) -> None:
    house = shop.house
    batch_id = await house.submit(jsonl(line(n) for n in range(4)))
    await house.plan()
    leases = Leases(house.database, "dead", "test-model", house.settings.lease_s)
    for _ in range(3):  # deaths make it suspect
        assert await leases.claim(1)
        assert await house.expire_leases() == 1
    await house.redis.flushall()  # so that no worker hears of it yet
    batches, online = ScriptedEngine(hold=asyncio.Event()), Teller(stops_after=1)
    async with at_work(shop, batches, online):
        assert batches.hold is not None
        task = asyncio.create_task(_read(shop, asked(stream=True)))
        async with asyncio.timeout(30):
            await online.began.wait()
        await house.reconciler.run_once()
        await house.until(shop.refuses)
        await asyncio.sleep(0.2)
        assert not batches.runs, "the slice waits for the stream to end"
        task.cancel()

        async def runs() -> bool:
            return bool(batches.runs)

        await house.until(runs)
        assert (await shop.post(asked())).status_code == 503
        batches.hold.set()
        await house.until_ended(batch_id)
        await house.until(shop.serves)


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
    shop: Shop, body: Any, path: str, status: int, code: str
) -> None:
    engine = Teller()
    async with shop.door("w", engine):
        answer = await shop.post(body, path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert not engine.asked


async def test_a_prompt_that_no_context_holds_never_reaches_the_tokenizer(shop: Shop) -> None:
    async with shop.house.database.write() as session:
        await session.execute(update(Model).values(context_length=1000))
    engine = Teller()
    async with shop.door("w", engine):
        long = [{"role": "user", "content": "x" * 64_100}]
        answer = await shop.post(asked(messages=long))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        url = {"url": "data:image/png;base64," + "A" * 64_100}
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": url}]}]
        assert (await shop.post(asked(messages=image))).status_code == 200
    assert len(engine.asked) == 1


async def test_online_requests_need_a_key_where_batches_do(shop: Shop, clock: Clock) -> None:
    engine = Teller()
    with serve(shop.settings.model_copy(update={"auth": "keys"}), clock) as url:
        async with shop.door("w", engine), httpx.AsyncClient(base_url=url) as client:
            for headers in ({}, {"Authorization": "Bearer bw-unknown"}):
                assert (await client.post(CHAT, json=asked(), headers=headers)).status_code == 401
    assert not engine.asked


async def test_a_request_has_the_class_of_its_key_or_a_weaker_one(shop: Shop, clock: Clock) -> None:
    """A stronger one is not given, as with OpenAI; the answer says which it was."""
    engine, keys = Teller(), {tier: new_key(DEFAULT_PROJECT, "ana", Role.USER, 0, None, tier) for tier in (None, *Tier)}
    async with shop.house.database.write() as session:
        session.add_all([row for _, row in keys.values()])
        await session.execute(update(Project).values(tier=Tier.FLEX))
    with serve(shop.settings.model_copy(update={"auth": "keys"}), clock) as url:
        async with shop.door("w", engine), httpx.AsyncClient(base_url=url) as client:
            for own, (text, _) in keys.items():
                for given in (None, "auto", "priority", "default", "flex"):
                    body = asked() if given is None else asked(service_tier=given)
                    await client.post(CHAT, json=body, headers={"Authorization": f"Bearer {text}"})
                strongest = own or Tier.FLEX
                weaker = ["flex" if strongest is Tier.FLEX else "default", "flex"]
                assert engine.tiers == [strongest, strongest, strongest, *weaker]
                engine.tiers.clear()


async def test_a_worker_that_would_be_late_is_passed_over(shop: Shop) -> None:
    busy, idle = Teller(late=("default",)), Teller()
    async with shop.door("busy", busy):
        answer = await shop.post(asked())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
        assert int(answer.headers["retry-after"]) > 0
        assert (await shop.post(asked(service_tier="flex"))).status_code == 200
        async with shop.door("idle", idle):
            await shop.house.until(shop.serves)
    assert busy.tiers == ["flex"]


async def test_a_revoked_key_ends_within_a_minute(shop: Shop, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    text, row = new_key(DEFAULT_PROJECT, "ana", Role.USER, 0, None)
    async with shop.house.database.write() as session:
        session.add(row)
    with serve(shop.settings.model_copy(update={"auth": "keys"}), clock) as url:
        async with shop.door("w", Teller()), httpx.AsyncClient(base_url=url) as client:
            headers = {"Authorization": f"Bearer {text}"}
            assert (await client.post(CHAT, json=asked(), headers=headers)).status_code == 200
            async with shop.house.database.write() as session:
                await session.execute(update(ApiKey).values(revoked_at=1))
            monkeypatch.setattr(remembered, "AGAIN_S", 0.0)

            async def is_refused() -> bool:
                return (await client.post(CHAT, json=asked(), headers=headers)).status_code == 401

            await shop.house.until(is_refused)


async def test_texts_are_in_no_log(shop: Shop, capfd: pytest.CaptureFixture[str]) -> None:
    async with shop.door("w", Teller(stops_after=1)) as door, shop.client() as client:
        stream = await client.chat.completions.create(**asked(stream=True))
        await anext(stream)
        await shop.lose(door)
        with pytest.raises(openai.APIError):
            await anext(stream)
    said = capfd.readouterr()
    assert "lost while it answered" in said.out
    assert "private" not in said.out + said.err
