"""Files in parts, through the official client."""

import hashlib
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from service.api import uploads
from service.db.sessions import Database
from service.jobs.expiry import Expiry
from service.jobs.sweeper import Sweeper
from service.objects.storage import Storage
from service.settings import Settings
from tests.conftest import Clock
from tests.integration.serving import serve

pytestmark = pytest.mark.dialects

SIZE = 300_000
DATA = os.urandom(SIZE)


@pytest.fixture
def client(settings: Settings, clock: Clock) -> Generator[openai.OpenAI, None, None]:
    with serve(settings.model_copy(update={"max_file_bytes": 10_000_000}), clock) as url:
        yield openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def begin(client: openai.OpenAI, size: int = SIZE) -> str:
    return client.uploads.create(bytes=size, filename="in.jsonl", mime_type="text/jsonl", purpose="batch").id


def left(settings: Settings) -> list[Path]:
    return [path for path in (settings.data_dir / "objects" / "uploads").rglob("*") if path.is_file()]


def test_chunks_of_the_client_make_the_file(client: openai.OpenAI, settings: Settings) -> None:
    done = client.uploads.upload_file_chunked(
        file=DATA,
        filename="in.jsonl",
        bytes=SIZE,
        mime_type="text/jsonl",
        purpose="batch",
        part_size=70_000,
        md5=hashlib.md5(DATA).hexdigest(),
    )
    assert (done.status, done.bytes) == ("completed", SIZE)
    assert done.file is not None
    assert (done.file.status, done.file.purpose, done.file.filename) == ("processed", "batch", "in.jsonl")
    assert client.files.content(done.file.id).content == DATA
    assert not left(settings)


def test_an_empty_file(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.uploads.complete(begin(client, 0), part_ids=[])
    assert caught.value.code == "empty_file"


def test_parts_come_in_parallel_and_are_joined_as_named(client: openai.OpenAI) -> None:
    upload_id = begin(client)
    chunks = [DATA[at : at + 50_000] for at in range(0, SIZE, 50_000)]
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(lambda chunk: client.uploads.parts.create(upload_id, data=chunk).id, chunks))
    client.uploads.parts.create(upload_id, data=chunks[0])  # sent again, as after an answer that was lost
    done = client.uploads.complete(upload_id, part_ids=parts)
    assert done.file is not None
    assert client.files.content(done.file.id).content == DATA
    again = client.uploads.complete(upload_id, part_ids=parts)
    assert again.file is not None
    assert again.file.id == done.file.id
    assert len(client.files.list().data) == 1


def test_completions_at_once_make_one_file(
    client: openai.OpenAI, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    joined, join = list[str](), uploads._join  # pyright: ignore[reportPrivateUsage]

    async def counted(context: Any, upload: Any, *rest: Any) -> Any:
        joined.append(upload.id)
        return await join(context, upload, *rest)

    monkeypatch.setattr(uploads, "_join", counted)
    upload_id = begin(client)
    part = client.uploads.parts.create(upload_id, data=DATA).id

    def complete(_: int) -> Any:
        return client.uploads.complete(upload_id, part_ids=[part]).file

    with ThreadPoolExecutor() as pool:
        files = list(pool.map(complete, range(4)))
    assert len({file.id for file in files}) == 1
    assert joined == [upload_id]  # the others would have taken its room on the disk, too
    assert [path.name for path in (settings.data_dir / "objects" / "files").iterdir()] == [files[0].id]


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"part_ids": []}, "bytes_mismatch"),
        ({"part_ids": ["part_none"]}, "part_not_found"),
        ({"md5": "0" * 32}, "md5_mismatch"),
    ],
)
def test_a_completion_that_does_not_fit_is_refused_and_can_be_mended(
    client: openai.OpenAI, settings: Settings, change: dict[str, Any], code: str
) -> None:
    upload_id = begin(client)
    part = client.uploads.parts.create(upload_id, data=DATA).id
    asked: Any = {"part_ids": [part], **change}
    with pytest.raises(openai.BadRequestError) as caught:
        client.uploads.complete(upload_id, **asked)
    assert caught.value.code == code
    assert not list((settings.data_dir / "objects").glob("files/*"))
    assert client.uploads.complete(upload_id, part_ids=[part]).status == "completed"


def test_a_cancelled_upload_takes_nothing_more(client: openai.OpenAI, settings: Settings) -> None:
    upload_id = begin(client)
    part = client.uploads.parts.create(upload_id, data=DATA).id
    assert client.uploads.cancel(upload_id).status == "cancelled"
    assert client.uploads.cancel(upload_id).status == "cancelled"
    assert not left(settings)
    calls: list[Any] = [
        lambda: client.uploads.parts.create(upload_id, data=DATA),
        lambda: client.uploads.complete(upload_id, part_ids=[part]),
    ]
    for call in calls:
        with pytest.raises(openai.BadRequestError) as caught:
            call()
        assert caught.value.code == "upload_not_pending"


async def test_an_upload_expires_after_an_hour(
    client: openai.OpenAI, clock: Clock, database: Database, storage: Storage, settings: Settings
) -> None:
    upload_id = begin(client)
    client.uploads.parts.create(upload_id, data=DATA)
    clock.now += 3600
    with pytest.raises(openai.BadRequestError) as caught:
        client.uploads.parts.create(upload_id, data=DATA)
    assert caught.value.code == "upload_expired"
    await Sweeper(database, storage, clock).run_once()
    assert left(settings)
    await Expiry(database, storage, clock).run_once()
    await Sweeper(database, storage, clock).run_once()
    assert not left(settings)


def test_what_is_too_large_is_refused_before_it_comes(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        begin(client, 10_000_001)
    assert caught.value.status_code == 413
    upload_id = begin(client, 1000)
    with pytest.raises(openai.BadRequestError) as more:
        client.uploads.parts.create(upload_id, data=b"x" * 2001)
    assert more.value.code == "too_many_bytes"
    with pytest.raises(openai.NotFoundError):
        client.uploads.cancel("upload_none")
