"""A batch's list of requests, and the page of each."""

import re

import httpx
import pytest
from sqlalchemy import update

from service.dashboard import answers
from service.db.tables import Batch
from tests.integration.harness import Harness, ScriptedEngine, jsonl
from tests.integration.test_retry_by_outcome import mixed


@pytest.fixture
async def batch_id(harness: Harness) -> str:
    found = await harness.submit(jsonl(mixed()))
    await harness.plan()
    async with harness.working(ScriptedEngine(statuses={"request 7": [400]})):
        await harness.until_ended(found)
    return found


def links(text: str) -> list[str]:
    return re.findall(r'<a class="name" href="/dashboard(/batches/[^"]*)"', text.replace("&amp;", "&"))


def other(text: str, rel: str) -> str:
    found = re.search(rf'rel="{rel}" href="([^"]*)"', text)
    return found[1].replace("&amp;", "&").removeprefix("/dashboard") if found else ""


async def test_requests_are_listed_by_their_outcome(pages: httpx.AsyncClient, batch_id: str) -> None:
    for kind, word, names in (
        ("cut_off", "cut off at 2 tokens", {0, 1, 2, 3}),
        ("invalid", "not the JSON that was asked for", {4, 5, 6}),
        ("failed", "failed: 400", {7}),
        ("refused", "", set[int]()),
    ):
        shown = (await pages.get(f"/batches/{batch_id}/requests", params={"kind": kind})).text
        assert {f"custom_id=id-{number}&kind={kind}" for number in names} == {
            link.partition("?")[2].partition("&text")[0] for link in links(shown)
        }
        assert shown.count(f">{word}<") == len(names) or not word
    everything = (await pages.get(f"/batches/{batch_id}/requests")).text
    assert len(links(everything)) == 9
    assert re.search(r'data-label="Prompt"><div class="clamp">request 8<', everything)
    assert (await pages.get(f"/batches/{batch_id}/requests?kind=odd")).status_code == 400


async def test_all_pages_of_a_list_have_each_request_once(
    pages: httpx.AsyncClient, batch_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers.search, "__defaults__", (0, 4))  # lines of a page
    path, seen, looks = f"/batches/{batch_id}/requests", list[str](), 0
    while path:
        text = (await pages.get(path)).text
        seen, path, looks = seen + links(text), other(text, "next"), looks + 1
        assert looks <= 4
    assert (len(seen), len(set(seen)), looks) == (9, 9, 3)
    beyond = await pages.get(f"/batches/{batch_id}/requests?after=99999999")
    assert (beyond.status_code, "No requests found" in beyond.text) == (200, True)


async def test_one_walks_from_request_to_request(pages: httpx.AsyncClient, batch_id: str) -> None:
    listed = links((await pages.get(f"/batches/{batch_id}/requests?kind=cut_off")).text)
    page = (await pages.get(listed[0])).text
    assert "<span>Cut off at 2 tokens</span>" in page
    assert "10 tokens in, 4 of them from the cache, 2 out" in page
    walked, back = [listed[0].partition("custom_id=")[2].partition("&")[0]], list[str]()
    while path := other(page, "next"):
        page = (await pages.get(f"/batches/{batch_id}/request{path}")).text
        walked.append(path.partition("custom_id=")[2].partition("&")[0])
    while path := other(page, "prev"):
        page = (await pages.get(f"/batches/{batch_id}/request{path}")).text
        back.append(path.partition("custom_id=")[2].partition("&")[0])
    assert walked == [link.partition("custom_id=")[2].partition("&")[0] for link in listed]
    assert back == walked[-2::-1]


async def test_a_retry_from_the_page_keeps_the_limit(pages: httpx.AsyncClient, harness: Harness) -> None:
    found = await harness.submit(jsonl(mixed()))
    for limit, expected in (({"max_tokens": "1"}, 1), ({}, 1), ({"max_tokens": "9"}, 9)):
        await harness.plan()
        async with harness.working(ScriptedEngine()):
            await harness.until_ended(found)
        shown = await pages.post(f"/batches/{found}/retry", data={"outcome": "cut_off", **limit})
        found = shown.url.path.rsplit("/", 1)[-1]
        assert (await harness.batch(found)).max_tokens == expected


async def test_a_place_that_is_none_finds_the_request_too(pages: httpx.AsyncClient, batch_id: str) -> None:
    for at in (1, 10**9):
        page = await pages.get(f"/batches/{batch_id}/request", params={"custom_id": "id-8", "at": at})
        assert page.text.count("<p>request 8</p>") == 2
    failed = (await pages.get(f"/batches/{batch_id}/request", params={"custom_id": "id-7"})).text
    assert "Failed: 400" in failed


async def test_pages_say_what_was_asked_again(harness: Harness, pages: httpx.AsyncClient, batch_id: str) -> None:
    client, engine = pages, ScriptedEngine(statuses={"request 7": [400]})
    async with harness.database.write() as session:
        await session.execute(update(Batch).values(accept={"finish": "stop", "retries": 1}))
    again = await client.post(f"/batches/{batch_id}/retry", data={"outcome": "cut_off", "max_tokens": "1"})
    found = again.url.path.rpartition("/")[2]
    await harness.plan()
    async with harness.working(engine):
        await harness.until_ended(found)
    overview = (await client.get(f"/batches/{found}")).text
    assert re.search(r"Completed in .*: 0 answers, 4 failed \(4 not accepted\)", overview)
    assert "<dd>not cut off, looped or refused; 1 retry</dd>" in overview
    assert f'href="/dashboard/batches/{found}/requests?kind=failed">4 failed</a>' in overview
    listed = (await client.get(f"/batches/{found}/requests?kind=failed")).text
    assert (listed.count(">not accepted<"), listed.count("10 in, 2 out, 2 tries")) == (4, 4)
    page = (await client.get(links(listed)[0])).text
    assert "<span>Not accepted</span>" in page
    assert "; the last of 2 answers, of which the others took 2 out" in page
    elsewhere = (await client.get(f"/batches/{found}/requests", params={"text": "id-0"})).text
    assert f'/batches/{found}/requests?kind=failed&text=id-0">failed</a>' in elsewhere.replace("&amp;", "&")
    retry = {"outcome": "failed", "max_tokens": ""}  # as a form sends a field that is left empty
    assert (await client.post(f"/batches/{found}/retry", data=retry)).url.path.startswith("/dashboard/batches/batch_")
