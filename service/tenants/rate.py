"""Enforces projects' limits of API requests per minute, counted in Redis; without Redis there is no limit."""

from typing import Any, cast

import structlog
from redis.asyncio import Redis
from redis.exceptions import RedisError

from service.db.tenant_tables import Project
from service.errors import QuotaReached
from service.queue import keys

MINUTE_S = 60
# KEYS: counter. ARGV: its time to live in seconds.
_COUNT = """
local count = redis.call('INCR', KEYS[1])
if count == 1 then redis.call('EXPIRE', KEYS[1], ARGV[1]) end
return count
"""
log = structlog.get_logger()


async def count_request(redis: Redis, project: Project, now: float) -> None:
    """Count a request of the project. Raises QuotaReached if it exceeds this minute's limit."""
    most = project.max_requests_per_minute
    if most is None:
        return
    minute = int(now // MINUTE_S)
    try:
        count = int(await cast(Any, redis.eval(_COUNT, 1, keys.rate(project.id, minute), str(2 * MINUTE_S))))
    except (RedisError, OSError) as error:
        log.warning("cannot count requests; the rate limit is not enforced", project=project.id, error=repr(error))
        return
    if count > most:
        message = f"The project may send at most {most} requests per minute to the API."
        raise QuotaReached(message, int((minute + 1) * MINUTE_S - now) + 1, code="rate_limit_exceeded")
