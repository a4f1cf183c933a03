"""A slice's result shard: segments of answers, each written in one atomic step, so that no segment is ever torn.

Object stores cannot append. Every half second a worker writes its new answers as a new segment, named by its lease's
epoch and a number; the answers in a segment are final. When two epochs answered the same request, the earlier segment
counts.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
import structlog

from service.objects.storage import ANSWERS_RESERVE, Storage

READ_SEGMENTS = 16  # at once
log = structlog.get_logger()


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one answer."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One answered request. `line` is its complete line of the output or error file."""

    batch_id: str
    request: int
    ok: bool
    usage: Usage
    line: msgspec.Raw


_decoder = msgspec.json.Decoder(Answer)


@dataclass(frozen=True, slots=True)
class Shard:
    """The shard of one slice in object storage."""

    storage: Storage
    slice_id: int

    @property
    def folder(self) -> str:
        return f"shards/{self.slice_id}"

    async def write(self, epoch: int, number: int, answers: list[Answer]) -> None:
        data = msgspec.json.Encoder().encode_lines(answers)
        self.storage.check_room(len(data), ANSWERS_RESERVE)
        await self.storage.put(f"{self.folder}/{epoch:08d}-{number:08d}", data)

    async def segments(self) -> list[str]:
        """Return the names of the segments, earliest epoch first."""
        return [key.rsplit("/", 1)[-1] for key in await self.storage.keys(self.folder)]

    async def answers(
        self, segments: Sequence[str] | None = None, at_once: int = READ_SEGMENTS
    ) -> AsyncIterator[Answer]:
        """Yield every answer, or those of these segments, in order. A request may come twice.

        `at_once`: how many segments are held in memory. Raises FileNotFoundError for a segment that is gone.
        """
        names = await self.segments() if segments is None else segments
        keys = [f"{self.folder}/{name}" for name in names]
        for at in range(0, len(keys), at_once):
            chunk = keys[at : at + at_once]
            for key, segment in zip(chunk, await asyncio.gather(*map(self.storage.read, chunk)), strict=True):
                for line in segment.split(b"\n"):
                    if line:
                        try:
                            yield _decoder.decode(line)
                        except msgspec.DecodeError:
                            # A power cut tore it before it was synced, so its answers were never counted.
                            log.exception("segment is damaged", key=key)
