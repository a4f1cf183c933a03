"""Answers are read from segments of any size, a line at a time."""

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from service.objects.shards import Answer, Shard, Usage
from service.objects.storage import READ_BYTES, LineTooLong, Storage, lines_of


def answer(number: int, size: int) -> Answer:
    return Answer("batch_1", number, True, Usage(), msgspec.Raw(b'"' + b"x" * size + b'"'))


class Watched(Storage):
    """Counts the bytes that were read of objects."""

    taken = 0

    async def read_small(self, key: str, most: int) -> bytes | None:
        found = await super().read_small(key, most)
        self.taken += len(found or b"")
        return found

    async def stream(
        self, key: str, start: int = 0, end: int | None = None, chunk_bytes: int = READ_BYTES
    ) -> AsyncIterator[bytes]:
        async for chunk in super().stream(key, start, end, chunk_bytes):
            self.taken += len(chunk)
            yield chunk


@pytest.mark.parametrize("size", [3_000_000, 3_000])
async def test_large_segments_are_not_held_in_memory(tmp_path: Path, size: int) -> None:
    store = Watched.open(tmp_path.as_uri())
    assert isinstance(store, Watched)
    shard = Shard(store, 1)
    for number in range(4):
        await shard.write(1, number, [answer(4 * number + more, size) for more in range(4)])
    used, gone = 0, list[str]()
    names = await shard.names([(1, 5)])
    found = list[int]()
    async for each in shard.answers(names, gone=gone):
        found.append(each.request)
        used += len(each.line)
        assert store.taken - used <= size + 4 * READ_BYTES
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
