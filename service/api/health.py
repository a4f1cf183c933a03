"""/healthz: the process runs. /readyz: what it needs answers too."""

import asyncio
from collections.abc import Awaitable
from typing import cast

import structlog
from fastapi import APIRouter
from pydantic import BaseModel

from service.api.context import Here
from service.errors import Unavailable

CHECK_S = 5.0
log = structlog.get_logger()

router = APIRouter(tags=["health"])


class Health(BaseModel):
    status: str = "ok"


class Readiness(BaseModel):
    status: str = "ready"
    workers: int


@router.get("/healthz")
async def healthz() -> Health:
    return Health()


@router.get("/readyz")
async def readyz(here: Here) -> Readiness:
    """503 with the part that does not answer."""
    checks = {
        "database": here.database.check(),
        "redis": cast(Awaitable[object], here.redis.ping()),
        "storage": here.storage.check(),
        "workers": here.heartbeat.alive(),
    }
    results: list[object] = await asyncio.gather(
        *(asyncio.wait_for(check, CHECK_S) for check in checks.values()), return_exceptions=True
    )
    for name, result in zip(checks, results, strict=True):
        if isinstance(result, BaseException):
            log.warning("not ready", part=name, error=repr(result))
            raise Unavailable(f"{name} does not answer.", code="not_ready", param=name)
    return Readiness(workers=len(cast(list[object], results[-1])))
