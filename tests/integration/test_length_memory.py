"""What a batch teaches about the lengths of answers, and who profits: plans, previews and engines of later batches."""

import asyncio
import json

import pytest
from sqlalchemy import func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from engine_ext.arrays import Column
from engine_ext.plan.memory import Keys, Profile, learn
from engine_ext.plan.tuning import FEWEST_IN_PROFILE
from service.db.clock import DAY_S
from service.db.tables import DEFAULT_PROJECT, Batch, LengthProfile
from service.db.tenant_tables import Project
from service.estimates import length_memory
from service.jobs.sweeper import KEEP_LENGTHS_S
from service.objects.request_index import RequestIndex
from service.tenants.changes import change_project
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line

pytestmark = pytest.mark.dialects

REQUESTS = 3 * FEWEST_IN_PROFILE + 6


def asked(first: int = 0, topic: str = "answer the question", **changes: object) -> bytes:
    """Requests with one system prompt, which is longer than what a prompt's beginning is known by."""
    lines = [line(number) for number in range(first, first + REQUESTS)]
    for each in lines:
        each["body"] |= changes
        each["body"]["messages"][0]["content"] = f"{topic} in one word, and nothing else please; " * 8
    return jsonl(lines)


async def ran(harness: Harness, data: bytes, engine: ScriptedEngine | None = None) -> Batch:
    batch_id = await harness.submit(data)
    await harness.plan()
    async with harness.working(engine or ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    return batch


async def profiles(harness: Harness) -> list[Profile]:
    async with harness.database.read() as session:
        return [Profile.parse(text) for text in await session.scalars(select(LengthProfile.profile))]


async def test_later_batches_are_planned_by_the_lengths_of_earlier_answers(harness: Harness) -> None:
    first = await ran(harness, asked())
    assert first.planned_output_tokens / REQUESTS > 50
    [profile] = await profiles(harness)
    assert profile.answers == REQUESTS
    engine = ScriptedEngine()
    second = await ran(harness, asked(1000), engine)
    assert second.planned_output_tokens / REQUESTS == pytest.approx(2, rel=0.2)  # as many as the engine answers with
    assert second.planned_memory_s < first.planned_memory_s
    assert {Profile.parse(text).answers for text in engine.lengths.values()} == {REQUESTS}
    [profile] = await profiles(harness)
    assert profile.answers == 2 * REQUESTS


async def test_previews_are_made_with_what_is_remembered(harness: Harness) -> None:
    await ran(harness, asked())
    batch_id = await harness.submit(asked(1000))
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(held=True))
    await harness.plan()
    preview = (await harness.batch(batch_id)).preview
    assert preview is not None
    assert preview["output_tokens"] / REQUESTS == pytest.approx(2, rel=0.2)


async def test_another_task_limit_or_project_is_not_expected_to_answer_alike(harness: Harness) -> None:
    await ran(harness, asked())
    others = asked(topic="write an essay about the question"), asked(max_tokens=4000), asked(reasoning_effort="high")
    for data in others:
        batch = await ran(harness, data)
        assert batch.planned_output_tokens / REQUESTS > 50
    async with harness.database.write() as session:
        session.add(Project(id="proj_other", name="other", created_at=0))
    batch_id = await harness.submit(asked(1000))
    async with harness.database.write() as session:
        await session.execute(update(Batch).where(Batch.id == batch_id).values(project_id="proj_other"))
    await harness.plan()
    assert (await harness.batch(batch_id)).planned_output_tokens / REQUESTS > 50


async def test_answers_whose_thoughts_are_bounded_are_remembered_apart(harness: Harness) -> None:
    """Long thoughts would make those that are bounded seem long too, and bounded ones the others short."""
    await ran(harness, asked())

    async def bounded(first: int) -> float:
        batch_id = await harness.submit(asked(first))
        async with harness.database.write() as session:
            accept = {"thinking_tokens": 4000}
            await session.execute(update(Batch).where(Batch.id == batch_id).values(accept=accept))
        await harness.plan()
        async with harness.working(ScriptedEngine()):
            [batch] = await harness.until_ended(batch_id)
        return batch.planned_output_tokens / REQUESTS

    assert await bounded(1000) > 50
    assert await bounded(2000) == pytest.approx(2, rel=0.2)


async def test_requests_without_a_common_beginning_are_known_by_their_kind(harness: Harness) -> None:
    def alone(number: int) -> dict[str, object]:
        return line(
            number, body={"model": "test-model", "messages": [{"role": "user", "content": f"{number} word " * 40}]}
        )

    await ran(harness, jsonl(alone(number) for number in range(REQUESTS)))
    second = await ran(harness, jsonl(alone(number) for number in range(1000, 1000 + REQUESTS)))
    assert second.planned_output_tokens / REQUESTS == pytest.approx(2, rel=0.2)


async def test_a_batch_that_ends_early_teaches_nothing(harness: Harness) -> None:
    batch_id = await harness.submit(asked())
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        async with harness.database.write() as session:
            await session.execute(update(Batch).where(Batch.id == batch_id).values(expires_at=1))
        await harness.expiry.run_once()
        [batch] = await harness.until_ended(batch_id)
    assert batch.status == "expired"
    assert await profiles(harness) == []


async def test_failed_requests_and_several_answers_teach_nothing(harness: Harness) -> None:
    engine = ScriptedEngine(statuses={f"request {number}": [400] for number in range(REQUESTS)})
    await ran(harness, asked(), engine)
    await ran(harness, asked(n=2))
    await ran(harness, asked(max_tokens=5, ignore_eos=True))
    assert await profiles(harness) == []


async def test_a_project_that_does_not_want_it_is_forgotten_and_stays_so(harness: Harness) -> None:
    await ran(harness, asked())
    async with harness.database.write() as session:
        project = (await session.scalars(select(Project).where(Project.id == DEFAULT_PROJECT))).one()
        await change_project(session, project, {"remembers_lengths": False}, "cli", 1)
    assert await profiles(harness) == []
    second = await ran(harness, asked(1000))
    assert second.planned_output_tokens / REQUESTS > 50
    assert await profiles(harness) == []


async def test_an_index_without_keys_runs_as_before(harness: Harness) -> None:
    batch_id = await harness.submit(asked())
    while await harness.validator.run_once():
        pass
    await harness.storage.delete(RequestIndex(harness.storage, (await harness.batch(batch_id)).index_id or "").keys_key)
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    assert (batch.completed, batch.failed) == (REQUESTS, 0)
    assert await profiles(harness) == []


async def test_a_profile_that_cannot_be_read_is_as_good_as_none(harness: Harness) -> None:
    await ran(harness, asked())
    async with harness.database.write() as session:
        await session.execute(update(LengthProfile).values(profile="of another version"))
    second = await ran(harness, asked(1000))
    assert (second.status, second.completed) == ("completed", REQUESTS)
    assert second.planned_output_tokens / REQUESTS > 50
    [profile] = await profiles(harness)
    assert profile.answers == REQUESTS


async def test_a_project_that_is_forgotten_while_it_learns_stays_forgotten(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the lesson or the wish to forget comes first."""
    learned, loop = asyncio.Event(), asyncio.get_running_loop()

    def and_tell(keys: Keys, tokens: Column, most: int) -> dict[int, Profile]:
        loop.call_soon_threadsafe(learned.set)
        return learn(keys, tokens, most)

    async def forget() -> None:
        await learned.wait()
        async with harness.database.write() as session:
            project = (await session.scalars(select(Project).where(Project.id == DEFAULT_PROJECT))).one()
            await change_project(session, project, {"remembers_lengths": False}, "cli", 1)

    monkeypatch.setattr(length_memory, "learn", and_tell)
    await asyncio.gather(forget(), ran(harness, asked()))
    assert await profiles(harness) == []


async def test_what_is_kept_is_bounded_and_ends_with_age(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_memory, "MOST_PROFILES", 2)
    for number in range(4):
        harness.clock.now += 60
        await ran(harness, asked(topic=f"topic {number}"))
    async with harness.database.read() as session:
        seen = list(await session.scalars(select(LengthProfile.seen_at).order_by(LengthProfile.seen_at)))
    assert len(seen) == 2
    assert seen[1] - seen[0] >= 60  # the last two
    harness.clock.now += KEEP_LENGTHS_S + DAY_S
    await harness.sweeper.run_once()
    async with harness.database.read() as session:
        assert await session.scalar(select(func.count()).select_from(LengthProfile)) == 0


async def test_a_lesson_that_cannot_be_kept_costs_no_answer(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fails(session: AsyncSession, *_: object) -> None:
        raise OSError("the database is away")

    monkeypatch.setattr(length_memory, "_keep", fails)
    batch = await ran(harness, asked())
    assert (batch.status, batch.completed) == ("completed", REQUESTS)


async def test_a_large_batch_is_learned_from_blocks_of_it(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_memory, "BLOCK", 4)
    monkeypatch.setattr(length_memory, "BLOCKS", 3)
    await ran(harness, asked())
    [profile] = await profiles(harness)
    assert profile.answers == 12
    assert json.loads(profile.text) == [[0, 12.0, 24.0]]
