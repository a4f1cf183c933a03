"""/v1/workers: the workers that run the slices. For operators, because they serve all projects."""

from typing import Annotated

from fastapi import APIRouter, Path
from pydantic import StringConstraints
from redis.exceptions import RedisError
from sqlalchemy.ext.asyncio import AsyncSession

from service.api.caller import CalledByMonitor, CalledByOperator
from service.api.context import Context, InContext
from service.api.shapes import Page
from service.api.worker_shapes import WorkerObject, WorkerResumed
from service.db.drains import drain, drained_workers, resume
from service.errors import NotFound, Unavailable
from service.tenants import audit
from service.tenants.keys import Caller

WorkerName = Annotated[str, StringConstraints(pattern=r"^[^\x00]+$", max_length=256), Path()]

router = APIRouter(prefix="/v1/workers", tags=["workers"])


@router.get("")
async def list_workers(context: InContext, _caller: CalledByMonitor) -> Page[WorkerObject]:
    """List the workers that are alive or starting."""
    found = await alive_workers(context)
    return Page[WorkerObject].of(found, len(found))


@router.post("/{name:path}/drain")
async def drain_worker(name: WorkerName, context: InContext, caller: CalledByOperator) -> WorkerObject:
    """Drain a worker: it finishes the slices it has and takes no new ones, even after a restart under the same name."""
    worker = await _find(context, name)
    async with context.database.write() as session:
        await drain(session, name, context.clock())
        _note(session, caller, "worker.drain", name, context)
    return worker.model_copy(update={"state": "draining"})


@router.post("/{name:path}/resume")
async def resume_worker(name: WorkerName, context: InContext, caller: CalledByOperator) -> WorkerResumed:
    """Let a drained worker take slices again. If it is not alive, the next one of its name does not start drained."""
    alive = {worker.id: worker for worker in await alive_workers(context)}
    async with context.database.write() as session:
        if not await resume(session, name) and name not in alive:
            raise NotFound(f"No worker named {name!r} is alive or drained.", param="name")
        _note(session, caller, "worker.resume", name, context)
    return WorkerResumed(id=name)


async def alive_workers(context: Context) -> list[WorkerObject]:
    """Return the workers by name, starting ones last. Raises Unavailable without Redis, the only record of them."""
    try:
        states, starting = await context.heartbeat.everyone()
    except (RedisError, OSError) as error:
        raise Unavailable("The workers are unknown while Redis is not responding.", code="redis_unavailable") from error
    async with context.database.read() as session:
        drained = await drained_workers(session)
    alive = [WorkerObject.of(state, state["name"] in drained) for state in states]
    return [*alive, *(WorkerObject.of_starting(state, context.clock()) for state in starting)]


async def _find(context: Context, name: str) -> WorkerObject:
    for worker in await alive_workers(context):
        if worker.id == name:
            return worker
    raise NotFound(f"No worker named {name!r} is alive.", param="name")


def _note(session: AsyncSession, caller: Caller, action: str, name: str, context: Context) -> None:
    audit.note(session, caller, action, name[:64], context.clock())
