"""The dependencies that every route uses, created once per process."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, cast

from fastapi import Depends, Request
from redis.asyncio import Redis

from service.api.body_bytes import BodyBytes
from service.api.relay import Relay
from service.api.remembered import Remembered
from service.db.sessions import Database
from service.estimates.serving import ServingCache
from service.objects.early_results import EarlyResults
from service.objects.storage import Storage
from service.queue.bell import Bell
from service.queue.progress import Heartbeat, Progress
from service.settings import Settings
from service.tenants.keys import Caller
from service.webhooks.secrets import Seal


@dataclass(frozen=True, slots=True)
class Context:
    database: Database
    storage: Storage
    redis: Redis
    settings: Settings
    clock: Callable[[], float]
    early: EarlyResults
    progress: Progress
    serving_cache: ServingCache
    bell: Bell
    seal: Seal
    relay: Relay
    body_bytes: BodyBytes
    callers: Remembered[str | None, Caller]  # by API key
    endpoints: Remembered[str, list[str]]  # by model

    @property
    def heartbeat(self) -> Heartbeat:
        return Heartbeat(self.redis)


async def _context(request: Request) -> Context:  # else FastAPI calls it in a thread
    return cast(Context, request.app.state.context)


InContext = Annotated[Context, Depends(_context)]
