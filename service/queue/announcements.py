"""Telling workers which slices are ready, over a Redis stream. A message is a hint: the lease in SQL decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from service.queue import keys

# A stream is first in, first out: what is not announced yet can still be overtaken by what is more urgent.
MOST_ANNOUNCED = 64

# KEYS: stream, announced. ARGV: the most that may be announced, slice ids. Adds to the stream what is not in it yet.
_ANNOUNCE = """
local added = 0
for at = 2, #ARGV do
  local id = ARGV[at]
  if redis.call('SCARD', KEYS[2]) >= tonumber(ARGV[1]) then
    break
  end
  if redis.call('SADD', KEYS[2], id) == 1 then
    redis.call('XADD', KEYS[1], '*', 'slice', id)
    added = added + 1
  end
end
return added
"""

# KEYS: stream, announced. ARGV: group, message id, slice id. Takes a message out for good.
_TAKE_OUT = """
redis.call('XACK', KEYS[1], ARGV[1], ARGV[2])
redis.call('SREM', KEYS[2], ARGV[3])
return redis.call('XDEL', KEYS[1], ARGV[2])
"""


@dataclass(frozen=True, slots=True)
class Announcement:
    message_id: str
    slice_id: int


class Announcements:
    """The stream of one model."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._redis = redis
        self._keys = [keys.stream(model), keys.announced(model)]
        self._announce = redis.register_script(_ANNOUNCE)
        self._take_out = redis.register_script(_TAKE_OUT)

    async def announce(self, slice_ids: Sequence[int]) -> int:
        """Announce in this order what is not announced already, as far as there is room; returns how many were new."""
        return int(await self._announce(keys=self._keys, args=[MOST_ANNOUNCED, *slice_ids]))

    async def next(self, consumer: str, block_ms: int) -> Announcement | None:
        """The next announced slice, or None after `block_ms`; the caller takes it out once it knows what it is."""
        stream = self._keys[0]
        try:
            reply: Any = await self._redis.xreadgroup(keys.GROUP, consumer, {stream: ">"}, count=1, block=block_ms)
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            await self._create_group()
            return None
        found = _messages(reply)
        return found[0] if found else None

    async def take_out(self, announcement: Announcement) -> None:
        await self._take_out(keys=self._keys, args=[keys.GROUP, announcement.message_id, announcement.slice_id])

    async def take_back(self, idle_ms: int) -> int:
        """Take out what was read `idle_ms` ago by a worker that then died; a ready slice is announced again."""
        try:
            reply: Any = await self._redis.xautoclaim(
                self._keys[0], keys.GROUP, "reconciler", min_idle_time=idle_ms, start_id="0-0", count=1000
            )
        except ResponseError as error:
            if "NOGROUP" not in str(error):
                raise
            return 0
        stale = _parse(reply[1])
        for announcement in stale:
            await self.take_out(announcement)
        return len(stale)

    async def _create_group(self) -> None:
        try:
            await self._redis.xgroup_create(self._keys[0], keys.GROUP, id="0", mkstream=True)
        except ResponseError as error:
            if "BUSYGROUP" not in str(error):
                raise


def _messages(reply: Any) -> list[Announcement]:
    """Both shapes of XREADGROUP's reply: a list of pairs (RESP2), or a map (RESP3)."""
    if not reply:
        return []
    if isinstance(reply, dict):
        batches = next(iter(reply.values()))
        return _parse(batches[0] if batches and isinstance(batches[0], list) else batches)
    return _parse(reply[0][1])


def _parse(messages: Any) -> list[Announcement]:
    return [Announcement(_text(message_id), int(fields[b"slice"])) for message_id, fields in messages if fields]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
