"""Retries of requests by the outcomes of their answers."""

from typing import Any

import openai
import pytest
from openai.types import Batch

from service.jobs.bad_answers import folder_of
from service.jobs.sweeper import KEEP_S
from tests.conftest import Clock
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.integration.serving import CHAT

SCHEMA = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "object", "required": ["n"], "properties": {"n": {}}}},
}


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def create(client: openai.OpenAI, lines: list[dict[str, Any]]) -> str:
    file = client.files.create(file=("in.jsonl", jsonl(lines)), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h").id


def mixed() -> list[dict[str, Any]]:
    """Ten requests: 0 to 3 are cut off after one word, 4 to 6 ask for JSON and get none, 7 fails, the rest is ok."""
    lines = [line(number) for number in range(10)]
    for each in lines[:4]:
        each["body"] |= {"max_tokens": 1}
    for each in lines[4:7]:
        each["body"] |= {"response_format": SCHEMA}
    return lines


async def run(harness: Harness, batch_id: str, **statuses: list[int]) -> ScriptedEngine:
    engine = ScriptedEngine(statuses=statuses)
    await harness.plan()
    async with harness.working(engine):
        await harness.until_ended(batch_id)
    return engine


def retry(client: openai.OpenAI, batch_id: str, **body: Any) -> Batch:
    return client.post(f"/batches/{batch_id}/retry", cast_to=Batch, body=body)


def about(batch: Batch) -> dict[str, Any]:
    return batch.model_dump()["batchweave"]


def names(*numbers: int) -> set[str]:
    return {f"id-{number}" for number in numbers}


async def test_a_retry_repeats_the_outcomes_that_are_asked_for(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = create(client, mixed())
    await run(harness, batch_id, **{"request 7": [400]})
    found = about(client.batches.retrieve(batch_id))["outcomes"]
    assert found == {"ok": 2, "cut_off": 4, "looped": 0, "invalid": 3, "refused": 0, "failed": 1, "not_accepted": 0}

    longer = retry(client, batch_id, outcomes=["cut_off"], max_tokens=50)
    assert (about(longer)["retry_outcomes"], about(longer)["max_tokens"]) == (["cut_off"], 50)
    await run(harness, longer.id)
    output, _ = await harness.results(await harness.batch(longer.id))
    assert set(output) == names(0, 1, 2, 3)
    ends = [each["response"]["body"]["choices"][0] for each in output.values()]
    assert {each["finish_reason"] for each in ends} == {"stop"}  # they had room
    assert about(client.batches.retrieve(longer.id))["outcomes"]["ok"] == 4

    rest = retry(client, batch_id, outcomes=["invalid", "failed"])
    await run(harness, rest.id)
    output, _ = await harness.results(await harness.batch(rest.id))
    assert set(output) == names(4, 5, 6, 7)


async def test_a_retry_of_a_retry_keeps_the_limit(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = create(client, mixed())
    await run(harness, batch_id)
    first = retry(client, batch_id, outcomes=["cut_off"], max_tokens=1)
    await run(harness, first.id)
    assert about(client.batches.retrieve(first.id))["outcomes"]["cut_off"] == 4
    second = retry(client, first.id, outcomes=["cut_off"])
    assert about(second)["max_tokens"] == 1
    assert about(retry(client, first.id, outcomes=["cut_off"], max_tokens=None))["max_tokens"] is None
    await run(harness, second.id)
    assert set((await harness.results(await harness.batch(second.id)))[0]) == names(0, 1, 2, 3)


async def test_outcomes_that_no_answer_has_are_left_out(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = create(client, [line(number) for number in range(4)])
    await run(harness, batch_id, **{"request 1": [400]})
    again = retry(client, batch_id, outcomes=["failed", "cut_off", "looped"])
    assert about(again)["retry_outcomes"] == ["failed"]
    await run(harness, again.id)
    assert set((await harness.results(await harness.batch(again.id)))[0]) == names(1)


async def test_what_a_retry_cannot_repeat_is_said(harness: Harness, client: openai.OpenAI) -> None:
    batch_id = create(client, mixed())
    await run(harness, batch_id)
    for body, code, words in (
        ({"outcomes": ["refused"]}, "nothing_to_retry", "but some are cut_off, invalid"),
        ({}, "nothing_to_retry", "name them in `outcomes`"),
        ({"outcomes": []}, None, "outcomes"),
        ({"outcomes": ["odd"]}, None, "outcomes"),
        ({"max_tokens": 0}, None, "max_tokens"),
        ({"max_token": 5}, None, "did you mean 'max_tokens'?"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            retry(client, batch_id, **body)
        assert code is None or caught.value.code == code
        assert words in str(caught.value)


async def test_what_is_kept_for_a_retry_goes_with_the_output_file(
    harness: Harness, client: openai.OpenAI, clock: Clock
) -> None:
    batch_id = create(client, mixed())
    await run(harness, batch_id)
    output_file = (await harness.batch(batch_id)).output_file_id or ""
    running = retry(client, batch_id, outcomes=["invalid"])
    with pytest.raises(openai.BadRequestError) as caught:
        client.files.delete(output_file)
    assert caught.value.code == "file_in_use"
    clock.now += 2 * KEEP_S
    await harness.sweeper.run_once()
    assert await harness.storage.modified(folder_of(batch_id))
    client.batches.cancel(running.id)
    await harness.until_ended(running.id)
    client.files.delete(output_file)
    with pytest.raises(openai.BadRequestError) as gone:
        retry(client, batch_id, outcomes=["invalid"])
    assert gone.value.code == "file_not_found"
    await harness.sweeper.run_once()
    assert not await harness.storage.modified(folder_of(batch_id))
