"""Batches that do not take every answer."""

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import typer
from openai.types import Batch
from sqlalchemy import select

from batchweave.remote.accept import accept_of
from engine_ext.plan.memory import Profile
from service.db.tables import LengthProfile
from service.settings import Settings
from service.worker.script import Rule, Script
from service.worker.scripted import ScriptedEngine as Scripted
from tests.conftest import Clock
from tests.integration import command
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import CHAT, serve
from tests.integration.test_retry_by_outcome import SCHEMA, about
from tests.waiting import until


@pytest.fixture
def client(settings: Settings, clock: Clock) -> Generator[openai.OpenAI, None, None]:
    with serve(settings, clock) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def create(client: openai.OpenAI, lines: list[dict[str, Any]], **accept: Any) -> Batch:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    extra = {"batchweave": {"accept": accept}}
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", extra_body=extra)


def ruled(*rules: Rule) -> ScriptedEngine:
    engine = ScriptedEngine()
    Scripted.__init__(engine, Script(rules, at_once=4096))
    return engine


async def run(harness: Harness, engine: ScriptedEngine, batch: Batch) -> None:
    await harness.plan()
    async with harness.working(engine):
        await harness.until_ended(batch.id)


async def test_a_request_is_asked_again_until_its_answer_is_taken(harness: Harness, client: openai.OpenAI) -> None:
    lines = [line(number) for number in range(6)]
    for each in lines[:4]:
        each["body"] |= {"response_format": SCHEMA, "temperature": 0}
    batch = create(client, lines, schema=True, finish="stop", retries=2)
    engine = ruled(
        Rule(prompt="request 0", answer="none", times=1),  # then it is good
        Rule(prompt="request 1", answer='{"n": 1', finish_reason="length", times=2),
        Rule(prompt="request 2", answer="none"),  # always
        Rule(prompt="request 4", status=500, times=1),  # which is no try
        Rule(prompt="request 5", answer="words"),
        Rule(prompt="request 4", answer="words"),
        Rule(answer='{"n": 1}'),
    )
    await run(harness, engine, batch)
    output, errors = await harness.results(await harness.batch(batch.id))
    assert (set(output), set(errors)) == ({"id-0", "id-1", "id-3", "id-4", "id-5"}, {"id-2"})
    assert engine.runs == {f"request {n}": runs for n, runs in enumerate((2, 3, 3, 1, 2, 1))}
    assert errors["id-2"]["error"]["code"] == "answer_not_accepted"
    assert errors["id-2"]["response"]["body"]["choices"][0]["message"]["content"] == "none"
    usage = {name: each["response"]["body"]["usage"] for name, each in (output | errors).items()}
    assert [usage[f"id-{n}"].get("tries") for n in range(6)] == [2, 3, 3, None, None, None]
    assert usage["id-1"]["not_accepted"] == {
        "input_tokens": 20,
        "cached_tokens": 8,
        "output_tokens": 4,
        "reasoning_tokens": 0,
    }
    found = client.batches.retrieve(batch.id)
    assert (found.request_counts and found.request_counts.failed) == 1
    assert found.model_dump()["usage"]["output_tokens"] == 2 * (2 + 3 + 3 + 1 + 1 + 1)  # of all tries
    assert about(found)["outcomes"] == {
        "ok": 5,
        "cut_off": 0,
        "looped": 0,
        "invalid": 0,
        "refused": 0,
        "failed": 1,
        "not_accepted": 1,
    }
    assert about(found)["failures"][0]["code"] == "answer_not_accepted"
    again = client.post(f"/batches/{batch.id}/retry", cast_to=Batch)
    assert about(again)["accept"] == {"finish": "stop", "schema": True, "retries": 2}
    path = f"/batches/{batch.id}/retry"
    assert about(client.post(path, cast_to=Batch, body={"accept": {"retries": 1, "schema": True}}))["accept"] == {
        "schema": True,
        "retries": 1,
    }
    assert about(client.post(path, cast_to=Batch, body={"accept": None}))["accept"] is None


async def test_another_try_is_told_what_was_wrong(harness: Harness, client: openai.OpenAI) -> None:
    lines = [line(number) for number in range(2)]
    for each in lines:
        each["body"]["response_format"] = SCHEMA
    lines[1]["batchweave"] = {"accept": {"explain": False}}
    batch = create(client, lines, schema=True, retries=1, explain=True)
    engine = ruled(Rule(prompt="Your answer *", answer='{"n": 1}'), Rule(answer="none"))
    await run(harness, engine, batch)
    output, errors = await harness.results(await harness.batch(batch.id))
    assert (set(output), set(errors)) == ({"id-0"}, {"id-1"})
    [told] = [prompt for prompt in engine.runs if prompt.startswith("Your answer")]
    assert told.startswith("Your answer is not valid JSON")


async def test_a_try_that_fails_with_what_it_was_told_is_asked_without(harness: Harness, client: openai.OpenAI) -> None:
    """A template may refuse the turns that were added; the request's own are fine."""
    lines = [line(number) for number in range(2)]
    for each in lines:
        each["body"]["response_format"] = SCHEMA
    batch = create(client, lines, schema=True, retries=1, explain=True)
    engine = ruled(
        Rule(prompt="Your answer *", status=400, times=1),
        Rule(prompt="Your answer *", status=500),
        Rule(answer="none", times=1),
        Rule(answer='{"n": 1}'),
    )
    await run(harness, engine, batch)
    output, errors = await harness.results(await harness.batch(batch.id))
    assert (set(output), set(errors)) == ({"id-0", "id-1"}, set())
    assert [each["response"]["body"]["usage"]["tries"] for each in output.values()] == [2, 2]


async def test_answers_may_be_longer_than_their_requests_say(harness: Harness, client: openai.OpenAI) -> None:
    lines = [line(number) for number in range(3)]
    lines[0]["body"] |= {"max_tokens": 1}
    lines[1]["body"] |= {"max_completion_tokens": 1}
    batch = create(client, lines, **{"continue": 20})
    await run(harness, ScriptedEngine(), batch)
    assert about(client.batches.retrieve(batch.id))["outcomes"]["ok"] == 3
    plain = create(client, lines)
    await run(harness, ScriptedEngine(), plain)
    assert about(client.batches.retrieve(plain.id))["outcomes"]["cut_off"] == 2


@pytest.mark.parametrize(
    ("accept", "words"),
    [
        ({"retries": 2}, "'retries' needs 'finish' or 'schema'"),
        ({"finish": "stop", "retries": 1, "explain": True}, "'explain' needs 'schema' and 'retries'"),
        ({"finish": "length"}, "'stop'"),
        ({"finish": "stop", "retries": 6}, "less than or equal to 5"),
        ({"schema": True, "retry": 1}, "unknown field"),
        ({"continue": -1}, "greater than or equal to 0"),
    ],
)
def test_what_cannot_be_accepted_is_said(client: openai.OpenAI, accept: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        create(client, [line(1)], **accept)
    assert words in str(caught.value)


async def test_a_line_may_want_something_else(harness: Harness, client: openai.OpenAI) -> None:
    lines = [line(number) for number in range(3)]
    for each in lines:
        each["body"] |= {"max_tokens": 1}
    lines[1]["batchweave"] = {"accept": {"continue": 0}}
    lines[2]["batchweave"] = {"accept": {"finish": None, "continue": 0, "retries": 0}}
    batch = create(client, lines, finish="stop", retries=1, **{"continue": 20})
    engine = ScriptedEngine()
    await run(harness, engine, batch)
    output, errors = await harness.results(await harness.batch(batch.id))
    assert (set(output), set(errors)) == ({"id-0", "id-2"}, {"id-1"})
    assert engine.runs == {"request 0": 1, "request 1": 2, "request 2": 1}


async def test_a_line_that_wants_too_much_is_named(harness: Harness, client: openai.OpenAI) -> None:
    lines = [line(number) for number in range(3)]
    lines[1]["batchweave"] = {"accept": {"retries": 2}}
    batch = create(client, lines, schema=True, retries=1)
    await harness.plan()
    found = client.batches.retrieve(batch.id)
    assert found.status == "failed"
    [error] = (found.errors and found.errors.data) or []
    assert (error.line, error.param) == (2, "batchweave")
    assert error.message == "'batchweave.accept.retries' is 2; the batch allows 1."


async def test_lengths_are_learned_from_the_answers_that_count(harness: Harness, client: openai.OpenAI) -> None:
    """An answer that was not accepted is no part of the next one's length."""
    lines = [line(number) for number in range(40)]
    batch = create(client, lines, finish="stop", retries=2)
    await run(harness, ruled(Rule(answer="words", finish_reason="length", times=2), Rule(answer="words")), batch)
    assert client.batches.retrieve(batch.id).model_dump()["usage"]["output_tokens"] == 40 * 2 * 3
    async with harness.database.read() as session:
        profiles = (await session.scalars(select(LengthProfile.profile))).all()
    assert set(profiles) == {Profile.of(np.full(40, 2)).text}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (None, None),
        ("", None),
        ("schema, finish,retries=2", {"schema": True, "finish": "stop", "retries": 2}),
        ("schema,retries=2,explain", {"schema": True, "retries": 2, "explain": True}),
        ("loops=stop,continue=5,thinking_tokens=0", {"loops": "stop", "continue": 5, "thinking_tokens": 0}),
    ],
)
def test_the_command_line_says_what_is_accepted(text: str | None, wanted: dict[str, Any] | None) -> None:
    assert accept_of(text) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "retry=1",
        "retries",
        "retries=-1",
        "retries=two",
        "schema=yes",
        "loops=on",
        "=1",
        "retries=1,loops",
        "finish,retries=1,explain",
    ],
)
def test_the_command_line_says_what_is_wrong(text: str) -> None:
    with pytest.raises(typer.BadParameter):
        accept_of(text)


async def test_a_file_is_submitted_with_what_is_accepted(
    harness: Harness, client: openai.OpenAI, tmp_path: Path
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(jsonl([line(1)]))
    url = str(client.base_url).removesuffix("/v1/")
    code, out, err = await command.run(url, "submit", file, "--accept", "finish,retries=1")
    assert code == 0, err
    assert about(client.batches.retrieve(out.strip()))["accept"] == {"finish": "stop", "retries": 1}


async def test_an_engine_is_told_what_ends_answers_early(harness: Harness, client: openai.OpenAI) -> None:
    lines = [line(number) for number in range(3)]
    lines[1]["batchweave"] = {"accept": {"thinking_tokens": 10}}
    lines[2]["batchweave"] = {"accept": {"loops": None}}
    batch = create(client, lines, loops="stop", thinking_tokens=50)
    engine = ScriptedEngine()
    engine.loops = {"request 0"}
    await run(harness, engine, batch)
    assert {content: (terms.stops_loops, terms.thinking_tokens) for content, terms in engine.terms.items()} == {
        "request 0": (True, 50),
        "request 1": (True, 10),
        "request 2": (False, 50),
    }
    assert about(client.batches.retrieve(batch.id))["outcomes"]["looped"] == 1


async def test_what_is_not_accepted_is_said_while_the_batch_runs(harness: Harness, client: openai.OpenAI) -> None:
    lines = [line(number) for number in range(40)]
    batch = create(client, lines, finish="stop")
    engine = ruled(
        *(Rule(prompt=f"request {number}", fault="hang") for number in range(2)),
        Rule(prompt="request *0", answer="words", finish_reason="length"),
        Rule(answer="words"),
    )
    await harness.plan()

    async def says() -> dict[str, Any]:
        await harness.reconciler.run_once()
        return about(await asyncio.to_thread(client.batches.retrieve, batch.id))

    async def are_judged() -> bool:
        found = (await says())["outcomes"]
        return found["ok"] + found["not_accepted"] == 38

    async with harness.working(engine):
        await until(are_judged)
        [words] = (await says())["outcome_warnings"]
        assert words.startswith("3 of 38 answers were not accepted")
        await asyncio.to_thread(client.batches.cancel, batch.id)
        await harness.until_ended(batch.id)


def test_answers_that_are_no_texts_cannot_be_judged(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", jsonl([line(1)])), purpose="batch")
    extra = {"batchweave": {"accept": {"finish": "stop"}}}
    with pytest.raises(openai.BadRequestError, match="are no texts"):
        client.batches.create(
            input_file_id=file.id, endpoint="/v1/embeddings", completion_window="24h", extra_body=extra
        )


async def test_a_schema_that_nobody_asks_for_is_said(harness: Harness, client: openai.OpenAI) -> None:
    lines = [line(number) for number in range(3)]
    lines[0]["body"]["response_format"] = SCHEMA
    batch = create(client, lines, schema=True)
    await harness.plan()
    [found] = about(client.batches.retrieve(batch.id))["unknown_parameters"]
    assert (found["name"], found["lines"]) == ("accept.schema", 2)
