"""What a store of the S3 class is asked for: bytes that are needed, few requests, parts that suffice."""

from collections.abc import Generator
from dataclasses import replace

import pytest

from service.objects import storage as storage_module
from service.objects.storage import Storage
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.stub_store import StubStore, stub_store


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Generator[StubStore, None, None]:
    with stub_store(monkeypatch) as found:
        yield found


async def test_a_batch_reads_what_it_needs(harness: Harness, stub: StubStore) -> None:
    harness = replace(harness, storage=Storage.open("s3://bucket"))
    lines = [line(n) for n in range(400)]
    for each in lines:
        each["body"]["user"] = "x" * 2000
    data = jsonl(lines)
    batch_id = await harness.submit(data)
    await harness.plan()
    stub.forget()
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    sent = stub.sent.copy()
    assert sent["files"] <= 1.3 * len(data)
    assert sent["indexes"] <= 16 * 400  # the finalizer learns by what lengths are remembered; the plan has the rest
    assert sent["plans"] <= 100 * 400
    assert len((await harness.results(batch))[0]) == 400


async def test_results_may_be_larger_than_they_were_thought_to_be(
    harness: Harness, stub: StubStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.objects.storage.PART_BYTES", 1024)
    monkeypatch.setattr("service.objects.storage.MOST_PARTS", 4)
    monkeypatch.setattr("service.jobs.finalizer.LINE_BYTES", 4)
    harness = replace(harness, storage=Storage.open("s3://bucket"))
    batch_id = await harness.submit(jsonl(line(n) for n in range(40)))
    await harness.plan()
    async with harness.working(ScriptedEngine()):
        [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == 40
    stored = {key for key in stub.objects if key.startswith("files/")}
    assert stored == {f"files/{batch.input_file_id}", f"files/{batch.output_file_id}"}


async def test_a_large_object_has_large_parts(stub: StubStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Storage.open("s3://bucket")
    async with store.writer("files/a", most=storage_module.MOST_PARTS * 16 * 2**20) as writer:
        for _ in range(5):
            await writer.write(bytes(9 * 2**20))
    assert sorted(stub.parts) == [13 * 2**20, 16 * 2**20, 16 * 2**20]
    assert len(stub.objects["files/a"]) == 45 * 2**20
