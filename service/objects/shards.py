"""A slice's result shard: segments of answers, each written in one atomic step, so that no segment is ever torn.

Object stores cannot append. Every half second a worker writes its new answers as a new segment, named by its lease's
epoch and a number that counts from 0; the answers in a segment are final. When two epochs answered the same request,
the earlier segment counts.

Listings of many stores are late, so nothing is found by one: the slice's row says how many segments each epoch has, and
where an owner never said it, because it died or still runs, they are asked for by name.
"""

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import structlog

from service.objects.storage import ANSWERS_RESERVE, Storage

READ_SEGMENTS = 16  # at once,
SMALL_SEGMENT = 8 * 1024 * 1024  # as far as they are no larger; of a larger one only the line that is read is in memory
AHEAD = 4  # segments that are asked for at once; so many in a row that are not there are the end

Said = Sequence[Sequence[int | None]] | None  # Slice.segments: pairs of an epoch and its segments, in order
Told = list[tuple[int, int | None]]  # each epoch that may have segments, and how many; None: nobody said
log = structlog.get_logger()


class Usage(msgspec.Struct, frozen=True, array_like=True):
    """The tokens of one request: of its answer, and of those before it that were not accepted.

    `last`: the output of the last answer, where there were others; else 0.
    """

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    last: int = 0

    @property
    def answer(self) -> int:
        """The output of the answer alone."""
        return self.last or self.output


class Outcome(StrEnum):
    """What an answer is worth to its request. What failed has no answer."""

    OK = ""  # written the most often, so the shortest
    CUT_OFF = "cut_off"  # by max_tokens, or the context's end
    INVALID = "invalid"  # it ended, and is not the JSON that was asked for
    REFUSED = "refused"  # the model refused, or a filter did
    LOOPED = "looped"  # cut off while it repeated itself


class RetryOutcome(StrEnum):
    """Whose requests a retry repeats: those that failed or did not run, or whose answer has this outcome."""

    FAILED = "failed"
    CUT_OFF = Outcome.CUT_OFF
    LOOPED = Outcome.LOOPED
    INVALID = Outcome.INVALID
    REFUSED = Outcome.REFUSED


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """One answered request. `line` is its complete line of the output or error file.

    `outcome`: what the answer is worth; one that is not `ok` in the API's sense has one if it was not accepted.
    """

    batch_id: str
    request: int
    ok: bool
    usage: Usage
    line: msgspec.Raw
    outcome: Outcome = Outcome.OK


_decoder = msgspec.json.Decoder(Answer)


def told(said: Said, epoch: int) -> Told:
    """Return what is known of the segments of a slice at this epoch.

    The last pair that was said has the epoch up to which all was said. Epochs after it, and all of a slice of an older
    version of this service, may have segments of which nobody said anything.
    """
    pairs = [(int(each or 0), count) for each, count in said or ()]
    last = pairs[-1][0] if pairs else 0
    return [*(pair for pair in pairs if pair[1] != 0), *((each, None) for each in range(last + 1, epoch + 1))]


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
        await self.storage.put(self._key(_name(epoch, number)), data)

    def _key(self, name: str) -> str:
        return f"{self.folder}/{name}"

    async def names(self, told: Told, read: Collection[str] = ()) -> list[str]:
        """Return the names of these epochs' segments, earliest epoch first, without those that are already `read`."""
        found: list[str] = []
        for epoch, count in told:
            if count is None:
                found += await self._asked_for(epoch, read)
            else:
                found += [name for number in range(count) if (name := _name(epoch, number)) not in read]
        return found

    async def _asked_for(self, epoch: int, read: Collection[str]) -> list[str]:
        """Return the segments of an epoch of which nobody said how many it has."""
        found, missing, number = list[str](), 0, 0
        while _name(epoch, number) in read:
            number += 1
        while missing < AHEAD:
            names = [_name(epoch, number + more) for more in range(AHEAD)]
            for name, is_there in zip(names, await asyncio.gather(*map(self._has, names)), strict=True):
                missing = 0 if is_there else missing + 1
                if is_there and name not in read:
                    found.append(name)
            number += AHEAD
        return found

    async def _has(self, name: str) -> bool:
        return await self.storage.has(self._key(name))

    async def answers(
        self, names: Sequence[str], at_once: int = READ_SEGMENTS, gone: list[str] | None = None
    ) -> AsyncIterator[Answer]:
        """Yield the answers of these segments, in order. A request may come twice.

        `at_once`: how many small segments are held in memory. The keys of segments that are not there are added to
        `gone`; without it they raise FileNotFoundError.
        """
        keys = [self._key(name) for name in names]
        for at in range(0, len(keys), at_once):
            chunk = keys[at : at + at_once]
            for key, segment in zip(
                chunk, await asyncio.gather(*(self._read(each, gone) for each in chunk)), strict=True
            ):
                async for line in self._lines(key, segment):
                    if line:
                        try:
                            yield _decoder.decode(line)
                        except msgspec.DecodeError:
                            # A power cut tore it before it was synced, so its answers were never counted.
                            log.exception("segment is damaged", key=key)

    async def _read(self, key: str, gone: list[str] | None) -> bytes | None:
        """Return a small segment; None for a large one."""
        try:
            return await self.storage.read_small(key, SMALL_SEGMENT)
        except FileNotFoundError:
            if gone is None:
                raise
            gone.append(key)
            return b""

    async def _lines(self, key: str, segment: bytes | None) -> AsyncIterator[bytes]:
        if segment is None:  # asked for again when it is its turn, so that no connection waits for others to be read
            async for _, line in self.storage.lines(key):
                yield line
            return
        for line in segment.split(b"\n"):
            yield line


def _name(epoch: int, number: int) -> str:
    return f"{epoch:08d}-{number:08d}"


def segments_of(names: Sequence[str], epochs: Sequence[int]) -> Told:
    """Return how many segments each of these epochs has if it has those of these names."""
    counts = dict.fromkeys(epochs, 0)
    for epoch, number in (map(int, name.split("-")) for name in names):
        counts[epoch] = max(counts[epoch], number + 1)
    return list(counts.items())
