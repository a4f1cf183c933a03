"""One project's deadlines, endpoints and sockets cost no other project its turn."""

import asyncio
import socket
from collections.abc import AsyncGenerator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import openai
import pytest
from sqlalchemy import delete, select, update

from service import ids
from service.api import connections
from service.db.tables import DEFAULT_PROJECT, Batch, Slice, SliceBatch, WebhookDelivery, WebhookEndpoint, Window
from service.db.tenant_tables import Project, Role
from service.jobs.fair_turns import FairTurns
from service.jobs.webhooks import Webhooks
from service.objects.plan_artifact import PlanArtifact
from service.queue.leases import Leases
from service.queue.urgency import Turns
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.browsing import make_key
from tests.integration.harness import Harness, jsonl, line
from tests.integration.serving import serving

pytestmark = pytest.mark.dialects

OTHER = "proj_other"


async def add_project(harness: Harness, weight: float = 1.0) -> None:
    async with harness.database.write() as session:
        session.add(Project(id=OTHER, name="other", weight=weight, created_at=0))


async def submit(harness: Harness, project_id: str, window_s: int, count: int = 8) -> str:
    batch_id = await harness.submit(jsonl(line(n) for n in range(count)), window_s)
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(project_id=project_id))
    return batch_id


async def test_short_windows_do_not_go_first_for_ever(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """A project that says one minute for each of its batches is validated in turns with one that says a day."""
    monkeypatch.setattr("service.jobs.validator.REQUESTS_PER_S", 0.0)  # turns by lines alone, whatever the machine does
    await add_project(harness)
    for _ in range(6):
        await submit(harness, OTHER, 60)
    patient = [await submit(harness, DEFAULT_PROJECT, 86400) for _ in range(3)]
    validator = harness.validator
    for _ in range(6):
        assert await validator.run_once()
    assert [(await harness.batch(each)).status for each in patient] == ["in_progress"] * 3


@pytest.mark.usefixtures("windows_apart")
async def test_urgent_slices_of_one_project_leave_others_their_share(harness: Harness) -> None:
    await add_project(harness, weight=3.0)
    await submit(harness, DEFAULT_PROJECT, 86400, 80)
    await harness.plan()
    await submit(harness, OTHER, 600, 80)
    await harness.plan()
    owners = {each: owner for each, owner in await slice_owners(harness)}
    turns = Turns()
    first = [each.slice_id for each in await turns.most_urgent(harness.database, "test-model", harness.clock(), 8)]
    assert [owners[each] for each in first].count(OTHER) == 6  # by weight, three to one
    leases = Leases(harness.database, "w", "test-model", 30)
    for each in [each for each in first if owners[each] == OTHER][:6]:
        assert await leases.claim(each)
    after = await turns.most_urgent(harness.database, "test-model", harness.clock(), 2)
    assert [owners[each.slice_id] for each in after] == [DEFAULT_PROJECT] * 2  # the other has its share in the engines


async def slice_owners(harness: Harness) -> Any:
    from service.db.tables import SliceBatch

    query = select(SliceBatch.slice_id, Batch.project_id).join(Batch, Batch.id == SliceBatch.batch_id)
    async with harness.database.read() as session:
        return (await session.execute(query)).all()


def test_turns_are_by_weight_and_nobody_saves_them_up() -> None:
    turns = FairTurns(most_at_once=2)
    served: list[str] = []
    for _ in range(40):
        first = turns.order({"a": 1.0, "b": 3.0})[0]
        turns.charge(first, 10, {"a": 1.0, "b": 3.0}[first])
        served.append(first)
    assert served.count("b") == 30
    for _ in range(4):  # one that comes late is beside the others, not before them
        first = turns.order({"a": 1.0, "c": 1.0})[0]
        turns.charge(first, 10, 1.0)
        served.append(first)
    assert served[-4:].count("c") == 2
    with turns.work("a"), turns.work("a"):
        assert turns.order({"a": 1.0, "b": 1.0}) == ["b"]


async def test_a_project_without_a_quota_has_the_default(harness: Harness, settings: Settings, clock: Clock) -> None:
    limited = settings.model_copy(update={"max_batches": 2})
    with serving(limited, clock) as (port, _):
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", max_retries=0)
        file = await asyncio.to_thread(
            lambda: client.files.create(file=("in.jsonl", jsonl([line(1)])), purpose="batch")
        )

        def create() -> Any:
            wanted: Any = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            return client.batches.create(**wanted)

        for _ in range(2):
            await asyncio.to_thread(create)
        with pytest.raises(openai.RateLimitError) as caught:
            await asyncio.to_thread(create)
    assert caught.value.code == "batches_quota"


async def test_dead_endpoints_of_one_project_hold_up_no_other(
    harness: Harness, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty endpoints that never answer took every loop for a minute; now two at a time are asked."""
    under_way: list[str] = []
    most = 0
    answered = asyncio.Event()

    async def hanging(url: str, *_: Any) -> int:
        nonlocal most
        under_way.append(url)
        most = max(most, sum("dead" in each for each in under_way))
        if "dead" in url:
            await answered.wait()
        return 200

    monkeypatch.setattr("service.jobs.webhooks.deliver", hanging)
    await add_project(harness)
    now = harness.clock()
    async with harness.database.write() as session:
        for number in range(20):
            add_endpoint(session, f"dead-{number}", OTHER, now)
        add_endpoint(session, "good", DEFAULT_PROJECT, now)
    job = Webhooks(harness.database, settings, harness.clock)
    loops = [asyncio.create_task(job.run_once()) for _ in range(4)]
    async with asyncio.timeout(30):
        while "https://good/" not in under_way:
            await asyncio.sleep(0.01)
            if sum(not each.done() for each in loops) < 4:
                loops.append(asyncio.create_task(job.run_once()))
    assert most <= 2
    answered.set()
    await asyncio.gather(*loops)


def add_endpoint(session: Any, name: str, project_id: str, now: float) -> None:
    endpoint = WebhookEndpoint(id=name, project_id=project_id, name=name, url=f"https://{name}/", secret="whsec_AAAA")
    endpoint.event_types, endpoint.created_at, endpoint.updated_at = ["batch.completed"], 0, 0
    session.add(endpoint)
    for _ in range(3):
        delivery = WebhookDelivery(id=ids.event_id(), endpoint_id=name, type="batch.completed", batch_id="b")
        delivery.next_at, delivery.created_at = now, int(now)
        session.add(delivery)


async def test_an_endpoint_that_fails_rests_and_says_so(
    harness: Harness, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def failing(*_: Any) -> int:
        return 500

    monkeypatch.setattr("service.jobs.webhooks.deliver", failing)
    async with harness.database.write() as session:
        add_endpoint(session, "bad", DEFAULT_PROJECT, harness.clock())
    job, asked = Webhooks(harness.database, settings, harness.clock), 0
    for _ in range(40):
        asked += await job.run_once()
        harness.clock.now += 30
    assert asked < 12  # of 120 and more, had each delivery a pace of its own
    async with harness.database.read() as session:
        found = (await session.scalars(select(WebhookEndpoint))).one()
    assert (found.failures, found.last_result) == (asked, "status 500")
    assert found.rests_until is not None


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(20)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


HALF_A_HEAD = b"POST /v1/files HTTP/1.1\r\nHost: local"
HALF_A_BODY = (
    b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    b"Content-Length: 900\r\n\r\n--x"
)


@pytest.mark.parametrize("sent", [b"", HALF_A_HEAD, HALF_A_BODY], ids=["nothing", "half a head", "half a body"])
async def test_a_socket_that_stalls_is_closed(
    settings: Settings, clock: Clock, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.5)
    monkeypatch.setattr(connections, "BODY_S", 0.5)
    with serving(settings, clock) as (port, _), socket.create_connection(("127.0.0.1", port)) as stalled:
        stalled.sendall(sent)
        assert await asyncio.to_thread(is_closed, stalled)


async def test_a_client_that_thinks_for_as_long_as_it_keeps_a_connection_finds_it_open(
    settings: Settings, clock: Clock
) -> None:
    """httpx and openai keep an idle connection for five seconds: a server that closes it then loses a request."""
    with serving(settings, clock) as (port, _), closing(HTTPConnection("127.0.0.1", port, timeout=20)) as kept:
        kept.connect()
        kept.auto_open = 0  # never another connection
        for pause in (0, 5.5):
            await asyncio.sleep(pause)
            kept.request("GET", "/healthz")
            with kept.getresponse() as answer:
                assert (answer.status, answer.read()) == (200, b'{"status":"ok"}')


ASKS = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


def asked(port: int, headers: bytes = b"", source: str = "127.0.0.1") -> tuple[socket.socket, bytes]:
    """A connection on which somebody has asked once, and the beginning of what came back."""
    connection = socket.create_connection(("127.0.0.1", port), source_address=(source, 0))
    connection.settimeout(20)
    connection.sendall(ASKS + headers + b"\r\n")
    try:
        return connection, connection.recv(4096)
    except ConnectionResetError:
        return connection, b""


@pytest.fixture
async def crowded(
    settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[tuple[int, list[socket.socket]], None]:
    """The port of an API whose address 127.0.0.1 has its most connections of strangers, and these."""
    monkeypatch.setattr(connections, "is_loopback", lambda address: address == "127.0.0.2")
    with serving(settings.model_copy(update={"connections_per_address": 8, "auth": "keys"}), clock) as (port, _):
        held = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
        yield port, held
        for each in held:
            each.close()


async def test_a_stranger_above_the_share_of_its_address_is_told_to_come_again(
    crowded: tuple[int, list[socket.socket]],
) -> None:
    port, held = crowded
    over, said = await asyncio.to_thread(asked, port)
    held.append(over)
    assert said.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in said
    assert await asyncio.to_thread(is_closed, over)
    other, said = await asyncio.to_thread(asked, port, b"", "127.0.0.2")  # of this machine
    held.append(other)
    assert said.startswith(b"HTTP/1.1 401")
    held += [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * 8)]
    with socket.create_connection(("127.0.0.1", port)) as far_over:
        assert await asyncio.to_thread(is_closed, far_over)


async def test_connections_of_a_known_key_are_not_counted(
    harness: Harness, crowded: tuple[int, list[socket.socket]]
) -> None:
    port, held = crowded
    text, _ = await make_key(harness.database, Role.USER)
    for _ in range(5 * 8):  # more than strangers may have in any case
        kept, said = await asyncio.to_thread(asked, port, f"Authorization: Bearer {text}\r\n".encode())
        held.append(kept)
        assert said.startswith(b"HTTP/1.1 200")
    wrong, said = await asyncio.to_thread(asked, port, b"Authorization: Bearer bw-no\r\n")
    held.append(wrong)
    assert said.startswith(b"HTTP/1.1 401")


async def test_projects_plan_with_their_own_prefixes_unless_they_share_a_cache(harness: Harness) -> None:
    """As the engine's cache does: what a plan expects of another project's prefix would not come."""
    await add_project(harness)

    async def sharing(*projects: str) -> tuple[float, str]:
        for project in projects:
            await submit(harness, project, 86400, 24)
        await harness.plan()
        [folder] = await harness.storage.folders("plans")
        artifact = PlanArtifact(harness.storage, folder)
        header, texts = await artifact.header(), await artifact.texts()
        async with harness.database.write() as session:
            for table in (SliceBatch, Slice, Window, Batch):
                await session.execute(delete(table))
        await artifact.delete()
        return header.sharing, str(texts)

    alone, _ = await sharing(DEFAULT_PROJECT)
    apart, texts = await sharing(DEFAULT_PROJECT, OTHER)
    harness.settings = harness.settings.model_copy(update={"shared_cache": True})
    together, _ = await sharing(DEFAULT_PROJECT, OTHER)
    assert apart == pytest.approx(alone, rel=0.01)
    assert together > 1.2 * alone
    assert "topic" in texts  # those of the prompts
