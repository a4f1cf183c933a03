"""Calls a roll in Redis: each member writes a line about itself, and reads those of the members that are there."""

from typing import Any

SILENT_S = 15.0  # a member that has written nothing for so long is not there

# KEYS: the roll. ARGV: a member, its line or nothing, and after how many milliseconds a silent member is left out.
# Writes the member's line, and returns all others with theirs: name, line, name, line and so on.
CALL = """
local time = redis.call('TIME')
local now, found = time[1] * 1000 + math.floor(time[2] / 1000), {}
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], ARGV[1], now .. ' ' .. ARGV[2]) end
local all = redis.call('HGETALL', KEYS[1])
for at = 1, #all, 2 do
  local seen, line = string.match(all[at + 1], '(%d+) (.*)')
  if now - tonumber(seen) > tonumber(ARGV[3]) then redis.call('HDEL', KEYS[1], all[at])
  elseif all[at] ~= ARGV[1] then
    found[#found + 1] = all[at]
    found[#found + 1] = line
  end
end
return found
"""


def arguments(name: str, line: str) -> list[Any]:
    """Return the script's arguments for a member; with an empty line it only reads."""
    return [name, line, int(SILENT_S * 1000)]


def members(found: list[bytes]) -> dict[str, bytes]:
    """Return the lines of the other members by their names, from the script's result."""
    return dict(zip((each.decode() for each in found[::2]), found[1::2], strict=True))
