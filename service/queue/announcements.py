"""Tells workers over a Redis stream which slices are ready. A message is only a hint: the lease in SQL decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ResponseError

from service.queue import keys

# A small limit leaves few unread entries to take out and add again when a more urgent slice has to go before them.
MOST_ANNOUNCED = 64

# Sets `last` to the id of the entry that the group, ARGV[1], read last in the stream, KEYS[1].
_LAST_READ = """
local last = '0-0'
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local about = {}
    for at = 1, #group, 2 do about[group[at]] = group[at + 1] end
    if about['name'] == ARGV[1] then last = about['last-delivered-id'] end
  end
end
"""

# KEYS: stream, announced. ARGV: group, the most that may be announced, slice ids in their order. Adds to the stream the
# slices that it lacks. A stream is first in, first out: from the first unread entry that is out of order, all unread
# entries are taken out and added again in order. Returns how many slices were new.
_ANNOUNCE = (
    _LAST_READ
    + """
local unread, waits = redis.call('XRANGE', KEYS[1], '(' .. last, '+'), {}
for _, message in ipairs(unread) do waits[message[2][2]] = true end
local wanted, room = {}, tonumber(ARGV[2]) - redis.call('SCARD', KEYS[2]) + #unread
for at = 3, #ARGV do
  local id = ARGV[at]
  if #wanted < room and (waits[id] or redis.call('SISMEMBER', KEYS[2], id) == 0) then wanted[#wanted + 1] = id end
end
local same = 0
while unread[same + 1] and unread[same + 1][2][2] == wanted[same + 1] do same = same + 1 end
for at = same + 1, #unread do
  redis.call('XDEL', KEYS[1], unread[at][1])
  redis.call('SREM', KEYS[2], unread[at][2][2])
end
local added = 0
for at = same + 1, #wanted do
  redis.call('SADD', KEYS[2], wanted[at])
  redis.call('XADD', KEYS[1], '*', 'slice', wanted[at])
  if not waits[wanted[at]] then added = added + 1 end
end
return added
"""
)

# KEYS: stream. ARGV: group. Returns the slice that is read next, if any.
_HEAD = (
    _LAST_READ
    + """
local unread = redis.call('XRANGE', KEYS[1], '(' .. last, '+', 'COUNT', 1)
return unread[1] and unread[1][2][2] or false
"""
)

# KEYS: stream, announced. ARGV: group, message id, slice id. Removes a message from the stream.
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
    """Writes and reads the stream of one model."""

    def __init__(self, redis: Redis, model: str) -> None:
        self._redis = redis
        self._keys = [keys.stream(model), keys.announced(model)]
        self._announce = redis.register_script(_ANNOUNCE)
        self._head = redis.register_script(_HEAD)
        self._take_out = redis.register_script(_TAKE_OUT)

    async def announce(self, slice_ids: Sequence[int]) -> int:
        """Announce these slices in this order, as far as there is room, and take out all other unread ones.

        Returns how many were new.
        """
        return int(await self._announce(keys=self._keys, args=[keys.GROUP, MOST_ANNOUNCED, *slice_ids]))

    async def head(self) -> int | None:
        """Return the slice that is announced next, without taking it."""
        found = await self._head(keys=self._keys[:1], args=[keys.GROUP])
        return int(found) if found else None

    async def next(self, consumer: str, block_ms: int) -> Announcement | None:
        """Return the next announced slice, or None after `block_ms`; the caller takes it out when done with it."""
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
        """Take out messages that a worker read `idle_ms` ago before it died; ready slices are announced again."""
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
    """Parse both shapes of XREADGROUP's reply: a list of pairs (RESP2) or a map (RESP3)."""
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
