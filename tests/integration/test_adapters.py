"""Batches for LoRA adapters: they run with their base model's, and share no prefix with others."""

from itertools import pairwise

import numpy as np
from sqlalchemy import select

from service.db.models import register_model
from service.db.tables import Batch, BatchStatus, Model, Slice, SliceBatch, Window
from service.endpoints import ModelName
from service.objects.plan_artifact import PlanArtifact
from service.objects.request_index import RequestIndex
from service.queue.leases import Leases
from service.queue.progress import Heartbeat
from tests.batches import CHAT
from tests.integration.house import House, ScriptedEngine, jsonl, line


def asking(model: str) -> bytes:
    lines = [line(n) for n in range(12)]
    return jsonl({**each, "body": {**each["body"], "model": model}} for each in lines)


async def last_plan(house: House) -> tuple[str, list[str]]:
    """The model and the batches of the last window."""
    async with house.database.read() as session:
        plan_id = (await session.scalars(select(Window.plan_id).order_by(Window.id.desc()).limit(1))).one()
    header = await PlanArtifact(house.storage, plan_id).header()
    return header.model, header.batches


async def tokens(house: House, batch: Batch) -> list[list[int]]:
    """The prompts of a batch as its plan has them."""
    index = RequestIndex(house.storage, batch.index_id or "")
    records = await index.read(0, batch.total)
    flat = (await index.token_ids(records)).tolist()
    ends = np.cumsum(records["tokens"]).tolist()
    return [flat[begin:end] for begin, end in pairwise([0, *ends])]


async def names(house: House) -> list[str]:
    async with house.database.read() as session:
        return list((await session.scalars(select(Model.name).order_by(Model.name))).all())


async def with_adapters(house: House, *adapters: str) -> None:
    """As a worker with these adapters does when it starts."""
    changes = {"adapters": {each: "x" for each in adapters}, "model": str(house.settings.data_dir / "no-model")}
    settings = house.settings.model_validate({**house.settings.model_dump(), **changes})
    await register_model(house.database, settings, None, [CHAT, "/v1/responses"])


async def test_adapters_share_windows_and_workers_but_no_prefix(house: House) -> None:
    async with house.database.write() as session:
        source = (await session.scalars(select(Model.source))).one()
        session.add_all(Model(name=f"test-model:{each}", source=source, created_at=0) for each in ("sql", "poem"))
    asked = ["test-model", "test-model:sql", "test-model:poem", "test-model:sql"]
    ids = [await house.submit(asking(each)) for each in asked]
    await house.plan()
    assert await last_plan(house) == ("test-model", ids)
    house.settings = house.settings.model_copy(update={"adapters": {"sql": "x", "poem": "y"}})
    async with house.working(ScriptedEngine()):
        batches = await house.until_ended(*ids)
    assert [str(ModelName(each.model or "", each.adapter)) for each in batches] == asked
    assert [len((await house.results(each))[0]) for each in batches] == [12] * 4
    base, sql, poem, again = [await tokens(house, each) for each in batches]
    assert sql == again
    for prompts in zip(base, sql, poem, strict=True):
        assert len({prompt[0] for prompt in prompts}) == 3
        assert len({tuple(prompt[1:]) for prompt in prompts}) == 1


async def test_a_worker_that_lacks_an_adapter_leaves_its_requests_to_others(house: House) -> None:
    """Its engine would fail them for good."""
    async with house.database.write() as session:
        source = (await session.scalars(select(Model.source))).one()
        session.add_all(Model(name=f"test-model:{each}", source=source, created_at=0) for each in ("sql", "poem"))
    for each in ("test-model", "test-model:sql"):
        await house.submit(asking(each))
    poem = await house.submit(asking("test-model:poem"))
    await house.plan()
    async with house.database.read() as session:
        slices = set((await session.scalars(select(Slice.id))).all())
        others = set((await session.scalars(select(SliceBatch.slice_id).where(SliceBatch.batch_id == poem))).all())
    leases = Leases(house.database, "w", "test-model", 30, ["sql"])
    claimed = {each for each in slices if await leases.claim(each) is not None}
    assert claimed == slices - others
    assert claimed
    assert others


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
