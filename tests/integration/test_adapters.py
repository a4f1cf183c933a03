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
from tests.integration.house import House, ScriptedEngine, jsonl, line
from tests.integration.shop import ADAPTER, Shop, Teller, asked


def asking(model: str) -> bytes:
    lines = [line(n) for n in range(12)]
    return jsonl({**each, "body": {**each["body"], "model": model}} for each in lines)


async def windows(house: House) -> list[tuple[str, list[str]]]:
    """The model and the batches of each window."""
    async with house.database.read() as session:
        plan_ids = (await session.scalars(select(Window.plan_id).order_by(Window.id))).all()
    headers = [await PlanArtifact(house.storage, each).header() for each in plan_ids]
    return [(each.model, each.batches) for each in headers]


async def names(house: House) -> list[str]:
    async with house.database.read() as session:
        return list((await session.scalars(select(Model.name).order_by(Model.name))).all())


async def with_adapters(house: House, *adapters: str) -> None:
    """As a worker with these adapters does when it starts."""
    changes = {"adapters": {each: "x" for each in adapters}, "model": str(house.settings.data_dir / "no-model")}
    settings = house.settings.model_validate({**house.settings.model_dump(), **changes})
    await register_model(house.database, settings, None, [CHAT, "/v1/responses"])


@pytest.fixture
async def adapters(house: House) -> None:
    """Two of the model."""
    async with house.database.write() as session:
        source = (await session.scalars(select(Model.source))).one()
        session.add_all(Model(name=f"test-model:{each}", source=source, created_at=0) for each in ("sql", "poem"))


@pytest.mark.usefixtures("adapters")
async def test_adapters_share_workers_but_no_window(house: House) -> None:
    asked = ["test-model", "test-model:sql", "test-model:poem", "test-model:sql"]
    base, sql, poem, again = ids = [await house.submit(asking(each)) for each in asked]
    await house.plan()
    assert sorted(await windows(house)) == sorted(
        [("test-model", [base]), ("test-model", [poem]), ("test-model", [sql, again])]
    )
    house.settings = house.settings.model_copy(update={"adapters": {"sql": "x", "poem": "y"}})
    async with house.working(ScriptedEngine()):
        batches = await house.until_ended(*ids)
    assert [str(ModelName(each.model or "", each.adapter)) for each in batches] == asked
    assert [len((await house.results(each))[0]) for each in batches] == [12] * 4


@pytest.mark.usefixtures("adapters")
async def test_a_worker_that_lacks_an_adapter_leaves_its_requests_to_others(house: House) -> None:
    """Its engine would fail them for good. They hold up nobody: not even the slices that come after them."""
    poem = await house.submit(asking("test-model:poem"), window_s=7200)
    base, sql = [await house.submit(asking(each)) for each in ("test-model", "test-model:sql")]
    await house.plan()
    house.settings = house.settings.model_copy(update={"adapters": {"sql": "x"}})
    async with house.working(ScriptedEngine(), "worker-b"):
        await house.until_ended(base, sql)
        waiting = Announcements(house.redis, "test-model", ["sql"])
        assert (await waiting.head(), await waiting.waiting()) == (None, 0)
    assert await Announcements(house.redis, "test-model", ["poem"]).waiting() == 12
    async with house.database.read() as session:
        theirs = (await session.scalars(select(SliceBatch.slice_id).where(SliceBatch.batch_id == poem))).all()
    leases = Leases(house.database, "w", "test-model", 30, ["sql"])
    assert [await leases.claim(each) for each in theirs] == [None] * len(theirs)  # by an old announcement
    house.settings = house.settings.model_copy(update={"adapters": {"poem": "x"}})
    async with house.working(ScriptedEngine(), "worker-c"):
        [ended] = await house.until_ended(poem)
    assert ended.completed == 12


@pytest.mark.usefixtures("adapters")
async def test_what_nobody_can_run_is_not_announced(house: House) -> None:
    poem = await house.submit(asking("test-model:poem"))
    await house.plan()
    announced = Announcements(house.redis, "test-model", ["poem"])
    assert await announced.head() is not None
    async with house.database.write() as session:
        await session.execute(delete(Model).where(Model.name == "test-model:poem"))
    await house.reconciler.run_once()
    assert await announced.head() is None
    assert (await house.batch(poem)).status == BatchStatus.IN_PROGRESS


async def test_the_worker_that_started_last_says_which_adapters_there_are(house: House) -> None:
    await with_adapters(house, "sql", "poem")
    assert await names(house) == ["test-model", "test-model:poem", "test-model:sql"]
    await register_model(house.database, house.settings, None, knows_adapters=False)  # a planner's
    assert await names(house) == ["test-model", "test-model:poem", "test-model:sql"]
    async with house.database.write() as session:
        session.add(Model(name="Test-Model:other", source="x", created_at=0))  # not this model's
    await with_adapters(house, "poem")
    assert await names(house) == ["Test-Model:other", "test-model", "test-model:poem"]
    async with house.database.read() as session:
        told = {each.name: each.endpoints for each in (await session.scalars(select(Model))).all()}
    assert told["test-model"] == [CHAT, "/v1/responses"]
    assert told["test-model:poem"] == [CHAT], "SGLang applies no adapter to responses"
    batch_id = await house.submit(asking("test-model:sql"))
    await house.plan()
    batch = await house.batch(batch_id)
    assert (batch.status, [each["code"] for each in batch.errors or []]) == (BatchStatus.FAILED, ["model_not_found"])


async def test_a_batch_for_a_model_that_nobody_serves_waits_or_is_refused(house: House) -> None:
    house.settings = house.settings.model_copy(update={"unserved": "refuse"})
    refused = await house.submit(asking("test-model"))
    await house.plan()
    batch = await house.batch(refused)
    assert [(each["code"], each["line"]) for each in batch.errors or []] == [("model_not_served", 1)]
    await Heartbeat(house.redis).beat("w", {"name": "w", "model": "test-model", "models": ["test-model"]})
    taken = await house.submit(asking("test-model"))
    await house.plan()
    house.settings = house.settings.model_copy(update={"unserved": "wait"})
    await Heartbeat(house.redis).leave("w")
    waits = await house.submit(asking("test-model"))
    await house.plan()
    assert [(await house.batch(each)).status for each in (taken, waits)] == [BatchStatus.IN_PROGRESS] * 2


async def test_an_adapter_is_asked_for_by_its_name(shop: Shop) -> None:
    engine = Teller()
    async with shop.door("w", engine):
        assert (await shop.post({**asked(), "model": ADAPTER})).status_code == 404
        async with shop.house.database.write() as session:
            session.add(Model(name=ADAPTER, source="x", created_at=0))
        assert (await shop.post({**asked(), "model": ADAPTER})).status_code == 200
    assert len(engine.asked) == 1
