"""Batches that are held: what they would take is seen before anything of them runs."""

import asyncio
from collections.abc import Generator
from typing import Any

import openai
import pytest
from openai.types import Batch
from sqlalchemy import func, select

from batchweave.remote.preview import figures
from batchweave.remote.shapes import Batch as RemoteBatch
from service.db.models import register_model
from service.db.tables import Slice
from service.estimates import model_costs
from service.jobs.expiry import Expiry
from service.metrics.history import History, Pace
from service.queue.progress import Heartbeat
from service.settings import AUTO, Settings
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import CHAT, serve

DAY_S = 86400


@pytest.fixture
def client(settings: Settings, clock: Clock) -> Generator[openai.OpenAI, None, None]:
    with serve(settings.model_copy(update={"worker_hour_price": 36.0}), clock) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def hold(client: openai.OpenAI, data: bytes) -> str:
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    wishes = {"batchweave": {"hold": True}}
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", extra_body=wishes).id


def start(client: openai.OpenAI, batch_id: str) -> Batch:
    return client.post(f"/batches/{batch_id}/start", cast_to=Batch)


def extras(batch: Batch) -> dict[str, Any]:
    return batch.model_dump()["batchweave"]


def seen(client: openai.OpenAI, batch_id: str) -> dict[str, Any]:
    return extras(client.batches.retrieve(batch_id))


async def slices(harness: Harness) -> int:
    async with harness.database.read() as session:
        return (await session.execute(select(func.count()).select_from(Slice))).scalar_one()


async def test_time_and_cost_are_seen_before_it_starts(harness: Harness, client: openai.OpenAI, clock: Clock) -> None:
    batch_id = hold(client, jsonl(line(n) for n in range(30)))
    assert seen(client, batch_id)["waiting_for"] == "validation"
    await harness.plan()
    found = seen(client, batch_id)
    assert (found["held"], found["waiting_for"], await slices(harness)) == (True, "its start", 0)
    plan = found["preview"]
    assert plan["requests"] == 30
    assert 0 < plan["prompt_sharing"] < 1  # three topics, each in ten requests
    assert found["expected_gpu_seconds"] == max(plan["compute_seconds"], plan["memory_seconds"]) > 0
    assert found["expected_cost"] == pytest.approx(found["expected_gpu_seconds"] / 100, abs=1e-6)
    assert found["expected_output_tokens"] > 0
    clock.now += 1000
    started = start(client, batch_id)
    assert not extras(started)["held"]
    assert started.expires_at == int(clock.now) + DAY_S
    assert started.in_progress_at == int(clock.now)
    await harness.plan()
    planned = seen(client, batch_id)
    assert planned["expected_gpu_seconds"] == pytest.approx(found["expected_gpu_seconds"])
    assert planned["expected_output_tokens"] == found["expected_output_tokens"]
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert (len(output), errors) == (30, {})


async def test_a_machine_that_no_cost_model_describes_has_no_figures_of_a_gpu(
    harness: Harness, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_costs, "machine_gpu", lambda: None)
    here = harness.settings.model_copy(update={"gpu": AUTO})
    await register_model(harness.database, here, 8192, ["/v1/chat/completions"], model_costs.told_machine(here))
    batch_id = hold(client, jsonl(line(n) for n in range(30)))
    await harness.plan()
    found = seen(client, batch_id)
    names = ("expected_gpu_seconds", "expected_cost", "earliest_at")
    of_plan = ("compute_seconds", "memory_seconds", "planned_for")
    assert [found[name] for name in names] == [None] * 3
    assert [found["preview"][name] for name in of_plan] == [None] * 3
    assert found["expected_output_tokens"] > 0
    assert found["preview"]["prompt_sharing"] > 0
    shown = dict(figures(RemoteBatch.of(client.batches.retrieve(batch_id).to_dict())))
    assert list(shown) == ["estimated end in", "prompt tokens", "expected output tokens"]
    assert shown["estimated end in"].startswith("unknown")
    await History(harness.redis).note_paces({here.served_model: Pace(work=0.01, answers=50.0)})
    await Heartbeat(harness.redis).beat("w", {"name": "w", "model": here.served_model})
    await asyncio.sleep(0.2)  # it is not looked up at each call
    [first, *_] = figures(RemoteBatch.of(client.batches.retrieve(batch_id).to_dict()))
    assert first[0] == "estimated end in"
    assert "at the pace" in first[1]


async def test_a_start_that_comes_early_or_twice_is_a_start(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = hold(client, jsonl(line(n) for n in range(4)))
    assert start(client, batch_id).in_progress_at is None
    start(client, batch_id)
    await harness.plan()
    assert await slices(harness) == 1
    assert start(client, batch_id).status == "in_progress"


async def test_what_has_ended_cannot_be_started(harness: Harness, client: openai.OpenAI) -> None:
    cancelled = hold(client, jsonl(line(n) for n in range(4)))
    await harness.plan()
    client.batches.cancel(cancelled)
    wrong = hold(client, b"{}\n")
    await harness.plan()
    [batch] = await harness.until_ended(cancelled)
    assert batch.failed == 0
    for batch_id in (cancelled, wrong):
        assert not seen(client, batch_id)["held"]
        with pytest.raises(openai.BadRequestError) as caught:
            start(client, batch_id)
        assert caught.value.code == "batch_not_startable"


async def test_one_that_nobody_starts_expires(harness: Harness, client: openai.OpenAI, clock: Clock) -> None:
    batch_id = hold(client, jsonl(line(n) for n in range(4)))
    await harness.plan()
    clock.now += DAY_S + 1
    await harness.expiry.run_once()
    [batch] = await harness.until_ended(batch_id)
    _, errors = await harness.results(batch)
    assert {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
    assert await slices(harness) == 0


async def test_a_batch_larger_than_a_window_is_judged_by_its_first_requests(
    harness: Harness, client: openai.OpenAI
) -> None:
    harness.settings = harness.settings.model_copy(update={"window_requests": 10})
    whole = hold(client, jsonl(line(n) for n in range(10)))
    long = hold(client, jsonl(line(n % 10, custom_id=f"id-{n}") for n in range(40)))
    await harness.plan()
    found, part = seen(client, long), seen(client, whole)
    assert found["preview"]["requests"] == 10
    assert found["expected_gpu_seconds"] == pytest.approx(4 * part["expected_gpu_seconds"], abs=4e-6)


async def test_a_start_while_it_expires_is_a_start(harness: Harness, client: openai.OpenAI, clock: Clock) -> None:
    batch_id = hold(client, jsonl(line(n) for n in range(4)))
    await harness.plan()
    clock.now += DAY_S + 1

    class Slow(Expiry):
        """Sees that it is late, and is overtaken by its start."""

        async def _late(self, now: float) -> Any:
            found = await super()._late(now)
            assert found
            await asyncio.to_thread(start, client, batch_id)
            return found

    await Slow(harness.database, harness.storage, clock).run_once()
    assert (await harness.batch(batch_id)).status == "in_progress"
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    assert (batch.status, batch.completed) == ("completed", 4)


async def test_one_that_is_cancelled_is_held_no_more(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = hold(client, jsonl(line(n) for n in range(4)))
    await harness.plan()
    assert not extras(client.batches.cancel(batch_id))["held"]
