"""What an operator and a newcomer meet: full disks, files that are none, names that are misspelt, stalls, logs."""

import asyncio
import gzip
import io
import json
import os
import stat
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
from sqlalchemy import update

from service.api.plain_text import PlainText
from service.db.tables import DEFAULT_PROJECT, BatchStatus, Model, OnLongLine
from service.db.tables import Batch as BatchRow
from service.db.tenant_tables import Project
from service.errors import BadRequest, CostsError, PayloadTooLarge, SettingsError
from service.estimates.model_costs import check_model, context_length_of
from service.objects import storage as stores
from service.objects.storage import Room, Storage
from service.queue.progress import Heartbeat, Starting
from service.requests.lines import MAX_NESTING, LineChecker
from service.settings import Settings, load_settings
from tests.conftest import Clock
from tests.integration.harness import CHAT, Harness, ScriptedEngine, completed_are, jsonl, line, set_status
from tests.integration.serving import serve
from tests.waiting import until

FORM = {"purpose": "batch"}


@pytest.fixture
def short_of_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Storage, "room", property(lambda _: Room(1024, 2048)))


def upload(url: str, data: bytes, **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/files", data=FORM, files={"file": ("in.jsonl", data)}, headers=headers, timeout=60)


@pytest.mark.usefixtures("short_of_room")
async def test_a_disk_that_is_nearly_full_refuses_uploads_and_nothing_else(
    harness: Harness, settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serve(settings, clock) as url:
        refused = await asyncio.to_thread(upload, url, jsonl([line(1)]))
        assert (refused.status_code, refused.headers["x-should-retry"]) == (507, "false")
        assert refused.json()["error"]["code"] == "insufficient_storage"
        parts = httpx.post(f"{url}/v1/uploads", json={**FORM, "bytes": 9, "filename": "a", "mime_type": "text/plain"})
        assert parts.status_code == 507
        assert httpx.get(f"{url}/readyz").json()["status"] == "storage_full"
        assert "The disk is nearly full" in httpx.get(f"{url}/dashboard").text
        assert "batchweave_storage_free_bytes 1024.0" in httpx.get(f"{url}/metrics").text
        monkeypatch.setattr(Storage, "room", property(lambda _: Room(100, 2048)))
        batch_id = await harness.submit(jsonl([line(1)]))
        shown = httpx.get(f"{url}/v1/batches/{batch_id}").json()["batchweave"]["waiting_for"]
        assert "room on the service's disk" in shown
        assert (await asyncio.to_thread(httpx.post, f"{url}/v1/batches/{batch_id}/cancel")).status_code == 200
        [batch] = await harness.until_ended(batch_id)
        assert batch.status == BatchStatus.CANCELLED
        file_id = batch.input_file_id
        assert (await asyncio.to_thread(httpx.delete, f"{url}/v1/files/{file_id}")).status_code == 200


async def test_answers_wait_while_the_rest_of_the_disk_is_kept(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(9)))
    await harness.plan()
    monkeypatch.setattr(Storage, "room", property(lambda _: Room(100, 2048)))
    async with harness.working(ScriptedEngine()):
        await asyncio.sleep(0.3)
        assert not await harness.storage.keys("shards")
        monkeypatch.setattr(Storage, "room", property(lambda _: Room(10**9, 2048)))
        [batch] = await harness.until_ended(batch_id)
    assert (batch.completed, batch.failed) == (9, 0)


def test_a_tenth_of_the_disk_is_kept(tmp_path: Path) -> None:
    room = Storage.open(tmp_path.as_uri()).room
    assert room is not None
    whole = os.statvfs(tmp_path)
    assert room.reserve_bytes == min(stores.MOST_RESERVE, int(0.1 * whole.f_blocks * whole.f_frsize))


@pytest.mark.parametrize(
    ("data", "code", "said"),
    [
        (b"", "empty_file", "empty"),
        ('{"custom_id": "a"}\n'.encode("utf-16"), "invalid_file", "UTF-16"),
        (b' \n[{"custom_id": "a"}]', "invalid_file", "JSON array"),
        (gzip.compress(b"{}\n" * 1000, mtime=0)[:-9], "invalid_file", "cut off"),
        (b"\x1f\x8bno gzip at all", "invalid_file", "damaged"),
    ],
)
async def test_a_file_of_another_kind_is_said_at_once(
    settings: Settings, clock: Clock, data: bytes, code: str, said: str
) -> None:
    with serve(settings, clock) as url:
        answer = await asyncio.to_thread(upload, url, data)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, code)
    assert said in error["message"]


async def test_gzip_is_unpacked_and_bounded(settings: Settings, clock: Clock) -> None:
    data = jsonl(line(n) for n in range(100))
    with serve(settings.model_copy(update={"max_file_bytes": len(data)}), clock) as url:
        made = (await asyncio.to_thread(upload, url, gzip.compress(data[:1000]) + gzip.compress(data[1000:]))).json()
        assert made["bytes"] == len(data)
        assert httpx.get(f"{url}/v1/files/{made['id']}/content").content == data
        bomb = await asyncio.to_thread(upload, url, gzip.compress(b"x" * 100_000_000))
    assert (bomb.status_code, bomb.json()["error"]["code"]) == (413, "file_too_large")


async def test_text_is_the_same_however_it_is_cut() -> None:
    data = jsonl(line(n) for n in range(50))
    for whole in (data, gzip.compress(data)):
        for size in (1, 3, 1000):
            got = io.BytesIO()

            async def keep(part: bytes, into: io.BytesIO = got) -> None:
                into.write(part)

            text = PlainText(keep, 10**6)
            for at in range(0, len(whole), size):
                await text.write(whole[at : at + size])
            await text.end()
            assert (got.getvalue(), text.size_bytes) == (data, len(data))
    with pytest.raises(PayloadTooLarge):
        await PlainText(keep, 10).write(data)
    with pytest.raises(BadRequest, match="empty"):
        await PlainText(keep, 10).end()


async def test_bytes_of_an_upload_are_judged_while_they_stream(
    harness: Harness, settings: Settings, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body without a length was written to the disk whole before the project's quota was looked at."""
    async with harness.database.write() as session:
        await session.execute(update(Project).where(Project.id == DEFAULT_PROJECT).values(max_bytes=10_000))
    written = 0

    def counted(here: Any, write: Any, _counted: Any) -> Any:
        async def count(data: bytes) -> object:
            nonlocal written
            written += len(data)
            return await write(data)

        return count

    monkeypatch.setattr("service.api.files.watched", counted)

    def large() -> Any:
        yield b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(100):
            yield b"x" * 65536

    headers = {"content-type": "multipart/form-data; boundary=x"}
    with serve(settings, clock) as url, suppress(httpx.TransportError):  # it may be closed while it is sent
        answer = await asyncio.to_thread(httpx.post, f"{url}/v1/files", content=large(), headers=headers, timeout=60)
        assert answer.status_code == 413
    assert written <= 10_000 + 65536
    assert not [each for each in (settings.data_dir / "objects").rglob("*") if each.is_file()]


class LateAborts(ScriptedEngine):
    """Answers what it is told to abort, as SGLang does when the abort meets the last token."""

    def abort(self, rid: str) -> None:
        assert self.hold is not None
        self.hold.set()


async def test_what_was_counted_stays_when_a_batch_is_cancelled(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers answer for a moment after a cancel; the files were written from what there was before."""
    monkeypatch.setattr("service.jobs.finalizer.SETTLE_S", 60.0)
    batch_id = await harness.submit(jsonl(line(n) for n in range(64)))
    await harness.plan()
    async with harness.working(LateAborts(hold=asyncio.Event(), hold_after=20)):
        await until(lambda: completed_are(harness, batch_id, 20))
        await set_status(harness, batch_id, BatchStatus.CANCELLING)
        while (batch := await harness.batch(batch_id)).status != BatchStatus.CANCELLED:
            await harness.finalizer.run_once()
            await asyncio.sleep(0.01)
    assert batch.completed > 20  # slices that no worker had taken yet stay as they are


@pytest.mark.parametrize("wish", list(OnLongLine))
async def test_a_line_that_is_too_long_fails_its_file_or_itself(harness: Harness, wish: OnLongLine) -> None:
    async with harness.database.write() as session:
        await session.execute(update(Model).values(context_length=100))
    too_long = line(1, body={"model": "test-model", "messages": [{"role": "user", "content": "x"}], "max_tokens": 500})
    batch_id = await harness.submit(jsonl([line(0), too_long]))
    async with harness.database.write() as session:
        await session.execute(update(BatchRow).where(BatchRow.id == batch_id).values(on_long_line=wish))
    await harness.validator.run_once()
    batch = await harness.batch(batch_id)
    if wish is OnLongLine.FAIL_LINE:
        assert (batch.status, batch.total) == (BatchStatus.IN_PROGRESS, 2)
        return
    assert batch.errors is not None
    assert (batch.status, batch.errors[0]["code"]) == (BatchStatus.FAILED, "context_length_exceeded")
    assert "fail_file" in batch.errors[0]["message"]


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"max_position_embeddings": 4096}, 4096),
        ({"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 16384),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"text_config": {"max_position_embeddings": 8192}}, 8192),
        ({}, None),
    ],
)
def test_the_context_is_known_before_an_engine_has_run(tmp_path: Path, config: Any, length: int | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length_of(load_settings(model=str(tmp_path))) == length
    assert context_length_of(load_settings(model=str(tmp_path), engine_args={"context_length": 77})) == 77


def test_a_model_that_is_nowhere_is_refused_with_what_was_looked_for(tmp_path: Path) -> None:
    for given, said in (
        ("/nonexistent", "no folder /nonexistent"),
        (str(tmp_path), "has no config.json"),
        ("no/such/thing", "not a hub id"),
    ):
        with pytest.raises(CostsError, match=said):
            check_model(load_settings(model=given))
    ran = subprocess.run(
        [sys.executable, "-m", "batchweave", "up", "--model", "/nonexistent", "--data-dir", str(tmp_path / "data")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ran.returncode == 1
    assert "no folder /nonexistent" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_misspelt_variable_is_an_error_with_the_nearest_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWEAVE_MAX_LINE", "7")
    with pytest.raises(SettingsError, match=r"BATCHWEAVE_MAX_LINE .*BATCHWEAVE_MAX_LINES\?"):
        load_settings()


def test_a_secret_is_not_in_the_error_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHWEAVE_SECRET_KEY", "too-short")
    with pytest.raises(SettingsError, match="BATCHWEAVE_SECRET_KEY") as caught:
        load_settings()
    assert "too-short" not in str(caught.value)


async def test_fields_that_do_not_fit_say_what_would(settings: Settings, clock: Clock) -> None:
    wanted: dict[str, Any] = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h"}
    with serve(settings, clock) as url:
        for changes, said in (
            ({"completion_window": "1w"}, "24h, 30m, 7d"),
            ({"batchweave": {"output_ordr": "input"}}, "did you mean 'output_order'?"),
        ):
            answer = httpx.post(f"{url}/v1/batches", json={**wanted, **changes})
            assert answer.status_code == 400
            assert said in answer.json()["error"]["message"]


def test_all_faults_of_a_line_are_named() -> None:
    checker = LineChecker(CHAT)
    body = {"messages": [{"role": "user", "content": "x"}], "n": 9999, "stream": True}
    checker.check(1, json.dumps({"custom_id": "", "method": "GET", "url": "/v1/x", "body": body}).encode())
    params = [error.param for error in checker.errors]
    assert params == ["custom_id", "method", "url", "body.model", "body.stream", "body.n"]


@pytest.mark.parametrize("depth", [MAX_NESTING, 968, 969, 970, 100_000])
async def test_nesting_at_the_parsers_edge_is_refused_with_its_line(harness: Harness, depth: int) -> None:
    """Between the depths at which several readers give up a batch once passed validation and never ended."""
    deep = (
        f'{{"custom_id": "a", "method": "POST", "url": "{CHAT}", "metadata": {"[" * depth}{"]" * depth}, "body": {{}}}}'
    )
    batch_id = await harness.submit(jsonl([line(0)]) + deep.encode() + b"\n")
    await harness.validator.run_once()
    batch = await harness.batch(batch_id)
    assert batch.errors is not None
    assert (batch.errors[0]["line"], batch.errors[0]["code"]) == (2, "invalid_json_line")
    assert "nested" in batch.errors[0]["message"]


async def test_no_line_keeps_a_batch_from_ending(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(3)))
    await harness.plan()

    def cannot(_: bytes) -> str:
        raise RecursionError

    monkeypatch.setattr("service.jobs.input_names.custom_id_of", cannot)
    await set_status(harness, batch_id, BatchStatus.CANCELLING)
    [batch] = await harness.until_ended(batch_id)
    assert (batch.status, batch.failed) == (BatchStatus.CANCELLED, 0)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "text", [b'"' + b'\\"' * 4_000_000, b'"' * 8_000_000, b"[]" * 4_000_000, b"\\" * 8_000_000, b'"a\\']
)
def test_a_line_is_judged_in_the_time_it_takes_to_read_it(text: bytes) -> None:
    """A string without an end, full of quotes, took hours, in which the planner did nothing for anybody."""
    checker = LineChecker(CHAT)
    assert checker.check(1, b"[" * (MAX_NESTING + 1) + text) is None
    assert "nested" in checker.errors[0].message


def test_brackets_in_strings_are_no_nesting() -> None:
    checker = LineChecker(CHAT)
    messages = [{"role": "user", "content": '[{"\\' * 5000}]
    assert checker.check(1, json.dumps(line(1, body={"model": "m", "messages": messages})).encode())


async def test_a_worker_that_stalls_or_starts_is_said_to(harness: Harness, settings: Settings, clock: Clock) -> None:
    state = {"name": "w", "model": "test-model", "slices": 1, "requests": 9, "step_age_s": 40.0}
    await Heartbeat(harness.redis).beat("w", state)
    starting = Starting(settings.redis, "new", {"model": "test-model", "host": "h"})
    starting.begin()
    starting.say("loads SGLang")
    batch_id = await harness.submit(jsonl([line(1)]))
    await harness.plan()
    with serve(settings, clock) as url:
        async with asyncio.timeout(30):
            while len(found := httpx.get(f"{url}/v1/workers").json()["data"]) < 2:
                await asyncio.sleep(0.05)
        assert [(each["id"], each["state"]) for each in found] == [("w", "stalled"), ("new", "starting")]
        ready = httpx.get(f"{url}/readyz").json()
        assert (ready["workers"], ready["stalled"], ready["starting"], ready["step_age_s"]) == (1, 1, 1, 40.0)
        waits = httpx.get(f"{url}/v1/batches/{batch_id}").json()["batchweave"]["waiting_for"]
        assert "none has finished a step" in waits
        pages = [httpx.get(f"{url}/dashboard{path}").text for path in ("", "/workers")]
        assert "w is stalled" in pages[0]
        assert ">Starting</span>" in pages[1]
        starting.end()
        async with asyncio.timeout(30):
            while len(httpx.get(f"{url}/v1/workers").json()["data"]) > 1:
                await asyncio.sleep(0.05)
        await harness.redis.delete("batchweave:worker:w")
        assert "none is alive" in httpx.get(f"{url}/v1/batches/{batch_id}").json()["batchweave"]["waiting_for"]


async def test_each_request_is_logged_with_who_sent_it(
    settings: Settings, clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, structlog.processors.JSONRenderer(default=repr)]
    )
    for logs in (True, False):
        with serve(settings.model_copy(update={"access_log": logs}), clock) as url:
            answer = httpx.get(f"{url}/v1/batches/batch_x")
            httpx.get(f"{url}/healthz")
        lines = [json.loads(each) for each in capsys.readouterr().out.splitlines() if each.startswith("{")]
        found = [each for each in lines if each["event"] == "request"]
        assert len(found) == logs
        for each in found:
            assert each["request_id"] == answer.headers["x-request-id"]
            assert (each["method"], each["route"], each["status"]) == ("GET", "/v1/batches/{batch_id}", 404)
            assert (each["key"], each["bytes"]) == ("local", len(answer.content))


def test_other_local_pages_are_not_ours(settings: Settings, clock: Clock) -> None:
    with serve(settings, clock) as url:
        for origins, status in (([url], 200), (["http://localhost:3000"], 403), ([url, url], 403), ([], 200)):
            answer = httpx.get(f"{url}/v1/models", headers=[("origin", each) for each in origins])
            assert answer.status_code == status


def test_the_reference_loads_nothing_from_elsewhere(settings: Settings, clock: Clock) -> None:
    with serve(settings, clock) as url:
        page = httpx.get(f"{url}/docs")
        assert page.status_code == 200
        assert "POST /v1/batches" in page.text
        assert "<script" not in page.text
        assert "https://" not in page.text
        assert httpx.get(f"{url}/redoc").status_code == 404


def test_what_a_role_writes_nobody_else_reads(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    (data / "batchweave.db").touch(mode=0o644)
    code = "import os; os.umask(0o022); from batchweave.__main__ import main; main()"
    environment = {**os.environ, "BATCHWEAVE_DATA_DIR": str(data)}
    command = [sys.executable, "-c", code, "projects", "list"]
    subprocess.run(command, check=True, capture_output=True, env=environment, timeout=120)
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in data.iterdir() if each.is_file()}
    assert modes
    assert set(modes.values()) == {0o600}, modes
