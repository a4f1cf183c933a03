"""/healthz says whether the process runs, /readyz whether everything that it needs responds too."""

import asyncio
from collections.abc import Awaitable
from typing import Any, Literal, cast

import structlog
from fastapi import APIRouter
from pydantic import BaseModel

from service.api.context import InContext
from service.errors import Unavailable
from service.queue.progress import STALLED_S

CHECK_S = 5.0
log = structlog.get_logger()

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: str = "ok"


class Readiness(BaseModel):
    status: Literal["ready", "storage_full"] = "ready"  # storage_full: uploads are refused; deletes and cancels are not
    workers: int  # alive
    starting: int = 0  # whose engine is starting
    stalled: int = 0  # alive, but their engine has finished no step for half a minute while requests wait
    step_age_s: float = 0.0  # longest time since a step ended, among workers with requests
    storage_free_bytes: int | None = None  # if object storage is on a local disk
    folder: str  # a digest of the data folder's path, by which a command on the same machine knows its service


@router.get("/healthz")
async def healthz() -> Health:
    return Health()


@router.get("/readyz")
async def readyz(context: InContext) -> Readiness:
    """Report whether the service is ready; if a part does not respond, return 503 with its name."""
    checks = {
        "database": context.database.check(),
        "redis": cast(Awaitable[object], context.redis.ping()),
        "storage": context.storage.check(),
        "workers": context.heartbeat.everyone(),
    }
    results: list[object] = await asyncio.gather(
        *(asyncio.wait_for(check, CHECK_S) for check in checks.values()), return_exceptions=True
    )
    for name, result in zip(checks, results, strict=True):
        if isinstance(result, BaseException):
            log.warning("not ready", part=name, error=repr(result))
            raise Unavailable(f"{name} is not responding.", code="not_ready", param=name)
    alive, starting = cast(tuple[list[dict[str, Any]], list[object]], results[-1])
    ages = [float(state.get("step_age_s", 0.0)) for state in alive]
    stalled = sum(age > STALLED_S for age in ages)
    room = context.storage.room
    return Readiness(
        status="storage_full" if room and room.is_short else "ready",
        workers=len(alive),
        starting=len(starting),
        stalled=stalled,
        step_age_s=max(ages, default=0.0),
        storage_free_bytes=room.free_bytes if room else None,
        folder=context.settings.folder_digest,
    )
