"""Tells workers through Redis which slices are ready. An announcement is only a hint: the lease in SQL decides.

The first announced slice says whose turn it is: which project's, and of which window and pool. Among these slices a
worker prefers the one that follows a slice that it has, because neighbours share prefixes; without one it begins a
stretch of its own.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from service.queue import keys

# Announced slices are read with each look of a worker. More of them would not let workers keep longer stretches.
MOST_ANNOUNCED = 64
CLAIM_S = 5.0  # a worker claims a slice that it took sooner than this, or has died; claims are fenced

# KEYS: announced slices, those taken, wakes, whether there may be more. ARGV: the most that are announced, milliseconds
# for a claim, and the ready slices in their order. Replaces what is announced, without what was just taken. Returns how
# many slices are new.
_ANNOUNCE = """
local time = redis.call('TIME')
local now, known = time[1] * 1000 + math.floor(time[2] / 1000), {}
local taken = redis.call('HGETALL', KEYS[2])
for at = 1, #taken, 2 do
  if now - tonumber(taken[at + 1]) >= tonumber(ARGV[2]) then redis.call('HDEL', KEYS[2], taken[at])
  else known[taken[at]] = 'taken' end
end
for _, each in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do known[string.match(each, '%d+')] = 'announced' end
redis.call('DEL', KEYS[1])
local added, announced = 0, 0
for at = 3, #ARGV do
  local id = string.match(ARGV[at], '%d+')
  if announced < tonumber(ARGV[1]) and known[id] ~= 'taken' then
    redis.call('RPUSH', KEYS[1], ARGV[at])
    announced = announced + 1
    if not known[id] then added = added + 1 end
  end
end
if #ARGV - 2 >= tonumber(ARGV[1]) then redis.call('SET', KEYS[4], 1) else redis.call('DEL', KEYS[4]) end
if added > 0 then redis.call('XADD', KEYS[3], 'MAXLEN', 1, '*', 'added', added) end
return added
"""

# KEYS: announced slices, those taken, wakes. ARGV: how many slices and how many adapters this worker has, these slices,
# these adapters, and the slices that other workers have. Takes one slice and returns it, or returns the id of the last
# wake. Slices for adapters that the worker lacks are not there for it.
_TAKE = """
local mine, theirs, served, all = {}, {}, {[''] = true}, {}
local adapters, others = tonumber(ARGV[1]) + 3, tonumber(ARGV[1]) + tonumber(ARGV[2]) + 3
for at = 3, #ARGV do
  if at < adapters then mine[tonumber(ARGV[at])] = true
  elseif at < others then served[ARGV[at]] = true
  else theirs[tonumber(ARGV[at])] = true end
end
for _, each in ipairs(redis.call('LRANGE', KEYS[1], 0, -1)) do
  if served[string.match(each, '[^ ]*$')] then all[#all + 1] = each end
end
if #all == 0 then
  local last = redis.call('XREVRANGE', KEYS[3], '+', '-', 'COUNT', 1)
  return {false, last[1] and last[1][1] or '0-0'}
end
local turn, stretches, chosen = string.match(all[1], '%d+ %d+ (.+)'), {}, nil
for at, each in ipairs(all) do
  if string.match(each, '%d+ %d+ (.+)') == turn then
    local id, stretch = tonumber(string.match(each, '%d+')), stretches[#stretches]
    if mine[id - 1] and not chosen then chosen = at end
    if stretch and stretch.last + 1 == id then
      stretch.last, stretch.places[#stretch.places + 1] = id, at
    else
      stretches[#stretches + 1] = {first = id, last = id, places = {at}}
    end
  end
end
if not chosen then
  chosen = 1
  if next(theirs) then
    local longest = stretches[1]
    for _, each in ipairs(stretches) do if #each.places > #longest.places then longest = each end end
    -- Another worker comes to it from before: begin in its middle.
    local begin = theirs[longest.first - 1] and math.floor(#longest.places / 2) + 1 or 1
    chosen = longest.places[begin]
  end
end
local id = string.match(all[chosen], '%d+')
local time = redis.call('TIME')
redis.call('LREM', KEYS[1], 1, all[chosen])
redis.call('HSET', KEYS[2], id, time[1] * 1000 + math.floor(time[2] / 1000))
return {id, false}
"""


@dataclass(frozen=True, slots=True)
class Ready:
    """A slice to announce, all of whose requests are for one adapter, or for none: ''.

    `project_id`: the project whose turn it is; the slice may also hold requests of others.

    The ids of a window's slices rise in the order of its plan, except those of slices that were handed over.
    """

    slice_id: int
    requests: int
    window_id: int
    pool: int
    project_id: str
    adapter: str = ""

    def __str__(self) -> str:
        return f"{self.slice_id} {self.requests} {self.window_id} {self.pool} {self.project_id} {self.adapter}"


class Announcements:
    """Writes what is announced of one model, and reads it for a worker with these adapters."""

    def __init__(self, redis: Redis, model: str, adapters: Collection[str] = ()) -> None:
        self._redis = redis
        self._adapters = list(adapters)
        self._wakes = keys.wakes(model)
        self._keys = [keys.ready(model), keys.taken(model), self._wakes, keys.more(model)]
        self._announce = redis.register_script(_ANNOUNCE)
        self._take = redis.register_script(_TAKE)

    async def announce(self, ready: Sequence[Ready]) -> int:
        """Announce these slices in this order, as far as there is room, and no others. Returns how many were new."""
        wanted = [str(each) for each in ready]
        return int(await self._announce(keys=self._keys, args=[MOST_ANNOUNCED, int(CLAIM_S * 1000), *wanted]))

    async def head(self) -> int | None:
        """Return the slice whose turn it is, without taking it."""
        found: Any = await self._redis.lrange(self._keys[0], 0, -1)  # pyright: ignore[reportGeneralTypeIssues]
        return next((int(each.split()[0]) for each in found if self._serves(each)), None)

    async def waiting(self) -> float:
        """Return how many requests the announced slices have; infinity if there may be slices besides them."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.lrange(self._keys[0], 0, -1)
        pipeline.exists(self._keys[3])
        found, more = await pipeline.execute()
        return math.inf if more else sum(int(each.split()[1]) for each in found if self._serves(each))

    async def take(self, mine: Collection[int] = (), theirs: Collection[int] = (), block_ms: int = 0) -> int | None:
        """Take the next slice for a worker that has the slices `mine`; return None if there is none for `block_ms`.

        `theirs`: slices of other workers. The caller says `forget_taken` after its claim.
        """
        args = [len(mine), len(self._adapters), *mine, *self._adapters, *theirs]
        slice_id, wake = await self._take(keys=self._keys[:3], args=args)
        if not slice_id and block_ms:
            await self._redis.xread({self._wakes: wake}, count=1, block=block_ms)
            slice_id, _ = await self._take(keys=self._keys[:3], args=args)
        return int(slice_id) if slice_id else None

    def _serves(self, announced: bytes) -> bool:
        return announced.decode().rpartition(" ")[2] in ("", *self._adapters)

    async def forget_taken(self, slice_id: int) -> None:
        """Forget that a slice was taken, once its claim succeeded or failed; if it is ready, it may be announced."""
        await self._redis.hdel(self._keys[1], str(slice_id))  # pyright: ignore[reportGeneralTypeIssues]
