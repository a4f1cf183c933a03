"""What one tenant's odd files, uploads and sockets may cost the process that serves all."""

import asyncio
import gzip
import hashlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from service.api import connections
from service.api.plain_text import MOST_MEMBERS
from service.dashboard import lines
from service.db.tables import DEFAULT_PROJECT, Batch, BatchStatus
from service.db.tenant_tables import Project
from service.jobs.validator import GIVEN_UP, MOST_DEATHS, MOST_ERROR_BYTES
from service.objects.storage import ANSWERS_RESERVE, Room, Storage
from service.requests.lines import LineChecker, nesting
from service.requests.parameters import Unknown
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line, set_status
from tests.integration.serving import serve, serving
from tests.integration.test_fairness import OTHER, add_project, is_closed, submit
from tests.waiting import until

FORM = {"purpose": "batch"}
EMPTY_MEMBER = gzip.compress(b"")


def upload(url: str, data: bytes) -> httpx.Response:
    return httpx.post(f"{url}/v1/files", data=FORM, files={"file": ("in.jsonl", data)}, timeout=60)


async def change(harness: Harness, batch_id: str, **values: Any) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(values))


async def test_many_endings_of_one_project_hold_up_no_other(harness: Harness) -> None:
    await add_project(harness)
    many = [await submit(harness, OTHER, 86400) for _ in range(6)]
    mine = await submit(harness, DEFAULT_PROJECT, 86400)
    await harness.plan()
    for each in (*many, mine):
        await set_status(harness, each, BatchStatus.CANCELLING)
    for _ in range(2):
        assert await harness.finalizer.run_once()
    assert (await harness.batch(mine)).status == BatchStatus.CANCELLED


async def test_many_previews_of_one_project_hold_up_no_other(harness: Harness) -> None:
    await add_project(harness)
    batches = [await submit(harness, OTHER, 86400) for _ in range(6)]
    batches.append(await submit(harness, DEFAULT_PROJECT, 86400))
    for each in batches:
        await change(harness, each, held=True)
    while await harness.validator.run_once():
        pass
    previewer = harness.previewer
    for _ in range(2):
        assert await previewer.run_once()
    assert (await harness.batch(batches[-1])).preview


async def test_errors_of_a_file_are_told_within_bounds(harness: Harness, settings: Settings, clock: Clock) -> None:
    bad = {"custom_id": "", "method": "G" * 100, "url": "/" + "u" * 100, "body": {"model": "test-model"}}
    batch_id = await harness.submit(jsonl(bad for _ in range(1000)))
    await harness.plan()
    batch = await harness.batch(batch_id)
    assert batch.status == BatchStatus.FAILED
    assert len(json.dumps(batch.errors)) < MOST_ERROR_BYTES + 1000
    with serve(settings, clock) as url:
        [listed] = httpx.get(f"{url}/v1/batches").json()["data"]
        alone = httpx.get(f"{url}/v1/batches/{batch_id}").json()
    assert len(listed["errors"]["data"]) == 10
    assert "more errors are not listed" in alone["errors"]["data"][-1]["message"]


async def test_files_that_fail_again_and_again_are_refused(
    harness: Harness, settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.tenants.quotas.LEAST_FAILED", 2)
    with serve(settings.model_copy(update={"max_batches": 2}), clock) as url:
        file_id = (await asyncio.to_thread(upload, url, b"{}\n")).json()["id"]
        wanted = {"input_file_id": file_id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        for _ in range(2):
            assert httpx.post(f"{url}/v1/batches", json=wanted).status_code == 200
            await harness.plan()
        refused = httpx.post(f"{url}/v1/batches", json=wanted)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "failed_batches_quota")
        clock.now += 3601
        assert httpx.post(f"{url}/v1/batches", json=wanted).status_code == 200


async def test_a_project_has_so_many_files(settings: Settings, clock: Clock, harness: Harness) -> None:
    """Each costs the service more than its bytes, and results count, too, but are never refused."""
    with serve(settings.model_copy(update={"max_files": 3}), clock) as url:
        file_ids = [(await asyncio.to_thread(upload, url, jsonl([line(1)]))).json()["id"] for _ in range(2)]
        wanted = {"purpose": "batch", "filename": "a.jsonl", "bytes": 10, "mime_type": "application/jsonl"}
        pending = httpx.post(f"{url}/v1/uploads", json=wanted).json()
        refused = [httpx.post(f"{url}/v1/uploads", json=wanted), await asyncio.to_thread(upload, url, b"{}\n")]
        assert [(each.status_code, each.json()["error"]["code"]) for each in refused] == [(429, "files_quota")] * 2
        assert "has 3 files and pending uploads; it may have 3" in refused[0].json()["error"]["message"]
        kept = await harness.storage.keys("files")
        assert len(kept) == 2
        body = {"input_file_id": file_ids[0], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = httpx.post(f"{url}/v1/batches", json=body).json()
        await harness.plan()
        async with harness.working(ScriptedEngine()):
            await harness.until_ended(batch["id"])
        assert (await harness.batch(batch["id"])).output_file_id is not None
        httpx.delete(f"{url}/v1/files/{file_ids[1]}")
        httpx.post(f"{url}/v1/uploads/{pending['id']}/cancel")
        assert (await asyncio.to_thread(upload, url, b"{}\n")).status_code == 200


async def test_an_index_leaves_the_reserve_of_the_disk_alone(
    harness: Harness, settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(9)))
    room = Room(1500, 2048)
    assert room.free_bytes > room.reserve_bytes * ANSWERS_RESERVE
    monkeypatch.setattr(Storage, "room", property(lambda _: room))
    validator = harness.validator
    await validator.run_once()
    assert (await harness.batch(batch_id)).validating_until is None  # it ended, and did not die
    with serve(settings, clock) as url:
        shown = httpx.get(f"{url}/v1/batches/{batch_id}").json()
        assert (shown["status"], shown["batchweave"]["waiting_for"][:4]) == ("validating", "room")
        wanted = {"input_file_id": shown["input_file_id"], "endpoint": shown["endpoint"], "completion_window": "24h"}
        assert httpx.post(f"{url}/v1/batches", json=wanted).status_code == 507
        monkeypatch.setattr(Storage, "room", property(lambda _: Room(10**9, 2048)))
        harness.clock.now += 60
        await validator.run_once()
        assert (await harness.batch(batch_id)).index_bytes > 0
        wanted["completion_window"] = "31d"
        refused = httpx.post(f"{url}/v1/batches", json=wanted).json()["error"]
    assert (refused["code"], refused["param"]) == ("invalid_completion_window", "completion_window")


async def test_indexes_count_for_the_quota_of_bytes(harness: Harness) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Project).where(Project.id == DEFAULT_PROJECT).values(max_bytes=6000))
    fits = await harness.submit(jsonl(line(n) for n in range(2)))
    await harness.plan()
    assert (await harness.batch(fits)).status == BatchStatus.IN_PROGRESS
    too_large = await harness.submit(jsonl(line(n) for n in range(30)))
    await harness.plan()
    batch = await harness.batch(too_large)
    assert batch.errors is not None
    assert batch.errors[0]["code"] == "bytes_quota"


async def test_a_file_that_no_process_survives_is_given_up(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl([line(1)]))
    other = await harness.submit(jsonl([line(1)]))
    await change(harness, batch_id, validation_deaths=MOST_DEATHS, validating_until=1.0)
    validator = harness.validator
    assert await validator.run_once()
    assert (await harness.batch(other)).status == BatchStatus.IN_PROGRESS  # those that nobody died of come first
    assert await validator.run_once()
    batch = await harness.batch(batch_id)
    assert batch.errors is not None
    assert (batch.status, batch.errors[0]["message"]) == (BatchStatus.FAILED, GIVEN_UP)


async def test_a_file_that_meets_an_error_of_ours_is_given_up(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hint for the user once failed on a schema, and its batch was tried every few seconds until it expired."""
    batch_id = await harness.submit(jsonl([line(1)]))
    validator = harness.validator
    with monkeypatch.context() as patch:
        patch.setattr(Unknown, "count", lambda *_: {}[0])
        for _ in range(MOST_DEATHS + 2):
            with suppress(KeyError):
                await validator.run_once()
            harness.clock.now += 3600
    batch = await harness.batch(batch_id)
    assert (batch.status, (batch.errors or [{}])[0].get("message")) == (BatchStatus.FAILED, GIVEN_UP)


async def test_many_who_validate_one_batch_are_no_deaths(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(200)))
    assert any(await asyncio.gather(*(harness.validator.run_once() for _ in range(MOST_DEATHS + 2))))
    batch = await harness.batch(batch_id)
    assert (batch.status, batch.validation_deaths) == (BatchStatus.IN_PROGRESS, 0)


async def test_what_processes_died_of_is_read_alone(harness: Harness) -> None:
    suspect, other = [await harness.submit(jsonl(line(n) for n in range(200))) for _ in range(2)]
    await change(harness, suspect, validation_deaths=2)
    validator = harness.validator
    assert sorted(await asyncio.gather(validator.run_once(), validator.run_once())) == [False, True]
    assert (await harness.batch(other)).status == BatchStatus.IN_PROGRESS
    assert await validator.run_once()
    assert (await harness.batch(suspect)).status == BatchStatus.IN_PROGRESS


async def test_a_file_is_read_no_further_once_its_batch_is_cancelled(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.jobs.breath.BREATH_S", 0.0)
    monkeypatch.setattr("service.jobs.breath.LOOK_S", 0.0)
    batch_id = await harness.submit(jsonl(line(n) for n in range(2000)))
    checks, real = 0, LineChecker.check

    def check(checker: LineChecker, number: int, raw: bytes) -> Any:
        nonlocal checks
        checks += 1
        return real(checker, number, raw)

    async def has_begun() -> bool:
        return checks > 0

    monkeypatch.setattr(LineChecker, "check", check)
    validating = asyncio.create_task(harness.validator.run_once())
    await until(has_begun)
    await set_status(harness, batch_id, BatchStatus.CANCELLING)
    assert await validating
    assert checks < 2000
    [batch] = await harness.until_ended(batch_id)
    assert batch.status == BatchStatus.CANCELLED


async def test_a_cookie_or_a_head_that_is_costly_to_read_is_refused(url: str) -> None:
    """Python's own parser of cookies takes time by the square of a quoted value."""
    port = httpx.URL(url).port or 0
    for header in (b'Cookie: a="' + b"\\" * 50_000 + b'"', b"X-Long: " + b"x" * 40_000, b"Cookie: " + b"a" * 5000):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"GET /v1/batches HTTP/1.1\r\nHost: localhost\r\n" + header + b"\r\n\r\n")
            client.settimeout(30)
            assert (await asyncio.to_thread(client.recv, 12))[9:12] in (b"431", b"400")


def test_a_line_of_members_is_no_object_for_long() -> None:
    members = b",".join(b'"%d":0' % n for n in range(200_000))
    checker = LineChecker("/v1/chat/completions")
    line = b'{"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{"model":"m","x":{%s}}}' % members
    assert checker.check(1, line) is None
    assert "brackets and members" in checker.errors[0].message
    assert nesting(b'{"a": "' + b":" * 200_000 + b'"}')[0] < 10  # in a string they are text


@pytest.mark.timeout(120)
def test_a_line_of_brackets_is_no_object_for_long() -> None:
    """Its two million lists took seconds to make, in a page's search and in the validator."""
    heavy = b'{"custom_id":"a","zz":["zz",' + b"[]," * 2_000_000 + b"1]}"
    assert lines.named(heavy) == "a"
    assert lines.parsed(heavy) is None
    assert lines.parsed(heavy, len(heavy)) is None
    checker = LineChecker("/v1/completions")
    assert checker.check(1, heavy) is None
    assert "brackets" in checker.errors[0].message


async def test_a_file_of_nothing_is_not_read_to_its_end(
    harness: Harness, pages: httpx.AsyncClient, settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank lines were skipped without bound, in the event loop: a page took minutes, and everybody waited."""
    with serve(settings, clock) as url:
        file_id = (await asyncio.to_thread(upload, url, gzip.compress(b"\n" * 5_000_000))).json()["id"]
    threads = set[int]()
    monkeypatch.setattr(lines, "_look_at", lambda *_: threads.add(threading.get_ident()))
    monkeypatch.setattr(Storage, "stream", None)  # it reads one range
    assert (await pages.get("/new", params={"file": file_id})).status_code == 200
    assert not threads
    assert harness


async def test_a_search_parses_in_a_thread(pages: httpx.AsyncClient, harness: Harness, settings: Settings) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(3)))
    async with harness.database.read() as session:
        batch = (await session.scalars(select(Batch).where(Batch.id == batch_id))).one()
    seen: list[tuple[int, bytes, int]] = []

    async def parts() -> AsyncIterator[bytes]:
        for each in (b"a\n\n  \nb", b"b\nc"):
            yield each

    def look(at: int, raw: bytes) -> bool:
        seen.append((at, raw, threading.get_ident()))
        return raw == b"c"

    found = await lines.look_through(batch, parts(), look, start=100)
    assert not found  # `look` had seen enough
    assert [(at, raw) for at, raw, _ in seen] == [(100, b"a"), (106, b"bb"), (109, b"c")]
    assert threading.get_ident() not in {ident for _, _, ident in seen}


def post_upload(url: str, data: bytes, times: int = 1) -> httpx.Response:
    """In one part, which `complete` names so often."""
    begin = {**FORM, "bytes": times * len(data), "filename": "a", "mime_type": "text/plain"}
    upload_id = httpx.post(f"{url}/v1/uploads", json=begin).json()["id"]
    part = httpx.post(f"{url}/v1/uploads/{upload_id}/parts", files={"data": ("a", data)}).json()["id"]
    wanted = {"part_ids": [part] * times, "md5": hashlib.md5(data * times).hexdigest()}
    return httpx.post(f"{url}/v1/uploads/{upload_id}/complete", json=wanted, timeout=60)


async def test_what_a_part_unpacks_to_counts_for_the_quota(harness: Harness, settings: Settings, clock: Clock) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Project).where(Project.id == DEFAULT_PROJECT).values(max_bytes=100_000))
    with serve(settings, clock) as url:
        fits = await asyncio.to_thread(post_upload, url, gzip.compress(b"{}\n" * 20_000))
        assert (fits.status_code, fits.json()["file"]["bytes"]) == (200, 60_000)
        over = await asyncio.to_thread(post_upload, url, gzip.compress(b"{}\n" * 20_000))
    assert over.status_code in (413, 429)


async def test_parts_and_members_of_gzip_are_bounded(settings: Settings, clock: Clock) -> None:
    with serve(settings, clock) as url:
        twice = await asyncio.to_thread(post_upload, url, b"{}\n", 2)
        assert twice.json()["error"]["code"] == "duplicate_part"
        members = await asyncio.to_thread(upload, url, EMPTY_MEMBER * (MOST_MEMBERS + 2))
        assert "members" in members.json()["error"]["message"]
        fields = {f"field{number}": "x" for number in range(40)}
        crowded = httpx.post(f"{url}/v1/files", data=fields, files={"file": ("in.jsonl", b"{}\n")})
        assert crowded.status_code == 400
        long = httpx.post(f"{url}/v1/files", data={"purpose": "b" * 10_000}, files={"file": ("in.jsonl", b"{}\n")})
        assert long.status_code == 400


async def test_a_body_that_trickles_is_cut(settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "BODY_S", 1.0)
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"

    def trickle(stalled: socket.socket) -> None:
        for _ in range(1000):
            stalled.sendall(b"-")
            if closed.wait(0.1):
                return

    closed = threading.Event()
    with serving(settings, clock) as (port, _), socket.create_connection(("127.0.0.1", port)) as stalled:
        stalled.sendall(head + b"Content-Length: 90000\r\n\r\n--x")
        sender = asyncio.create_task(asyncio.to_thread(trickle, stalled))
        assert await asyncio.to_thread(is_closed, stalled)
        closed.set()
        await asyncio.gather(sender, return_exceptions=True)


async def test_a_client_that_takes_nothing_is_cut(
    settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "READ_S", 0.5)
    with serve(settings, clock) as url:
        file_id = (await asyncio.to_thread(upload, url, b"{}\n" * 10_000_000)).json()["id"]
    with serving(settings, clock) as (port, server), socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", port))
        stalled.sendall(f"GET /v1/files/{file_id}/content HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        async with asyncio.timeout(30):
            while not server.server_state.connections:
                await asyncio.sleep(0.01)
            while server.server_state.connections:
                await asyncio.sleep(0.05)
        stalled.settimeout(30)
        received = await asyncio.to_thread(_all_of, stalled)
    assert received < 30_000_000  # of the file: it was cut off


def _all_of(connection: socket.socket) -> int:
    """Reads what is left to be read; returns its bytes."""
    size = 0
    try:
        while data := connection.recv(1 << 20):
            size += len(data)
    except ConnectionResetError:
        pass
    return size


HANGS = """
import asyncio, re
from service.up.loop_watch import watched_loop

async def main():
    async with watched_loop(1.0):
        await asyncio.sleep(1.5)
        print("turns", flush=True)
        re.match("(a+)+b", "a" * 64)

asyncio.run(main())
"""


def test_a_process_whose_loop_hangs_ends_and_says_where() -> None:
    found = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=120)
    assert found.stdout == "turns\n"
    assert found.returncode == 1
    assert "Timeout" in found.stderr
    assert "main" in found.stderr
