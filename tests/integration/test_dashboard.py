"""The dashboard's pages and forms over HTTP, without a browser; tests/dashboard looks at them in one."""

import re
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from engine_ext.coserve.slo import SloClass
from engine_ext.plugin.scheduler.served import ServedClass
from service.db.tables import Batch, BatchStatus
from service.jobs.historian import Historian
from service.metrics.history import MOST_SHOWN, History
from service.objects.storage import file_key
from service.queue import keys
from service.queue.counts import Counts
from service.queue.leases import Leases
from service.queue.progress import Heartbeat
from tests.conftest import Clock
from tests.integration.browsing import PAGES
from tests.integration.house import House, ScriptedEngine, completed_are, jsonl, line, set_status


@pytest.mark.parametrize("page", PAGES)
async def test_pages_show_an_empty_service_and_let_nothing_else_in(pages: httpx.AsyncClient, page: str) -> None:
    answer = await pages.get(page)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script>|style=|\son\w+=|https?://(?!www\.w3\.org)", answer.text)


async def test_a_file_is_uploaded_run_looked_at_and_retried(pages: httpx.AsyncClient, house: House) -> None:
    data = jsonl(line(n) for n in range(20))
    upload = await pages.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})
    assert "in.jsonl" in upload.text
    file_id = upload.url.params["file"]
    form = {"file": file_id, "endpoint": "/v1/chat/completions", "window": "24h", "order": "any"}
    created = await pages.post("/batches", data=form)
    batch_id = created.url.path.rsplit("/", 1)[1]
    assert "waiting for validation" in created.text
    await house.plan()
    async with house.working(ScriptedEngine(statuses={"request 3": [400]})):
        await house.until(lambda: completed_are(house, batch_id, 19))
        house.clock.now += 5  # what is readable early is looked for every few seconds
        running = (await pages.get(f"/batches/{batch_id}")).text
        assert "20 of 20" in running
        assert 'class="tree"' in running
        assert "/request?custom_id=id-7" in running  # its answers too
        assert "3 of 3 slices" in running
        await house.until_ended(batch_id)
    page = (await pages.get(f"/batches/{batch_id}")).text
    assert "completed" in page
    assert page.count('<rect class="done"') == 3
    assert "id-3" in page  # in the digest of failures
    search = (await pages.get(f"/batches/{batch_id}", params={"text": "id-1"})).text
    assert search.count(">id-1") == 11  # 1, 10 to 19
    one = (await pages.get(f"/batches/{batch_id}/request", params={"custom_id": "id-7"})).text
    assert one.count("request 7") == 2  # asked, and echoed
    assert (await pages.get(f"/batches/{batch_id}/request", params={"custom_id": "nobody"})).status_code == 200
    assert batch_id in (await pages.get("/batches", params={"status": "completed", "text": batch_id[:12]})).text
    assert batch_id not in (await pages.get("/batches", params={"status": "failed"})).text
    retried = await pages.post(f"/batches/{batch_id}/retry")
    assert retried.url.path != f"/dashboard/batches/{batch_id}"
    assert "cancelling" in (await pages.post(f"{retried.url.path.removeprefix('/dashboard')}/cancel")).text


async def test_errors_of_a_file_are_shown_by_line(pages: httpx.AsyncClient, house: House) -> None:
    batch_id = await house.submit(jsonl([line(1), line(1, url="/v1/nowhere"), line(1)]))
    await house.plan()
    text = (await pages.get(f"/batches/{batch_id}")).text
    assert "The file has errors" in text
    assert '<td class="nums">2</td>' in text
    assert '<td class="nums">3</td>' in text


async def test_workers_are_filtered(pages: httpx.AsyncClient, house: House) -> None:
    for name, slices in (("worker-a", 2), ("worker-b", 0)):
        state = {"name": name, "model": "m", "slices": slices, "requests": 0}
        await Heartbeat(house.redis).beat(name, state)
    assert "worker-a" in (await pages.get("/workers?state=working&model=m")).text
    assert "worker-b" not in (await pages.get("/workers?state=working")).text
    assert "worker-a" not in (await pages.get("/workers?state=idle")).text
    assert "worker-a" not in (await pages.get("/workers?model=other")).text
    assert "No workers match these filters" in (await pages.get("/workers?state=draining")).text


async def test_online_requests_are_shown_against_their_bounds(pages: httpx.AsyncClient, house: House) -> None:
    assert "No worker takes online requests" in (await pages.get("/online")).text
    state = {"name": "w", "model": "m", "slices": 0, "requests": 0, "online": "http://10.0.0.1:1", "online_requests": 3}
    await Heartbeat(house.redis).beat("w", state)
    assert "None has ended yet" in (await pages.get("/online")).text
    found = ServedClass()
    for ttft_s in (0.1, 0.2, 3.0):
        found.note(ttft_s, 0.02, ttft_s > 1)
    classes = [found.report(SloClass("default", ttft_s=1.0)), found.report(SloClass("<b>flex"))]
    rank = {"online_classes": classes, "online_s": 4.0, "batches_excess_s": 1.0, "kv_capacity": 100, "online_kv": 25}
    await Heartbeat(house.redis).beat("w", {**state, "engine": [rank], "online_seconds_per_second": 0.4})
    text = re.sub(r"<[^>]*>", "", (await pages.get("/online")).text)
    for shown in ("200 ms of 1,000 ms", "20 ms", "66.7%", "25.0%", "40.0%", "&lt;b&gt;flex"):
        assert shown in text


async def test_what_is_shown_is_escaped(pages: httpx.AsyncClient, house: House) -> None:
    batch_id = await house.submit(jsonl([line(1, custom_id="<script>alert(1)</script>")]))
    await house.plan()
    async with house.working(ScriptedEngine(statuses={"request 1": [400]})):
        await house.until_ended(batch_id)
    for path in (f"/batches/{batch_id}", f"/batches/{batch_id}/request?custom_id=<script>", "/batches?text=<script>"):
        text = (await pages.get(path)).text
        assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in (await pages.get(f"/batches/{batch_id}?kind=errors")).text


@pytest.mark.parametrize("data", [b"{" * 1_000_000, b"x" * 5_000_000, b"7\n", b'{"url": 7}\n', b"\xff\n"])
async def test_files_that_are_none_are_no_fault_of_ours(pages: httpx.AsyncClient, data: bytes) -> None:
    shown = await pages.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})
    assert (shown.status_code, "Start the batch" in shown.text) == (200, True)
    form = {"file": shown.url.params["file"], "endpoint": "/v1/completions", "window": "24h"}
    batch = await pages.post("/batches", data=form)
    assert (await pages.get(f"{batch.url.path.removeprefix('/dashboard')}/request?custom_id=a")).status_code == 200


async def test_a_line_without_a_name_is_shown(pages: httpx.AsyncClient, house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(3)))
    await house.plan()
    await house.storage.delete(file_key((await house.batch(batch_id)).input_file_id))  # behind our back
    await set_status(house, batch_id, BatchStatus.CANCELLING)
    await house.until_ended(batch_id)
    shown = await pages.get(f"/batches/{batch_id}?kind=errors")
    assert (shown.status_code, shown.text.count("batch_cancelled")) == (200, 3 + 1)  # and the digest
    assert "0 of 3" in shown.text
    assert "3 not run" in shown.text
    assert "failed</b>" not in shown.text


async def test_history_is_noted_once_in_ten_seconds(pages: httpx.AsyncClient, house: House, clock: Clock) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(20)))
    await house.plan()
    state = {"name": "w", "model": "m", "input_tokens_per_second": 5.0, "engine": [{"running": 2}, {"running": 3}]}
    await Heartbeat(house.redis).beat("w", state)
    assert await Leases(house.database, "w", "test-model", 30).claim(1)
    historian = Historian(house.database, house.redis, clock)
    assert await historian.run_once()
    assert not await historian.run_once()
    [point] = (await pages.get("/overview.json")).json()
    assert (point["unfinished"], point["running"], point["input_tokens_per_second"]) == (20, 5, 5.0)
    assert (await pages.get(f"/batches/{batch_id}/points.json")).json() == [[int(clock.now), 0, 0, 0, 0]]


async def test_a_batchs_history_is_thinned_and_has_its_end(house: House) -> None:
    history = History(house.redis)
    for at in range(3000):
        await history.note_batch("batch_x", at, Counts(completed=at // 2))  # every second one tells nothing new
    points = await history.batch_points("batch_x")
    assert len(points) <= MOST_SHOWN
    assert points[-1][:2] == [2998, 1499]
    assert [point[1] for point in points] == sorted({point[1] for point in points})
    stored: Any = await house.redis.llen("batchweave:history:batch_x")  # pyright: ignore[reportGeneralTypeIssues]
    assert stored <= 2 * MOST_SHOWN


async def test_a_rest_is_drawn_as_one(house: House) -> None:
    history = History(house.redis)
    for at, answers in ((0, 1), (10, 2), (20, 2), (100, 3)):
        await history.note_batch("batch_x", at, Counts(completed=answers))
    assert [point[:2] for point in await history.batch_points("batch_x")] == [[0, 1], [10, 2], [90, 2], [100, 3]]


async def test_batches_are_filtered(pages: httpx.AsyncClient, house: House, clock: Clock) -> None:
    clock.now = 1_700_000_000.0  # 2023-11-14, 22:13 UTC
    early = await house.submit(jsonl([line(1)]))
    async with house.database.write() as session:
        await session.execute(
            update(Batch).where(Batch.id == early).values(custom_metadata={"run": "twelve", "Größe": "ß"})
        )
    clock.now += 7200
    late = await house.submit(jsonl([line(1)]))
    await house.plan()

    async def shown(**filters: str) -> set[str]:
        text = (await pages.get("/batches", params=filters)).text
        return {each for each in (early, late) if f'/batches/{each}"' in text}

    assert await shown() == {early, late}
    assert await shown(since="2023-11-15") == {late}
    assert await shown(until="2023-11-14") == {early}
    assert await shown(since="2023-11-14", until="2023-11-15") == {early, late}
    assert await shown(since="2023-02-31") == {early, late}  # no calendar has it
    assert await shown(text="twelve") == {early}
    assert await shown(text="größe") == {early}
    assert await shown(text=late[:16]) == {late}
    assert await shown(text="%") == set()
    assert await shown(model="test-model", status="in_progress") == {early, late}
    assert await shown(status="failed") == set()
    assert await shown(until="9999-12-31") == {early, late}
    for wrong in ({"since": "yesterday"}, {"text": "\0"}, {"model": "\0"}, {"project": "\0"}):
        assert (await pages.get("/batches", params=wrong)).status_code == 400
    for path in ("/projects/%00", "/keys/%00/revoke"):
        assert (await pages.post(path, data={"weight": 1})).status_code == 400


async def test_a_plan_is_shown_before_the_start(pages: httpx.AsyncClient, house: House) -> None:
    data = jsonl(line(n) for n in range(20))
    upload = await pages.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})
    form = {"file": upload.url.params["file"], "endpoint": "/v1/chat/completions", "window": "24h", "hold": "true"}
    created = await pages.post("/batches", data=form)
    path = created.url.path.removeprefix("/dashboard")
    assert "planning the batch" in created.text
    await house.plan()
    held = (await pages.get(path)).text
    assert "% of them shared" in held
    assert "waiting for its start" in held
    assert re.search(r"Held until started</dt><dd>1<", overview := (await pages.get("")).text)
    assert path not in overview  # among those that run, and come next
    started = await pages.post(f"{path}/start")
    assert "Before it starts" not in started.text
    await house.plan()
    assert "3 slices in the order of the plan" in (await pages.get(path)).text


async def test_the_time_until_all_is_done_is_by_the_pace_of_answers(pages: httpx.AsyncClient, house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(100)))
    await house.plan()
    await Heartbeat(house.redis).beat("w", {"name": "w", "model": "test-model", "slices": 0, "requests": 0})
    historian = Historian(house.database, house.redis, house.clock)
    assert await Leases(house.database, "w", "test-model", 30).claim(1)
    await historian.run_once()
    await house.progress.state(1, {batch_id: Counts(completed=60)})
    await house.redis.delete(keys.HISTORY_TURN)  # as if its time had passed
    house.clock.now += 600
    await historian.run_once()
    point = (await pages.get("/overview.json")).json()[-1]
    assert (point["unfinished"], round(point["answers_per_second"], 3)) == (40, 0.1)
    assert "6 min 40 s" in (await pages.get("")).text


async def test_short_batches_count_for_the_pace_too(house: House) -> None:
    historian = Historian(house.database, house.redis, house.clock)
    await historian.run_once()
    for _ in range(2):
        batch_id = await house.submit(jsonl(line(n) for n in range(30)))
        await house.plan()
        async with house.working(ScriptedEngine()):
            await house.until_ended(batch_id)
            await house.redis.delete(keys.HISTORY_TURN)
            house.clock.now += 600
            await historian.run_once()
        assert (await History(house.redis).last())["answers_per_second"] == pytest.approx(0.05, abs=1e-4)


async def test_the_pace_of_a_batch_is_of_its_last_minute(pages: httpx.AsyncClient, house: House) -> None:
    batch_id = await house.submit(jsonl(line(n) for n in range(100)))
    await house.plan()
    history, now = History(house.redis), int(house.clock.now)
    for at in range(20):
        counts = Counts(completed=at, input_tokens=100 * at if at < 10 else 10 * at + 900)
        await history.note_batch(batch_id, now - 190 + 10 * at, counts)
    assert await history.paces([batch_id, "batch_x"], now) == {batch_id: 1.0}
    assert re.search(r"the last minute</dt><dd>\s*1\s*</dd>", (await pages.get(f"/batches/{batch_id}")).text)
    assert await history.paces([batch_id], now + 61) == {}


async def test_steps_of_a_worker_are_drawn_per_step(pages: httpx.AsyncClient, house: House) -> None:
    rank = {
        "series_every": 4,
        "series": [[8.0, 7.0, 4.0, 2.0, 9, 9], [4.0, 3.0, 2.0, 1.0, 9, 9], [1.0, 1.0, 1.0, 1.0, 1, 1]],
    }
    state = {"name": "w/1", "model": "m", "slices": 0, "requests": 0, "steps_per_second": 1.0, "engine": [rank]}
    await Heartbeat(house.redis).beat("w/1", state)
    path = re.search(r'data-points="/dashboard([^"]+)"', (await pages.get("/workers")).text)
    assert path
    assert (await pages.get(path[1])).json() == [[0, 1.0, 0.5, 2.0], [4, 0.5, 0.25, 1.0]]
    assert (await pages.get("/workers/nobody/steps.json")).json() == []
