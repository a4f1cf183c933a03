"""Batches for LoRA adapters: they run on the workers of their base model, in windows of their own."""

import pytest
from sqlalchemy import delete, select

from service.db.models import register_model
from service.db.tables import BatchStatus, Model, SliceBatch, Window
from service.endpoints import ModelName
from service.objects.plan_artifact import PlanArtifact
from service.queue.announcements import Announcements
from service.queue.leases import Leases
from service.queue.progress import Heartbeat
from tests.batches import CHAT
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.online_harness import ADAPTER, OnlineHarness, ScriptedOnlineEngine, asked


def asking(model: str) -> bytes:
    lines = [line(n) for n in range(12)]
    return jsonl({**each, "body": {**each["body"], "model": model}} for each in lines)


async def windows(harness: Harness) -> list[tuple[str, list[str]]]:
    """The model and the batches of each window."""
    async with harness.database.read() as session:
        plan_ids = (await session.scalars(select(Window.plan_id).order_by(Window.id))).all()
    headers = [await PlanArtifact(harness.storage, each).header() for each in plan_ids]
    return [(each.model, each.batches) for each in headers]


async def names(harness: Harness) -> list[str]:
    async with harness.database.read() as session:
        return list((await session.scalars(select(Model.name).order_by(Model.name))).all())


async def with_adapters(harness: Harness, *adapters: str) -> None:
    """As a worker with these adapters does when it starts."""
    changes = {"adapters": {each: "x" for each in adapters}, "model": str(harness.settings.data_dir / "no-model")}
    settings = harness.settings.model_validate({**harness.settings.model_dump(), **changes})
    await register_model(harness.database, settings, None, [CHAT, "/v1/responses"])


@pytest.fixture
async def adapters(harness: Harness) -> None:
    """Two of the model."""
    async with harness.database.write() as session:
        source = (await session.scalars(select(Model.source))).one()
        session.add_all(Model(name=f"test-model:{each}", source=source, created_at=0) for each in ("sql", "poem"))


@pytest.mark.usefixtures("adapters")
async def test_adapters_share_workers_but_no_window(harness: Harness) -> None:
    asked = ["test-model", "test-model:sql", "test-model:poem", "test-model:sql"]
    base, sql, poem, again = ids = [await harness.submit(asking(each)) for each in asked]
    await harness.plan()
    assert sorted(await windows(harness)) == sorted(
        [("test-model", [base]), ("test-model", [poem]), ("test-model", [sql, again])]
    )
    harness.settings = harness.settings.model_copy(update={"adapters": {"sql": "x", "poem": "y"}})
    async with harness.working(ScriptedEngine()):
        batches = await harness.until_ended(*ids)
    assert [str(ModelName(each.model or "", each.adapter)) for each in batches] == asked
    assert [len((await harness.results(each))[0]) for each in batches] == [12] * 4


@pytest.mark.usefixtures("adapters")
async def test_a_worker_that_lacks_an_adapter_leaves_its_requests_to_others(harness: Harness) -> None:
    """Its engine would fail them for good. They hold up nobody: not even the slices that come after them."""
    poem = await harness.submit(asking("test-model:poem"), window_s=7200)
    base, sql = [await harness.submit(asking(each)) for each in ("test-model", "test-model:sql")]
    await harness.plan()
    harness.settings = harness.settings.model_copy(update={"adapters": {"sql": "x"}})
    async with harness.working(ScriptedEngine(), "worker-b"):
        await harness.until_ended(base, sql)
        waiting = Announcements(harness.redis, "test-model", ["sql"])
        assert (await waiting.head(), await waiting.waiting()) == (None, 0)
    assert await Announcements(harness.redis, "test-model", ["poem"]).waiting() == 12
    async with harness.database.read() as session:
        theirs = (await session.scalars(select(SliceBatch.slice_id).where(SliceBatch.batch_id == poem))).all()
    leases = Leases(harness.database, "w", "test-model", 30, ["sql"])
    assert [await leases.claim(each) for each in theirs] == [None] * len(theirs)  # by an old announcement
    harness.settings = harness.settings.model_copy(update={"adapters": {"poem": "x"}})
    async with harness.working(ScriptedEngine(), "worker-c"):
        [ended] = await harness.until_ended(poem)
    assert ended.completed == 12


@pytest.mark.usefixtures("adapters")
async def test_what_nobody_can_run_is_not_announced(harness: Harness) -> None:
    poem = await harness.submit(asking("test-model:poem"))
    await harness.plan()
    announced = Announcements(harness.redis, "test-model", ["poem"])
    assert await announced.head() is not None
    async with harness.database.write() as session:
        await session.execute(delete(Model).where(Model.name == "test-model:poem"))
    await harness.reconciler.run_once()
    assert await announced.head() is None
    assert (await harness.batch(poem)).status == BatchStatus.IN_PROGRESS


async def test_the_worker_that_started_last_says_which_adapters_there_are(harness: Harness) -> None:
    await with_adapters(harness, "sql", "poem")
    assert await names(harness) == ["test-model", "test-model:poem", "test-model:sql"]
    await register_model(harness.database, harness.settings, None, knows_adapters=False)  # a planner's
    assert await names(harness) == ["test-model", "test-model:poem", "test-model:sql"]
    async with harness.database.write() as session:
        session.add(Model(name="Test-Model:other", source="x", created_at=0))  # not this model's
    await with_adapters(harness, "poem")
    assert await names(harness) == ["Test-Model:other", "test-model", "test-model:poem"]
    async with harness.database.read() as session:
        told = {each.name: each.endpoints for each in (await session.scalars(select(Model))).all()}
    assert told["test-model"] == [CHAT, "/v1/responses"]
    assert told["test-model:poem"] == [CHAT], "SGLang applies no adapter to responses"
    batch_id = await harness.submit(asking("test-model:sql"))
    await harness.plan()
    batch = await harness.batch(batch_id)
    assert (batch.status, [each["code"] for each in batch.errors or []]) == (BatchStatus.FAILED, ["model_not_found"])


async def test_a_batch_for_a_model_that_nobody_serves_waits_or_is_refused(harness: Harness) -> None:
    harness.settings = harness.settings.model_copy(update={"unserved": "refuse"})
    refused = await harness.submit(asking("test-model"))
    await harness.plan()
    batch = await harness.batch(refused)
    assert [(each["code"], each["line"]) for each in batch.errors or []] == [("model_not_served", 1)]
    await Heartbeat(harness.redis).beat("w", {"name": "w", "model": "test-model", "models": ["test-model"]})
    taken = await harness.submit(asking("test-model"))
    await harness.plan()
    harness.settings = harness.settings.model_copy(update={"unserved": "wait"})
    await Heartbeat(harness.redis).leave("w")
    waits = await harness.submit(asking("test-model"))
    await harness.plan()
    assert [(await harness.batch(each)).status for each in (taken, waits)] == [BatchStatus.IN_PROGRESS] * 2


async def test_an_adapter_is_asked_for_by_its_name(online: OnlineHarness) -> None:
    engine = ScriptedOnlineEngine()
    async with online.door("w", engine):
        assert (await online.post({**asked(), "model": ADAPTER})).status_code == 404
        async with online.harness.database.write() as session:
            session.add(Model(name=ADAPTER, source="x", created_at=0))
        assert (await online.post({**asked(), "model": ADAPTER})).status_code == 200
    assert len(engine.asked) == 1
