"""The dashboard's pages and forms over HTTP, without a browser; tests/dashboard looks at them in one."""

import json
import re
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from engine_ext.coserve.slo import SloClass
from engine_ext.plugin.scheduler.served import ServedClass
from service.dashboard import batch_pages, views
from service.db.tables import Batch, BatchStatus
from service.jobs import planner
from service.objects.storage import file_key
from service.queue.progress import Heartbeat
from tests.conftest import Clock
from tests.integration.browsing import PAGES
from tests.integration.harness import Harness, ScriptedEngine, completed_are, jsonl, line, set_status
from tests.waiting import until


@pytest.mark.parametrize("page", PAGES)
async def test_pages_show_an_empty_service_and_let_nothing_else_in(pages: httpx.AsyncClient, page: str) -> None:
    answer = await pages.get(page)
    assert answer.status_code == 200
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"<script>|style=|\son\w+=|https?://(?!www\.w3\.org)", answer.text)


async def test_a_file_is_uploaded_run_looked_at_and_retried(pages: httpx.AsyncClient, harness: Harness) -> None:
    data = jsonl(line(n) for n in range(20))
    upload = await pages.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})
    assert "in.jsonl" in upload.text
    file_id = upload.url.params["file"]
    form = {"file": file_id, "endpoint": "/v1/chat/completions", "window": "24h", "order": "any"}
    given = {**form, "window": "6h", "order": "input", "name": "Labels <1>", "metadata": "team"}
    refused = await pages.post("/batches", data=given)
    assert (refused.status_code, "write &#39;team&#39; as key: value" in refused.text) == (400, True)
    kept = ('"6h" selected', '"input" selected', 'value="Labels &lt;1&gt;"', ">team</textarea>", "in.jsonl", file_id)
    assert [each for each in kept if each not in refused.text] == []
    assert 'aria-invalid="true" aria-describedby="problem">team</textarea>' in refused.text
    refused = await pages.post("/batches", data={**form, "metadata": f"{'k' * 65}: v"})
    assert "Metadata: " in refused.text
    refused = await pages.post("/batches", data={**given, "file": "file-gone"})
    assert (refused.status_code, ">team</textarea>" in refused.text) == (400, True)
    form |= {"name": "Labels, November", "metadata": "team: evals\n\nrun: 7: b"}
    created = await pages.post("/batches", data=form)
    batch_id = created.url.path.rsplit("/", 1)[1]
    assert "Checking the file before anything runs" in created.text
    assert re.search(r"<h1[^>]*>Labels, November</h1>", created.text)
    assert (await harness.batch(batch_id)).custom_metadata == {
        "name": "Labels, November",
        "team": "evals",
        "run": "7: b",
    }
    await harness.plan()
    async with harness.working(ScriptedEngine(statuses={"request 3": [400]})):
        await until(lambda: completed_are(harness, batch_id, 19))
        harness.clock.now += 5  # what is readable early is looked for every few seconds
        running = (await pages.get(f"/batches/{batch_id}")).text
        assert "20 of 20" in running
        schedule = (await pages.get(f"/batches/{batch_id}/schedule")).text
        assert 'class="tree"' in schedule
        assert re.search(r'data-text="[^"]*request', schedule)  # what is shared, in words
        assert 'data-begun="3"' in schedule
        assert "/request?custom_id=id-7" in (await pages.get(f"/batches/{batch_id}/requests")).text
        await harness.until_ended(batch_id)
    assert re.search(r"Completed in .*: 19 answers, 1 failed", (await pages.get(f"/batches/{batch_id}")).text)
    kept = (await pages.get(f"/batches/{batch_id}/schedule")).text
    assert kept.count('<rect class="done"') == 3
    assert "<b>worker-a</b>: 20 requests in slices that are done" in kept
    assert 'class="tree"' in kept  # after its end too
    assert "id-3" in (await pages.get(f"/batches/{batch_id}/errors")).text  # in the digest of failures
    files = (await pages.get(f"/batches/{batch_id}/files")).text
    assert [files.count(f'data-label="What">{each}<') for each in ("Input", "Results", "Errors")] == [1, 1, 1]
    search = (await pages.get(f"/batches/{batch_id}/requests", params={"text": "id-1"})).text
    assert search.count(">id-1") == 11  # 1, 10 to 19
    one = (await pages.get(f"/batches/{batch_id}/request", params={"custom_id": "id-7"})).text
    assert one.count("<p>request 7</p>") == 2  # asked, and echoed
    assert (await pages.get(f"/batches/{batch_id}/request", params={"custom_id": "nobody"})).status_code == 200
    assert batch_id in (await pages.get("/batches", params={"state": "completed", "text": batch_id[:12]})).text
    assert batch_id in (await pages.get("/batches", params={"text": "IN.jsonl"})).text  # its file's name
    assert batch_id not in (await pages.get("/batches", params={"state": "failed"})).text
    retried = await pages.post(f"/batches/{batch_id}/retry")
    assert retried.url.path != f"/dashboard/batches/{batch_id}"
    assert "cancelling" in (await pages.post(f"{retried.url.path.removeprefix('/dashboard')}/cancel")).text


async def test_errors_of_a_file_are_shown_by_line(pages: httpx.AsyncClient, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl([line(1), line(1, url="/v1/nowhere"), line(1)]))
    await harness.plan()
    assert "Failed: the file has 3 errors, and nothing ran" in (await pages.get(f"/batches/{batch_id}")).text
    text = (await pages.get(f"/batches/{batch_id}/errors")).text
    assert re.findall(r'data-label="Line">(\d+)<', text) == ["2", "2", "3"]  # a wrong endpoint, and not the batch's
    assert "/v1/nowhere" in text  # the text of the line
    assert re.search(r"<b class=\"nums\">2</b> <code>duplicate_custom_id</code>", text)
    told = (await pages.get(f"/batches/{batch_id}/errors.jsonl")).text.splitlines()
    assert [json.loads(each)["line"] for each in told] == [2, 2, 3]


async def test_lines_with_errors_are_found_behind_blank_ones(pages: httpx.AsyncClient, harness: Harness) -> None:
    data = jsonl([line(1)]) + b"\n\n" + b'{"custom_id": "four"}\n' + b"not JSON"
    batch_id = await harness.submit(data)
    await harness.plan()
    text = (await pages.get(f"/batches/{batch_id}/errors")).text
    assert re.findall(r'data-label="Line">(\d+)<', text)[-1] == "5"
    assert "{&#34;custom_id&#34;: &#34;four&#34;}" in text
    assert "<code>not JSON</code>" in text


async def test_workers_are_filtered(pages: httpx.AsyncClient, harness: Harness) -> None:
    for name, slices in (("worker-a", 2), ("worker-b", 0)):
        state = {"name": name, "model": "m", "slices": slices, "requests": 0}
        await Heartbeat(harness.redis).beat(name, state)
    assert 'name">worker-a<' in (await pages.get("/workers?state=working&model=m")).text
    assert 'name">worker-b<' not in (await pages.get("/workers?state=working")).text
    assert 'name">worker-a<' not in (await pages.get("/workers?state=idle")).text
    assert 'name">worker-a<' not in (await pages.get("/workers?model=other")).text
    assert "No workers match these filters" in (await pages.get("/workers?state=draining")).text


async def test_online_requests_are_shown_against_their_bounds(pages: httpx.AsyncClient, harness: Harness) -> None:
    assert "No worker that is alive takes online requests" in (await pages.get("/online")).text
    state = {"name": "w", "model": "m", "slices": 0, "requests": 0, "online": "http://10.0.0.1:1", "online_requests": 3}
    await Heartbeat(harness.redis).beat("w", state)
    assert "None has ended yet" in (await pages.get("/online")).text
    found = ServedClass()
    for ttft_s in (0.1, 0.2, 3.0):
        found.note(ttft_s, 0.02, ttft_s > 1)
    classes = [found.report(SloClass("default", ttft_s=1.0)), found.report(SloClass("<b>flex"))]
    rank = {"online_classes": classes, "online_s": 4.0, "batches_excess_s": 1.0, "kv_capacity": 100, "online_kv": 25}
    await Heartbeat(harness.redis).beat("w", {**state, "engine": [rank], "online_seconds_per_second": 0.4})
    text = re.sub(r"<[^>]*>", "", (await pages.get("/online")).text)
    for shown in ("200 ms of 1,000 ms", "20 ms", "66.7%", "25.0%", "40.0%", "&lt;b&gt;flex"):
        assert shown in text


async def test_what_is_shown_is_escaped(pages: httpx.AsyncClient, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl([line(1, custom_id="<script>alert(1)</script>")]))
    await harness.plan()
    async with harness.working(ScriptedEngine(statuses={"request 1": [400]})):
        await harness.until_ended(batch_id)
    for path in (f"/batches/{batch_id}", f"/batches/{batch_id}/request?custom_id=<script>", "/batches?text=<script>"):
        text = (await pages.get(path)).text
        assert "<script>" not in text
    assert "&lt;script&gt;alert(1)" in (await pages.get(f"/batches/{batch_id}/requests?kind=failed")).text


async def test_parameters_that_no_engine_knows_are_named(pages: httpx.AsyncClient, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl([line(1, body={**line(1)["body"], "maxtokens": 5, "<b>": 1})]))
    await harness.plan()
    text = (await pages.get(f"/batches/{batch_id}")).text
    assert "1 request has the parameter <code>maxtokens</code>, which is ignored" in text
    assert "Is <code>max_tokens</code> meant?" in text
    assert "<code>&lt;b&gt;</code>" in text


async def test_files_are_added_up_to_a_bound(pages: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "MOST_SUMMED", 3)
    for number, said in (
        (1, "1 file, 4 bytes in all"),
        (2, "2 files, 8 bytes in all"),
        (3, "Of the newest 3 files 3 are kept, 12 bytes"),
    ):
        await pages.post("/files", data={"purpose": "batch"}, files={"file": (f"{number}.jsonl", b"abc\n")})
        assert said in (await pages.get("/files")).text


@pytest.mark.parametrize("data", [b"{" * 1_000_000, b"x" * 5_000_000, b"7\n", b'{"url": 7}\n', b"\xff\n"])
async def test_files_that_are_none_are_no_fault_of_ours(pages: httpx.AsyncClient, data: bytes) -> None:
    shown = await pages.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})
    assert (shown.status_code, "Start the batch" in shown.text) == (200, True)
    form = {"file": shown.url.params["file"], "endpoint": "/v1/completions", "window": "24h"}
    batch = await pages.post("/batches", data=form)
    assert (await pages.get(f"{batch.url.path.removeprefix('/dashboard')}/request?custom_id=a")).status_code == 200


async def test_a_line_without_a_name_is_shown(pages: httpx.AsyncClient, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(3)))
    await harness.plan()
    await harness.storage.delete(file_key((await harness.batch(batch_id)).input_file_id))  # behind our back
    await set_status(harness, batch_id, BatchStatus.CANCELLING)
    await harness.until_ended(batch_id)
    shown = await pages.get(f"/batches/{batch_id}/requests?kind=failed")
    assert (shown.status_code, shown.text.count("batch_cancelled")) == (200, 3)
    assert "0 of 3" in shown.text
    assert "3 not run" in shown.text
    assert "failed</b>" not in shown.text


async def test_a_tokenizer_that_fails_stops_no_plan(
    pages: httpx.AsyncClient, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(source: str) -> None:
        raise OSError(f"{source} is gone")

    batch_id = await harness.submit(jsonl(line(n) for n in range(20)))
    monkeypatch.setattr(planner, "prompt_tokens", broken)
    monkeypatch.setattr(planner, "_without_texts", set[str]())
    await harness.plan()
    shown = (await pages.get(f"/batches/{batch_id}/schedule")).text
    assert 'data-text=""' in shown
    assert not re.search(r'data-text="[^"]', shown)


async def test_a_live_refresh_reads_no_results(
    pages: httpx.AsyncClient, harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_id = await harness.submit(jsonl([line(1), line(1)]))
    await harness.plan()

    def reads(*_: Any, **__: Any) -> None:
        raise AssertionError("a part of the page that is replaced every two seconds reads a file")

    for name in ("search", "lines_of", "_files_of", "boxes_of"):
        monkeypatch.setattr(batch_pages, name, reads)
    for tab in ("requests", "errors", "files", "schedule"):
        answer = await pages.get(f"/batches/{batch_id}/{tab}", headers={"HX-Request": "true"})
        assert (answer.status_code, "Failed: the file has" in answer.text) == (200, True)


async def test_batches_are_filtered(pages: httpx.AsyncClient, harness: Harness, clock: Clock) -> None:
    clock.now = 1_700_000_000.0  # 2023-11-14, 22:13 UTC
    early = await harness.submit(jsonl([line(1)]))
    async with harness.database.write() as session:
        await session.execute(
            update(Batch).where(Batch.id == early).values(custom_metadata={"run": "twelve", "Größe": "ß"})
        )
    clock.now += 7200
    late = await harness.submit(jsonl([line(1)]))
    await harness.plan()

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
    assert await shown(model="test-model", state="waiting") == {early, late}
    assert await shown(state="running") == set()
    assert await shown(state="failed") == set()
    assert await shown(until="9999-12-31") == {early, late}
    for wrong in ({"since": "yesterday"}, {"text": "\0"}, {"model": "\0"}, {"project": "\0"}):
        assert (await pages.get("/batches", params=wrong)).status_code == 400
    for path in ("/projects/%00", "/keys/%00/revoke"):
        assert (await pages.post(path, data={"weight": 1})).status_code == 400


async def test_a_plan_is_shown_before_the_start(pages: httpx.AsyncClient, harness: Harness) -> None:
    data = jsonl(line(n) for n in range(20))
    upload = await pages.post("/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", data)})
    form = {"file": upload.url.params["file"], "endpoint": "/v1/chat/completions", "window": "24h", "hold": "true"}
    created = await pages.post("/batches", data=form)
    path = created.url.path.removeprefix("/dashboard")
    assert "planning the batch" in created.text
    await harness.plan()
    held = (await pages.get(path)).text
    assert "% of them shared" in held
    assert "Held: it runs once you start it" in held
    assert re.search(r"Held until started</dt><dd>1<", overview := (await pages.get("")).text)
    assert path not in overview  # among those that run, and come next
    started = await pages.post(f"{path}/start")
    assert "Before it starts" not in started.text
    await harness.plan()
    assert "3 slices in the order of the plan" in (await pages.get(f"{path}/schedule")).text


async def test_steps_of_a_worker_are_drawn_per_step(pages: httpx.AsyncClient, harness: Harness) -> None:
    rank = {
        "series_every": 4,
        "series": [[8.0, 7.0, 4.0, 2.0, 9, 9], [4.0, 3.0, 2.0, 1.0, 9, 9], [1.0, 1.0, 1.0, 1.0, 1, 1]],
    }
    state = {"name": "w/1", "model": "m", "slices": 0, "requests": 0, "steps_per_second": 1.0, "engine": [rank]}
    await Heartbeat(harness.redis).beat("w/1", state)
    path = re.search(r'data-points="/dashboard([^"]+)"', (await pages.get("/workers")).text)
    assert path
    assert (await pages.get(path[1])).json()["points"] == [[0, 1000.0, 500.0, 2000.0], [4, 500.0, 250.0, 1000.0]]
    assert (await pages.get("/workers/nobody/steps.json")).json() == {"points": []}


async def test_the_root_leads_to_the_dashboard(pages: httpx.AsyncClient, harness: Harness) -> None:
    root = str(pages.base_url).removesuffix("dashboard/").removesuffix("/dashboard")
    answer = await pages.get(f"{root.rstrip('/')}/", follow_redirects=False)
    assert (answer.status_code, answer.headers["location"]) == (307, "/dashboard")
