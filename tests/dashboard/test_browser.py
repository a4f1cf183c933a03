"""The dashboard in a real browser: from upload to download, without a word in its console."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import ExitStack, asynccontextmanager

import pytest
from playwright.async_api import FilePayload, Page, Route, expect

from service.dashboard.views import TICK_S
from service.db.tables import DEFAULT_PROJECT
from service.db.tenant_tables import Role
from service.jobs.historian import Historian
from service.metrics.history import History
from service.settings import Settings
from service.tenants.keys import new_key
from tests.conftest import Clock
from tests.dashboard.browser import CHROMIUM, IN_CI, INSTALL, browser_page, faults_of_access
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import serve

pytestmark = pytest.mark.skipif(CHROMIUM is None and not IN_CI, reason=INSTALL)
PAGES = ("", "/batches", "/new", "/files", "/workers", "/online", "/projects", "/audit", "/settings")


@asynccontextmanager
async def jobs(harness: Harness, clock: Clock) -> AsyncGenerator[None, None]:
    """The planner role beside the block."""
    historian, stop = Historian(harness.database, harness.redis, clock), asyncio.Event()

    async def run() -> None:
        while not stop.is_set():
            await harness.plan()
            await harness.finalizer.run_once()
            await historian.run_once()
            await asyncio.sleep(0.05)

    running = asyncio.create_task(run())
    try:
        yield
    finally:
        stop.set()
        await running


async def upload(page: Page, lines: int, then: str = "Start the batch") -> None:
    await page.goto("/dashboard/new")
    data = jsonl(line(n) for n in range(lines))
    file = FilePayload(name="in.jsonl", mimeType="text/plain", buffer=data)
    await page.get_by_label("JSONL file").set_input_files(file)
    await expect(page.get_by_text(f"The first {lines} lines look right: test-model")).to_be_visible()
    await page.get_by_role("button", name=then).click()
    await page.wait_for_url("**/dashboard/batches/batch_*")


async def test_from_upload_to_download(page: Page, harness: Harness, clock: Clock) -> None:
    engine = ScriptedEngine(statuses={"request 3": [400]}, hold=asyncio.Event(), hold_after=10)
    async with jobs(harness, clock), harness.working(engine):
        await upload(page, 20)
        # Seen to move without a reload: the mark stays only in a document that is not loaded again.
        await page.evaluate("document.body.dataset.mark = 'same document'")
        await expect(page.get_by_text("Running, 10 of 20")).to_be_visible(timeout=60_000)
        assert engine.hold is not None
        engine.hold.set()
        await expect(page.locator(".headline .completed")).to_be_visible(timeout=60_000)
        assert await page.evaluate("document.body.dataset.mark") == "same document"
    async with page.expect_download() as download:
        await page.get_by_role("link", name="Download results", exact=True).click()
    lines = (await (await download.value).path()).read_text().splitlines()
    assert len({json.loads(each)["custom_id"] for each in lines}) == 19
    await page.get_by_role("button", name="Retry failed requests").click()
    async with jobs(harness, clock), harness.working(ScriptedEngine()):
        await expect(page.get_by_text("Completed in", exact=False)).to_be_visible(timeout=60_000)


@pytest.mark.slow
async def test_time_and_cost_are_shown_before_the_start(page: Page, harness: Harness, clock: Clock) -> None:
    async with jobs(harness, clock), harness.working(ScriptedEngine()):
        await upload(page, 20, then="Show time and cost first")
        await expect(page.get_by_text("of them shared")).to_be_visible(timeout=60_000)
        await expect(page.get_by_text("Held: it runs once you start it")).to_be_visible()
        await page.get_by_role("button", name="Start the batch").click()
        await expect(page.locator(".headline .completed")).to_be_visible(timeout=60_000)


async def test_a_project_is_made_and_limited(page: Page) -> None:
    await page.goto("/dashboard/projects")
    await page.get_by_label("New project").fill("evaluation")
    await page.get_by_role("button", name="Create project").click()
    await page.get_by_role("link", name="evaluation").click()
    await page.get_by_label("Maximum number of unfinished batches").fill("7")
    await page.get_by_role("button", name="Save").click()
    await expect(page.get_by_role("row", name="evaluation")).to_contain_text("7")


async def test_a_key_is_made_and_revoked(settings: Settings, clock: Clock, harness: Harness) -> None:
    text, row = new_key(DEFAULT_PROJECT, "ana", Role.OPERATOR, 0, None)
    async with harness.database.write() as session:
        session.add(row)
    with serve(settings.model_copy(update={"auth": "keys"}), clock) as url:
        async with browser_page(url) as (page, complaints):
            await page.goto("/dashboard/projects")
            await page.get_by_label("API key").fill(text)
            await page.get_by_role("button", name="Sign in").click()
            await make_and_revoke(page)
            assert complaints == []


async def make_and_revoke(page: Page) -> None:
    await page.get_by_label("Owner or purpose").fill("bob")
    await page.get_by_role("button", name="Create key").click()
    await expect(page.locator("pre")).to_contain_text("bw-")
    await page.get_by_role("link", name="Back to projects and keys").click()
    await page.get_by_role("button", name="Revoke bob").click()
    await expect(page.get_by_role("row", name="bob")).not_to_contain_text("Revoke")


@pytest.mark.slow
async def test_a_live_page_keeps_the_focus_and_what_is_marked(page: Page, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl([line(1)]))
    await page.goto("/dashboard/batches")
    await page.get_by_role("link", name="in.jsonl").focus()
    await page.evaluate("document.querySelector('#live').dataset.old = 'yes'")
    await expect(page.locator("#live[data-old]")).to_have_count(0, timeout=60_000)  # swapped
    await expect(page.get_by_role("link", name="in.jsonl")).to_be_focused()
    await page.evaluate("""() => {
      document.querySelector('#live').dataset.old = 'yes';
      getSelection().selectAllChildren(document.querySelector('#live tbody'));
    }""")
    await harness.submit(jsonl([line(1)]))
    await asyncio.sleep(2 * TICK_S)
    assert batch_id[:12] in await page.evaluate("getSelection().toString()")
    await expect(page.locator("#live[data-old]")).to_have_count(1)  # not swapped
    await page.evaluate("getSelection().empty()")
    await expect(page.locator("#live tbody tr")).to_have_count(2, timeout=60_000)


@pytest.mark.slow
async def test_a_page_that_nobody_looks_at_asks_for_nothing(page: Page, harness: Harness) -> None:
    await History(harness.redis).note({"at": int(harness.clock.now), "running": 1})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    await page.goto("/dashboard")
    await expect(page.locator("canvas").first).to_be_visible()
    async with page.expect_event("requestfailed", lambda request: request.url.endswith("/events"), timeout=60_000):
        await page.evaluate("""() => {
          Object.defineProperty(document, 'hidden', {get: () => true, configurable: true});
          document.dispatchEvent(new Event('visibilitychange'));
        }""")
    asked.clear()
    await harness.submit(jsonl([line(1)]))
    await asyncio.sleep(2 * TICK_S)
    assert asked == []
    await page.evaluate("delete document.hidden; document.dispatchEvent(new Event('visibilitychange'))")
    await expect(page.get_by_role("row", name="in.jsonl")).to_have_count(1, timeout=60_000)


@pytest.mark.slow
async def test_a_page_says_that_the_service_is_away(settings: Settings, clock: Clock) -> None:
    said = "The service is not responding"
    with ExitStack() as first:
        url = first.enter_context(serve(settings, clock))
        async with browser_page(url) as (page, _):
            await page.goto("/dashboard/batches")
            await expect(page.get_by_text("No batches match these filters")).to_be_visible()
            await expect(page.get_by_text(said)).to_be_hidden()
            first.close()
            await expect(page.get_by_text(said)).to_be_visible(timeout=60_000)
            with serve(settings, clock, int(url.rpartition(":")[2])):
                await expect(page.get_by_text(said)).to_be_hidden(timeout=60_000)


async def test_a_batch_is_cancelled(page: Page, harness: Harness, clock: Clock) -> None:
    async with jobs(harness, clock):
        await upload(page, 4)
        button = page.get_by_role("button", name="Cancel permanently")
        while not await button.is_visible():  # on a slow machine a click may fall between two states of the page
            await page.get_by_text("Cancel", exact=True).click()
            await asyncio.sleep(0.2)
        await asyncio.sleep(1.5 * TICK_S)  # what is open stays so
        await button.click()
        await expect(page.locator(".headline .cancelled")).to_be_visible(timeout=60_000)


async def test_signing_in(settings: Settings, clock: Clock, harness: Harness) -> None:
    text, row = new_key(DEFAULT_PROJECT, "ana", Role.ADMIN, 0, None)
    async with harness.database.write() as session:
        session.add(row)
    with serve(settings.model_copy(update={"auth": "keys"}), clock) as url:
        async with browser_page(url) as (page, _):
            await page.goto("/dashboard/batches")
            await page.get_by_label("API key").fill("bw-wrong")
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.get_by_role("alert")).to_contain_text("unknown, revoked or has expired")
            await page.get_by_label("API key").fill(text)
            await page.get_by_role("button", name="Sign in").click()
            await expect(page.get_by_role("heading", name="Batches")).to_be_visible()
            await page.get_by_role("button", name="Sign out").click()
            await expect(page.get_by_label("API key")).to_be_visible()


@pytest.mark.parametrize(("width", "theme"), [(390, "dark"), (1920, "light")])
@pytest.mark.slow
async def test_pages_can_be_used_by_everyone(url: str, harness: Harness, clock: Clock, width: int, theme: str) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(30)))
    await harness.plan()
    async with harness.working(ScriptedEngine(statuses={"request 3": [400]})):
        await harness.until_ended(batch_id)
    await harness.submit(jsonl(line(n) for n in range(30)))
    await harness.plan()
    await Historian(harness.database, harness.redis, clock).run_once()
    async with browser_page(url, width, theme) as (page, complaints):
        tabs = ("", "/requests", "/errors", "/schedule", "/files")
        for path in (
            *PAGES,
            *(f"/batches/{batch_id}{tab}" for tab in tabs),
            *(f"/batches/{batch_id}/request?custom_id=id-{each}" for each in (3, 4)),
        ):
            await page.goto(f"/dashboard{path}")
            assert await faults_of_access(page) == [], path
            overflow = await page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert overflow <= 0, f"{path} is {overflow} px too wide"
        assert complaints == []


async def test_a_wrong_file_is_told_before_it_is_sent(page: Page) -> None:
    sent: list[str] = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else None)
    await page.goto("/dashboard/new")
    wrong = jsonl([line(1), line(1), line(2, body={"model": "gpt-9"})]) + b"{oops\n"
    chosen = page.get_by_label("JSONL file")
    await chosen.set_input_files(FilePayload(name="in.jsonl", mimeType="text/plain", buffer=wrong))
    for said in ("Line 4 is not JSON: {oops", "A custom_id comes twice", "several models: test-model, gpt-9"):
        await expect(page.get_by_text(said)).to_be_visible()
    await chosen.set_input_files(FilePayload(name="in.jsonl", mimeType="text/plain", buffer=b""))
    await expect(page.get_by_text("The file has no request.")).to_be_visible()
    await expect(page.get_by_text("A custom_id comes twice")).to_be_hidden()
    for odd, said in (
        (line(1, body=["abc"]), "The body of line 1 is no object."),
        (line(1, url="constructor"), "The endpoint constructor does not exist here."),
        (line(1, url=["/v1/completions"]), "The endpoint /v1/completions does not exist here."),
        (line(1, body="abc"), "The body of line 1 is no object."),
    ):
        await chosen.set_input_files(FilePayload(name="in.jsonl", mimeType="text/plain", buffer=jsonl([odd])))
        await expect(page.get_by_text(said)).to_be_visible()
    misspelt = jsonl([line(1, body={**line(1)["body"], "maxtokens": 5, "regex": "a"})])  # the service refuses the other
    await chosen.set_input_files(FilePayload(name="in.jsonl", mimeType="text/plain", buffer=misspelt))
    await expect(page.get_by_text("No engine knows the parameter")).to_have_count(1)
    await expect(page.get_by_text("No engine knows the parameter maxtokens, so it is ignored.")).to_be_visible()
    assert sent == []


async def test_a_file_is_dropped_and_named(page: Page, harness: Harness) -> None:
    await page.goto("/dashboard/new")
    data = json.dumps(jsonl([line(1, url="/v1/completions", body={"model": "test-model", "prompt": "a"})]).decode())
    await page.evaluate(f"""() => {{
      const dropped = new DataTransfer();
      dropped.items.add(new File([{data}], 'poems.jsonl'));
      document.querySelector('.drop').dispatchEvent(new DragEvent('drop', {{dataTransfer: dropped, bubbles: true}}));
    }}""")
    await expect(page.get_by_text("The first line looks right")).to_be_visible()
    await expect(page.get_by_label("Endpoint")).to_have_value("/v1/completions")  # as its first line says
    await page.get_by_label("Metadata").fill("team: evals")
    await page.get_by_role("button", name="Start the batch").click()
    await expect(page.get_by_role("heading", level=1)).to_have_text("poems.jsonl")
    batch = await harness.batch(page.url.rpartition("/")[2])
    assert (batch.endpoint, batch.custom_metadata) == ("/v1/completions", {"team": "evals"})


async def test_filters_apply_as_they_change_and_stay_in_the_address(page: Page, harness: Harness) -> None:
    await harness.submit(jsonl([line(1)]))
    await page.goto("/dashboard/batches?state=waiting")
    await page.get_by_label("Model").select_option("test-model")
    await page.wait_for_url("**/dashboard/batches?state=waiting&model=test-model")
    await expect(page.get_by_label("Model")).to_have_value("test-model")


async def test_a_theme_is_chosen_by_hand_and_kept(page: Page) -> None:
    await page.goto("/dashboard")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = await page.evaluate(ground)
    await page.get_by_role("button", name="Theme: auto").click()
    await page.get_by_role("button", name="Theme: light").click()
    assert await page.evaluate(ground) != light
    await page.goto("/dashboard/batches")
    await expect(page.get_by_role("button", name="Theme: dark")).to_be_visible()
    assert await page.evaluate(ground) != light


@pytest.mark.slow
async def test_the_picture_of_the_schedule_moves_and_says_what_is_shared(
    page: Page, harness: Harness, clock: Clock
) -> None:
    engine = ScriptedEngine(hold=asyncio.Event(), hold_after=10)
    batch_id = await harness.submit(jsonl(line(n) for n in range(30)))
    await page.goto(f"/dashboard/batches/{batch_id}/schedule")
    await expect(page.get_by_text("The batch is not planned yet")).to_be_visible()
    await harness.plan()
    await expect(page.locator(".tree")).to_be_visible(timeout=60_000)
    await page.locator(".tree rect[data-text]").first.hover()
    await expect(page.locator(".read")).to_contain_text("30 requests share tokens 0 to")
    await expect(page.locator(".read q")).not_to_be_empty()
    assert float(await page.locator(".tree .left").get_attribute("width") or 1) == 0
    await page.evaluate("document.body.dataset.mark = 'same document'")
    async with jobs(harness, clock), harness.working(engine):
        await expect(page.locator(".begun")).not_to_have_text("0", timeout=60_000)
        assert float(await page.locator(".tree .left").get_attribute("width") or 0) > 0
        assert await page.evaluate("document.body.dataset.mark") == "same document"
        assert engine.hold is not None
        engine.hold.set()
        await harness.until_ended(batch_id)


@pytest.mark.slow
async def test_pages_can_be_read_without_scripts(url: str, harness: Harness) -> None:
    await harness.submit(jsonl(line(n) for n in range(30)))
    await harness.plan()
    async with browser_page(url, scripts=False) as (page, _):
        await page.goto("/dashboard")
        await page.get_by_role("region", name="Batches").get_by_role("link", name="in.jsonl").click()
        await expect(page.get_by_role("img", name="0 of 30 answered")).to_be_visible()


@pytest.mark.slow
async def test_what_is_typed_outlasts_the_ticks(page: Page, harness: Harness) -> None:
    short = line(1, body={**line(1)["body"], "max_tokens": 1})
    batch_id = await harness.submit(jsonl([short]))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await harness.until_ended(batch_id)
    await page.goto(f"/dashboard/batches/{batch_id}")
    await page.get_by_text("Retry 1 cut off").click()
    limit = page.get_by_label("max_tokens")
    await limit.fill("77")
    await limit.blur()
    await asyncio.sleep(2 * TICK_S + 1)
    await expect(limit).to_have_value("77")
    await page.get_by_role("button", name="Answer again").click()
    await expect(page.get_by_text("max_tokens 77")).to_be_visible()


@pytest.mark.slow
async def test_what_is_typed_outlasts_a_tick_that_was_under_way(page: Page, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl([line(1, body={**line(1)["body"], "max_tokens": 1})]))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await harness.until_ended(batch_id)
    await page.goto(f"/dashboard/batches/{batch_id}")
    await page.get_by_text("Retry 1 cut off").click()
    asked, typed = asyncio.Event(), asyncio.Event()

    async def late(route: Route) -> None:
        asked.set()
        await typed.wait()
        await route.continue_()

    await page.route(f"**/dashboard/batches/{batch_id}", late)
    await asyncio.wait_for(asked.wait(), 60)
    await page.get_by_label("max_tokens").fill("77")
    async with page.expect_response(f"**/dashboard/batches/{batch_id}") as response:
        typed.set()
    await (await response.value).finished()
    await asyncio.sleep(0.5)  # in which it would be swapped in
    await expect(page.get_by_label("max_tokens")).to_have_value("77")


@pytest.mark.slow
async def test_the_keyboard_walks_from_request_to_request(page: Page, harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(5)))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        await harness.until_ended(batch_id)
    await page.goto(f"/dashboard/batches/{batch_id}/requests")
    links = page.locator("td a.name")
    names = [await link.inner_text() for link in await links.all()]
    await links.first.click()
    for name in names:
        await expect(page.get_by_role("heading", name=name, exact=True)).to_be_visible()
        await page.keyboard.press("j")
    await page.keyboard.press("k")
    await expect(page.get_by_role("heading", name=names[-2], exact=True)).to_be_visible()
