"""Remembers how long a project's answers were, for the batches that come after (docs/planner.md)."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
import structlog
from numpy.typing import NDArray
from sqlalchemy import delete, select
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncSession

from engine_ext.errors import InputError
from engine_ext.plan.memory import Keys, Profile, learn
from service.db.sessions import Database
from service.db.tables import Batch, LengthProfile
from service.db.tenant_tables import Project
from service.endpoints import ModelName
from service.objects.request_index import RequestIndex
from service.objects.storage import Storage

MOST_ANSWERS = 4096.0  # that a profile counts; more recent ones replace older ones
MOST_PROFILES = 512  # of a project and model, the last ones that were seen
MOST_SOUGHT = 1000  # profiles for one plan: those of the most requests
BLOCK, BLOCKS = 1024, 64  # requests from whose answers a batch's lengths are learned
log = structlog.get_logger()


async def remembered(session: AsyncSession, keys: Keys) -> Mapping[int, str]:
    """Return the profiles, as text by key, that earlier batches left for requests with these keys."""
    sought, counts = np.unique(keys[keys != 0], return_counts=True)
    sought = sought[np.argsort(-counts, kind="stable")][:MOST_SOUGHT]
    if not len(sought):
        return {}
    found = select(LengthProfile.key, LengthProfile.profile).where(LengthProfile.key.in_(sought.tolist()))
    return dict((await session.execute(found)).tuples().all())


def profiles_of(texts: Mapping[int, str]) -> dict[int, Profile]:
    """Read profiles; one that another version of the service wrote, and this one cannot read, is left out."""
    found: dict[int, Profile] = {}
    for key, text in texts.items():
        try:
            found[key] = Profile.parse(text)
        except InputError as error:
            log.warning("profile of lengths left out", key=key, reason=str(error))
    return found


async def remember(database: Database, storage: Storage, batch: Batch, tokens: NDArray[np.int32], now: float) -> None:
    """Learn from a completed batch; `tokens`: int32 [requests], the length of each answer, 0 where there is none."""
    async with database.read() as session:
        if not await session.scalar(select(Project.remembers_lengths).where(Project.id == batch.project_id)):
            return
    firsts, counts = _blocks(batch.total)
    keys = await RequestIndex(storage, batch.index_id or "").keys(firsts, counts)
    lengths = np.concatenate([tokens[first : first + count] for first, count in zip(firsts, counts, strict=True)])
    answered = lengths > 0
    lessons = await asyncio.to_thread(learn, keys[answered], lengths[answered].astype(np.int64), MOST_PROFILES)
    if lessons:
        async with database.write() as session:
            # Locked, so that a project that is to be forgotten meanwhile stays so.
            locked = select(Project.remembers_lengths).where(Project.id == batch.project_id).with_for_update()
            if await session.scalar(locked):
                await _keep(session, batch, lessons, int(now))


async def forget(session: AsyncSession, project_id: str) -> None:
    """Forget all that is remembered of a project."""
    await session.execute(delete(LengthProfile).where(LengthProfile.project_id == project_id))


def _blocks(total: int) -> tuple[Sequence[int], Sequence[int]]:
    """Return the first request and the number of requests of each block to learn from, all of a small batch."""
    if total <= BLOCK * BLOCKS:
        return [0], [total]
    return np.linspace(0, total - BLOCK, BLOCKS).astype(np.int64).tolist(), [BLOCK] * BLOCKS


async def _keep(session: AsyncSession, batch: Batch, lessons: Mapping[int, Profile], now: int) -> None:
    """Add the lessons to the profiles. Of two batches that end together, the lessons of one may be lost."""
    name = str(ModelName(batch.model or "", batch.adapter))
    known = profiles_of(await remembered(session, np.array(list(lessons))))
    rows = [
        {
            "key": key,
            "project_id": batch.project_id,
            "model": name,
            "profile": (known[key].plus(lessons[key], MOST_ANSWERS) if key in known else lessons[key]).text,
            "seen_at": now,
        }
        for key in sorted(lessons)  # in one order everywhere, so that no two transactions wait for each other
    ]
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    adding = insert(LengthProfile)
    new = {"profile": adding.excluded.profile, "seen_at": adding.excluded.seen_at}
    await session.execute(adding.on_conflict_do_update(index_elements=["key"], set_=new), rows)
    mine = (LengthProfile.project_id == batch.project_id) & (LengthProfile.model == name)
    last = select(LengthProfile.key).where(mine).order_by(LengthProfile.seen_at.desc(), LengthProfile.key)
    await session.execute(delete(LengthProfile).where(mine, LengthProfile.key.not_in(last.limit(MOST_PROFILES))))
    log.info("lengths remembered", batch=batch.id, profiles=len(rows))
