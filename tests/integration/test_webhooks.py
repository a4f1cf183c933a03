"""Webhooks: signed as the official client checks it, delivered until they arrive, and never into private networks."""

import asyncio
import threading
from collections.abc import Generator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select

from service.db.moves import move_batch
from service.db.tables import BatchStatus, WebhookDelivery, WebhookEndpoint
from service.jobs.webhooks import GIVE_UP_S, Webhooks
from service.settings import Settings
from service.webhooks.delivery import Reach, Unreachable, deliver
from service.webhooks.signature import signed_headers
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import serve


@dataclass
class Receiver:
    """An HTTP server that notes what it gets and answers with the next of `statuses`, then 200."""

    statuses: list[int] = field(default_factory=list[int])
    got: list[tuple[dict[str, str], bytes]] = field(default_factory=list[tuple[dict[str, str], bytes]])
    url: str = ""


@pytest.fixture
def receiver() -> Generator[Receiver, None, None]:
    found = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            found.got.append(({key.lower(): value for key, value in self.headers.items()}, body))
            self.send_response(found.statuses.pop(0) if found.statuses else 200)
            self.send_header("location", "http://127.0.0.1:1/")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    found.url = f"http://localhost:{server.server_port}/hook?x=1"
    yield found
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def open_settings(settings: Settings) -> Settings:
    return settings.model_copy(update={"webhook_private": True})


@pytest.fixture
def api(open_settings: Settings, clock: Clock) -> Generator[httpx.Client, None, None]:
    with serve(open_settings, clock) as url, httpx.Client(base_url=f"{url}/v1") as client:
        yield client


def create(api: httpx.Client, url: str, *types: str) -> dict[str, Any]:
    wanted = {"name": "mine", "url": url, "event_types": list(types) or ["batch.completed", "batch.failed"]}
    answer = api.post("/webhook_endpoints", json=wanted)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def end(harness: Harness) -> str:
    batch_id = await harness.submit(jsonl([line(0)]))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await harness.until_ended(batch_id)
    return batch_id


async def test_the_client_unwraps_what_comes(
    harness: Harness, api: httpx.Client, receiver: Receiver, open_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = create(api, receiver.url)
    batch_id = await end(harness)
    job = Webhooks(harness.database, open_settings, harness.clock)
    assert await job.run_once()
    assert not await job.run_once()
    [(headers, body)] = receiver.got
    monkeypatch.setattr("time.time", harness.clock)
    client = openai.OpenAI(api_key="k", webhook_secret=made["signing_secret"])
    event = client.webhooks.unwrap(body, headers)
    said = event.model_dump()
    assert (said["type"], said["data"], said["object"]) == ("batch.completed", {"id": batch_id}, "event")
    assert event.id == headers["webhook-id"]
    assert headers["host"].startswith("localhost:")
    with pytest.raises(openai.InvalidWebhookSignatureError):
        client.webhooks.unwrap(body.replace(b"completed", b"cancelled"), headers)


async def test_only_wanted_events_of_the_own_project_come(
    harness: Harness, api: httpx.Client, receiver: Receiver, open_settings: Settings
) -> None:
    create(api, receiver.url, "batch.cancelled")
    async with harness.database.write() as session:
        session.add(
            WebhookEndpoint(
                id="theirs",
                project_id="proj_other",
                name="x",
                url=receiver.url,
                event_types=["batch.cancelled"],
                secret="",
                created_at=0,
                updated_at=0,
            )
        )
    await end(harness)
    cancelled = await harness.submit(jsonl([line(0)]))
    async with harness.database.write() as session:
        assert await move_batch(session, cancelled, BatchStatus.CANCELLING, now=1)
        assert await move_batch(session, cancelled, BatchStatus.CANCELLED, now=1)
        assert not await move_batch(session, cancelled, BatchStatus.CANCELLED, now=1)
    async with harness.database.read() as session:
        rows = (await session.scalars(select(WebhookDelivery))).all()
    assert [(row.type, row.batch_id) for row in rows] == [("batch.cancelled", cancelled)]


async def test_a_failure_is_tried_again_with_growing_pauses_and_a_fresh_signature(
    harness: Harness, api: httpx.Client, receiver: Receiver, open_settings: Settings
) -> None:
    create(api, receiver.url)
    receiver.statuses = [500, 302, 404]
    await end(harness)
    job = Webhooks(harness.database, open_settings, harness.clock)
    for pause_s in (5, 10, 20):
        assert await job.run_once()
        harness.clock.now += pause_s - 1
        assert not await job.run_once()
        harness.clock.now += 1
    assert await job.run_once()
    harness.clock.now += 10_000
    assert not await job.run_once()
    assert len(receiver.got) == 4
    assert len({headers["webhook-id"] for headers, _ in receiver.got}) == 1
    assert len({headers["webhook-signature"] for headers, _ in receiver.got}) == 4


async def test_a_dead_receiver_is_tried_one_delivery_at_a_time(
    harness: Harness, api: httpx.Client, receiver: Receiver, open_settings: Settings
) -> None:
    create(api, receiver.url)
    receiver.statuses = [500]
    for _ in range(3):
        await end(harness)
    job = Webhooks(harness.database, open_settings, harness.clock)
    assert await job.run_once()
    assert not await job.run_once()
    harness.clock.now += 5
    assert [await job.run_once() for _ in range(4)] == [True, True, True, False]
    assert len(receiver.got) == 4


@pytest.mark.slow
async def test_after_three_days_it_is_given_up(
    harness: Harness, api: httpx.Client, receiver: Receiver, open_settings: Settings
) -> None:
    create(api, receiver.url)
    receiver.statuses = [500] * 500
    await end(harness)
    job, started = Webhooks(harness.database, open_settings, harness.clock), harness.clock.now
    while harness.clock.now < started + GIVE_UP_S + 7200:
        await job.run_once()
        harness.clock.now += 600
    assert not await job.run_once()
    assert 70 < len(receiver.got) < 100


def test_a_rotated_secret_signs_beside_the_old_one_for_a_day(
    clock: Clock, api: httpx.Client, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", clock)
    made = create(api, receiver.url)
    path = f"/webhook_endpoints/{made['id']}"
    keep = {"keep_old_secret_active_for_24_hours": True}
    api.post(f"{path}/rotate_secret", json=keep)  # its answer is lost, and the client tries again
    fresh = api.post(f"{path}/rotate_secret", json=keep, headers={"x-stainless-retry-count": "1"}).json()
    assert fresh["signing_secret"] != made["signing_secret"]
    client = openai.OpenAI(api_key="k")
    for at, old_is_fine in ((0, True), (24 * 3600 + 1, False)):
        clock.now += at
        tested = api.post(f"{path}/test", json={"event_type": "batch.completed"}).json()
        assert tested == {
            "object": "webhook_endpoint.test",
            "event_type": "batch.completed",
            "status_code": 200,
            "success": True,
            "webhook_endpoint_id": made["id"],
        }
        headers, body = receiver.got[-1]
        client.webhooks.unwrap(body, headers, secret=fresh["signing_secret"])
        if old_is_fine:
            client.webhooks.unwrap(body, headers, secret=made["signing_secret"])
        else:
            with pytest.raises(openai.InvalidWebhookSignatureError):
                client.webhooks.unwrap(body, headers, secret=made["signing_secret"])
    assert api.post(f"{path}/rotate_secret").json()["signing_secret"] != fresh["signing_secret"]


@pytest.mark.parametrize("status", [302, 401, 500])
def test_a_test_says_whether_the_receiver_took_the_event(api: httpx.Client, receiver: Receiver, status: int) -> None:
    receiver.statuses = [status]
    path = f"/webhook_endpoints/{create(api, receiver.url)['id']}/test"
    tested = [api.post(path, json={"event_type": "batch.completed"}).json() for _ in range(2)]
    assert [(each["status_code"], each["success"]) for each in tested] == [(status, False), (200, True)]


def test_endpoints_are_listed_changed_and_deleted(api: httpx.Client, receiver: Receiver) -> None:
    made = [create(api, receiver.url) for _ in range(3)]
    page = api.get("/webhook_endpoints", params={"limit": 2}).json()
    assert [each["id"] for each in page["data"]] == [made[2]["id"], made[1]["id"]]
    assert "signing_secret" not in page["data"][0]
    rest = api.get("/webhook_endpoints", params={"after": page["last_id"]}).json()
    assert ([each["id"] for each in rest["data"]], rest["has_more"]) == ([made[0]["id"]], False)
    path = f"/webhook_endpoints/{made[0]['id']}"
    assert api.post(path, json={"event_types": ["batch.expired"]}).json()["event_types"] == ["batch.expired"]
    assert api.get(path).json()["url"] == receiver.url
    assert api.delete(path).json() == {"id": made[0]["id"], "object": "webhook_endpoint.deleted", "deleted": True}
    assert api.get(path).status_code == 404
    assert "batch.completed" in api.get("/webhook_event_types").json()["data"]


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com/",
        "ftp://example.com/",
        "https:///x",
        "https://[",
        "https://[x]/",
        "https://user:secret@example.com/",
        "https://example.com:99999/",
        "https://10.0.0.1/",
        "https://localhost/",
    ],
)
def test_urls_that_are_refused_at_once(settings: Settings, clock: Clock, url: str) -> None:
    with serve(settings, clock) as base:
        found = httpx.post(
            f"{base}/v1/webhook_endpoints", json={"name": "x", "url": url, "event_types": ["batch.completed"]}
        )
    assert (found.status_code, found.json()["error"]["code"]) == (400, "invalid_url")


async def test_interim_responses_without_an_end_are_given_up() -> None:
    sent = 0

    async def flood(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        with suppress(ConnectionError):
            while True:
                writer.write(b"HTTP/1.1 102 Processing\r\n\r\n" * 100)
                await writer.drain()
                sent += 2700
        writer.close()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(Unreachable, match="RemoteProtocolError"):
        await deliver(f"http://127.0.0.1:{port}/", b"{}", {}, Reach(private=True))
    server.close()
    assert sent < 100 << 20  # it is what fits into the kernel's buffers, and no stream of many seconds


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "10.1.2.3",
        "192.168.0.1",
        "169.254.169.254",
        "192.0.0.192",
        "[::1]",
        "[fd00::1]",
        "[::ffff:10.0.0.1]",
        "0.0.0.0",
        "224.0.0.1",
        "[64:ff9b::a9fe:a9fe]",
        "[fec0::2]",
        "[::7f00:1]",
        "[2002:7f00:1::]",
        "2130706433",
    ],
)
async def test_private_addresses_are_not_reached(host: str) -> None:
    with pytest.raises(Unreachable, match="no public"):
        Reach().check(f"https://{host}/hook")
    with pytest.raises(Unreachable, match="no public"):
        await deliver(f"https://{host}/", b"{}", signed_headers("evt_1", 0, b"{}", []), Reach())
