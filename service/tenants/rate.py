"""How many requests a project sends in a minute, counted in Redis; without Redis nobody is refused for it."""

from typing import Any, cast

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.db.tables import Project
from service.errors import QuotaReached
from service.queue import keys

MINUTE_S = 60
# KEYS: counter. ARGV: seconds that it lives.
_COUNT = """
local count = redis.call('INCR', KEYS[1])
if count == 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return count
"""
log = structlog.get_logger()


async def count_request(redis: Redis, project: Project, now: float) -> None:
    """Note a request of the project. Raises QuotaReached when the minute has no room for it."""
    most = project.max_requests_per_minute
    if most is None:
        return
    minute = int(now // MINUTE_S)
    try:
        count = int(await cast(Any, redis.eval(_COUNT, 1, keys.rate(project.id, minute), str(2 * MINUTE_S))))
    except (RedisError, OSError) as error:
        log.warning("requests are not counted", project=project.id, error=repr(error))
        return
    if count > most:
        message = f"The project may send {most} requests to the API in a minute."
        raise QuotaReached(message, int((minute + 1) * MINUTE_S - now) + 1, code="rate_limit_exceeded")
