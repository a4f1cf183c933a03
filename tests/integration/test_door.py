"""A worker's door, and who may use it: the service's own API, at an address that the worker itself named."""

import asyncio
import json

import httpx
import pytest

from service.api.routing import Routes
from service.queue.progress import Heartbeat
from service.queue.trust import deployment_token
from service.settings import Settings
from service.worker import door as doors
from tests.conftest import Clock
from tests.integration import online_harness
from tests.integration.harness import Harness
from tests.integration.online_harness import MODEL, OnlineHarness, ScriptedOnlineEngine, asked
from tests.integration.serving import CHAT, serve
from tests.waiting import LIMIT_S, until


async def test_an_address_that_no_worker_named_gets_nothing(online: OnlineHarness) -> None:
    """A writer into Redis would get the token and the texts."""
    engine = ScriptedOnlineEngine()
    async with online.door("w", engine) as door:
        state = (await Heartbeat(online.harness.redis).alive())[0]
        assert await Routes(Heartbeat(online.harness.redis), door.token).targets(MODEL, b"")
        for changed in (
            {"online_proof": None},
            {"online_proof": "é\ud800"},
            {"online": state["online"] + "/"},
            {"model": "another"},
            {"name": "another"},
        ):
            await Heartbeat(online.harness.redis).beat("w", {**state, **changed})
            routes = Routes(Heartbeat(online.harness.redis), door.token)  # a new one looks at once
            for model in (MODEL, "another"):
                assert await routes.targets(model, b"") == []
            assert len(routes.without_proof) == 1
        for broken in ({"online": 7}, {"model": None}, {"name": ["w"]}):
            await Heartbeat(online.harness.redis).beat("w", {**state, **broken})
            assert await Routes(Heartbeat(online.harness.redis), door.token).targets(MODEL, b"") == []
        door_model = asked(model="another")
        async with httpx.AsyncClient(base_url=state["online"]) as client:
            headers = {"Authorization": f"Bearer {door.token}", "X-Request-Id": "req_" + "0" * 32}
            assert (await client.post(CHAT, json=door_model, headers=headers)).status_code == 503
    assert not engine.asked


async def test_a_door_is_for_the_service_alone(online: OnlineHarness) -> None:
    engine = ScriptedOnlineEngine()
    async with online.door("w", engine, token="another"):
        refused = await online.post(asked())
        assert (refused.json()["error"]["code"], refused.headers["x-should-retry"]) == (
            "online_not_configured",
            "false",
        )
        state = (await Heartbeat(online.harness.redis).alive())[0]
        async with httpx.AsyncClient(base_url=state["online"]) as client:
            for given in (b"", b"Bearer wrong", "Bearer é".encode(), b"Bearer \xff"):
                headers = {b"Authorization": given}
                assert (await client.post(CHAT, json=asked(), headers=headers)).status_code == 401
    assert not engine.asked


@pytest.mark.parametrize("worker_stops", [False, True])
async def test_a_stream_that_the_api_does_not_read_is_aborted(
    online: OnlineHarness, monkeypatch: pytest.MonkeyPatch, worker_stops: bool
) -> None:
    """After a while, or at once when the worker ends its requests."""
    monkeypatch.setattr(doors, "STALLED_S", 3600.0 if worker_stops else 0.5)
    engine = ScriptedOnlineEngine()
    monkeypatch.setattr(online_harness, "event", lambda number: b"data: " + b"x" * 2**22 + b"\n\n")
    async with online.door("w", engine) as door:
        url = (await Heartbeat(online.harness.redis).alive())[0]["online"]
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        body = json.dumps(asked(stream=True)).encode()
        token, number = deployment_token(online.settings), "req_" + "0" * 32
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nX-Request-Id: {number}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        async with asyncio.timeout(30):
            await engine.began.wait()
            while not engine.streams:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # until its first event waits for the reader
            if worker_stops:
                door.end_all()
            while door.in_flight:
                await asyncio.sleep(0.01)
        assert engine.streams[0].closed.is_set(), "the request is aborted"
        assert not reader.at_eof(), "nobody has read to the end"
        writer.close()


async def test_a_service_whose_roles_share_no_key_says_so(harness: Harness, settings: Settings, clock: Clock) -> None:
    if settings.database.startswith("sqlite"):
        pytest.skip("with SQLite they share a file")
    settings = settings.model_copy(update={"secret_key": None})
    with serve(settings, clock) as url:
        answer = await OnlineHarness(harness, settings, url).post(asked())
    assert answer.json()["error"]["code"] == "online_not_configured"
    assert answer.headers["x-should-retry"] == "false"


async def test_half_a_head_is_not_waited_for(online: OnlineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "SILENT_S", 0.2)
    async with online.door("w", ScriptedOnlineEngine()):
        url = httpx.URL((await Heartbeat(online.harness.redis).alive())[0]["online"])
        for sent, said in (
            (b"POST /v1/chat/completions HTTP/1.1\r\nHos", b""),
            (b"no head\r\n\r\n", b"Server: batchweave\r\n"),
        ):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(sent)
            async with asyncio.timeout(LIMIT_S):
                assert said in await reader.read()
            writer.close()


async def test_half_a_body_is_not_waited_for(online: OnlineHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors, "STALLED_S", 0.2)
    async with online.door("w", ScriptedOnlineEngine()) as door:
        url = httpx.URL((await Heartbeat(online.harness.redis).alive())[0]["online"])
        reader, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {door.token}\r\nContent-Length: 10\r\n"
        writer.write(f"{head}X-Request-Id: req_{'0' * 32}\r\n\r\n{{".encode())
        async with asyncio.timeout(LIMIT_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 400")
        writer.close()


async def test_choices_are_counted_and_a_project_leaves_some_to_others(online: OnlineHarness) -> None:
    engine = ScriptedOnlineEngine(waits=True)
    async with online.door("w", engine) as door:
        url = (await Heartbeat(online.harness.redis).alive())[0]["online"]

        async def post(project: str, count: int) -> int:
            number = f"req_{len(engine.asked):032x}"
            headers = {"Authorization": f"Bearer {door.token}", "X-Request-Id": number, "X-Project": project}
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                return (await client.post(CHAT, json=asked(n=count), headers=headers)).status_code

        waiting = list[asyncio.Task[int]]()

        async def take(project: str, count: int) -> None:
            before = len(engine.asked)
            waiting.append(asyncio.create_task(post(project, count)))
            await until(lambda: len(engine.asked) > before)

        for _ in range(7):
            await take("a", 128)
        assert await post("a", 1) == 503
        await take("b", 128)  # others have room
        assert await post("c", 1) == 503, "the door is full"
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await until(lambda: not door.in_flight)
        waiting.clear()
        await take("a", 1000)  # one that has more than a project may hold, and nothing else
        waiting[0].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
