"""Opens Redis connections that fail fast when Redis is unavailable: callers that need it retry, others do without."""

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

CONNECT_S, ANSWER_S = 2.0, 10.0


def open_redis(url: str, answer_s: float = ANSWER_S) -> Redis:
    """Return a client for a `redis://…`, `rediss://…` or `unix://…` URL; it connects on first use."""
    return Redis.from_url(
        url, socket_connect_timeout=CONNECT_S, socket_timeout=answer_s, retry=Retry(ConstantBackoff(0.05), 1)
    )
