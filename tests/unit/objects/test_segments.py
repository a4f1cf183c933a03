"""Answers are read from segments of any size, a line at a time."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from service.objects import storage as storage_module
from service.objects.shards import Answer, Shard, Usage
from service.objects.storage import LineTooLong, Storage, lines_of

ANSWER_BYTES = 3 * 1024 * 1024


def answer(number: int) -> Answer:
    return Answer("batch_1", number, True, Usage(), msgspec.Raw(b'"' + b"x" * ANSWER_BYTES + b'"'))


class Watched(Storage):
    """Counts the bytes that were read of objects."""

    taken = 0

    async def opened(self, key: str) -> AsyncIterator[bytes]:
        return self._counted(await super().opened(key))

    async def _counted(self, chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        async for chunk in chunks:
            self.taken += len(chunk)
            yield chunk


async def test_large_segments_are_not_held_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "READ_BYTES", 1024 * 1024)
    store = Watched.open(tmp_path.as_uri())
    assert isinstance(store, Watched)
    shard = Shard(store, 1)
    for number in range(4):
        await shard.write(1, number, [answer(4 * number + more) for more in range(4)])
    used, gone = 0, list[str]()
    names = await shard.names([(1, 5)])
    found = list[int]()
    async for each in shard.answers(names, gone=gone):
        found.append(each.request)
        used += len(each.line)
        assert store.taken - used <= ANSWER_BYTES + 4 * 1024 * 1024
    assert found == list(range(16))
    assert gone == ["shards/1/00000001-00000004"]


@pytest.mark.parametrize("size", [1, 3, 7, 100])
async def test_lines_are_the_same_however_they_come(size: int) -> None:
    data = b"first\n\nthird line\nno end"

    async def parts() -> AsyncIterator[bytes]:
        for at in range(0, len(data), size):
            yield data[at : at + size]

    assert [each async for each in lines_of(parts(), 10)] == [
        (0, b"first"),
        (6, b""),
        (7, b"third line"),
        (18, b"no end"),
    ]
    with pytest.raises(LineTooLong):
        _ = [each async for each in lines_of(parts(), 9)]
