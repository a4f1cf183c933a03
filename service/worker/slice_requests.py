"""Reads the requests of one leased slice, without those that are answered, and divides them among workers."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray
from sqlalchemy import select

from engine_ext.plugin.marks import Terms
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, SliceBatch, Window
from service.db.tenant_tables import Project
from service.estimates.length_memory import remembered
from service.objects.plan_artifact import LINE, Lines, Places, PlanArtifact
from service.objects.request_index import IndexGone, RequestIndex, forget_index
from service.objects.request_output import with_limit
from service.objects.shards import Shard, Told, segments_of
from service.objects.storage import LATE_S, Storage, file_key
from service.queue.counts import Counts
from service.queue.crew import LEAST
from service.queue.leases import Lease
from service.queue.parts import Part, places_of
from service.requests.accept import Accept, known
from service.requests.lines import RequestLine


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request of the slice, ready to run. `place`: its position in the window's plan; `size`: bytes of its line."""

    batch_id: str
    number: int
    endpoint: str
    custom_id: str
    body: dict[str, Any]
    place: int
    size: int
    accept: Accept
    terms: Terms
    request_id: str = field(default_factory=lambda: f"req_{secrets.token_hex(16)}")  # in its answer line and in the log


@dataclass(frozen=True, slots=True)
class Loaded:
    """The unanswered requests of a slice's live batches, in the order of the plan.

    `places`: int64 [requests of the slice], the positions of all its requests in the window's plan. `counts`: its
    durable answers by batch. `segments`: how many segments the slice's earlier leases wrote.
    """

    requests: list[Request]
    places: NDArray[np.int64]
    batch_ids: set[str]
    counts: dict[str, Counts]
    segments: Told


AT_ONCE = 1 << 20  # bytes of lines that are decoded before streams have their turn
log = structlog.get_logger()
_line_decoder = msgspec.json.Decoder(RequestLine)


async def load(lease: Lease, database: Database, storage: Storage, clock: Callable[[], float]) -> Loaded:
    """Read what is left to do of a slice."""
    async with database.read() as session:
        window = (await session.scalars(select(Window).where(Window.id == lease.window_id))).one()
        mine = select(SliceBatch.batch_id).where(SliceBatch.slice_id == lease.slice_id)
        rows = (await session.scalars(select(Batch).where(Batch.id.in_(mine)))).all()
    # What belongs to a batch without an index, which was lost, runs again once it has one.
    live = {row.id: row for row in rows if row.status == BatchStatus.IN_PROGRESS and row.index_id is not None}
    shard = Shard(storage, lease.slice_id)
    names = await shard.names(list(lease.before))
    before = segments_of(names, [epoch for epoch, _ in lease.before])
    found = Loaded([], places_of(lease.first, lease.count, lease.offsets), {row.id for row in rows}, {}, before)
    if not live or not len(found.places):
        return found
    answered = await _resume(shard, names, found.counts)
    try:
        plan = await _planned(PlanArtifact(storage, window.plan_id), lease.first, found.places)
    except FileNotFoundError:
        if clock() < window.created_at + LATE_S:
            raise
        # Nobody knows any more what this slice should run: the finalizer finds it out, and it runs again.
        log.exception("the plan is gone", window=window.id, slice=lease.slice_id)
        return found
    chosen: dict[str, list[int]] = {}  # by batch: which of the slice's places are left to do
    for at, (member, number) in enumerate(plan.wanted.tolist()):
        batch_id = plan.batches[member]
        if batch_id in live and (batch_id, number) not in answered:
            chosen.setdefault(batch_id, []).append(at)
    parts = [(live[batch_id], plan.wanted["request"][mine], mine) for batch_id, mine in chosen.items()]
    lines = plan.lines
    if lines is None:
        lines = np.zeros(len(plan.wanted), dtype=LINE)
        for batch, numbers, mine in parts:
            lines[mine] = await _indexed(database, storage, batch, numbers, clock())
    async with database.read() as session:
        profiles = await remembered(session, np.stack([lines["beginning"], lines["kind"]], axis=1))
        asking = select(Project.id, Project.weight).where(Project.id.in_({batch.project_id for batch, _, _ in parts}))
        weights = {project: weight for project, weight in await session.execute(asking)}
    for batch, numbers, mine in parts:
        asked = _Asked(numbers, found.places[mine], lines[mine], profiles, weights.get(batch.project_id, 1.0))
        found.requests.extend(await _read(storage, batch, clock(), asked))
    found.requests.sort(key=lambda request: request.place)
    return found


class _Plan(NamedTuple):
    """A slice's part of its plan. `lines`: None if the plan does not have them."""

    batches: list[str]
    wanted: Places
    lines: Lines | None


async def _planned(plan: PlanArtifact, first: int, places: NDArray[np.int64]) -> _Plan:
    batches, count = await plan.batches(), int(places[-1]) - first + 1
    wanted = (await plan.places(first, count))[places - first]
    try:
        return _Plan(batches, wanted, (await plan.lines(first, count))[places - first])
    except FileNotFoundError:  # it is of an older version, or of requests that run again
        return _Plan(batches, wanted, None)


async def _resume(shard: Shard, names: Sequence[str], counts: dict[str, Counts]) -> set[tuple[str, int]]:
    """Return the requests that earlier leases of this slice answered, as (batch, number), and count them.

    What was in a segment that is gone runs again.
    """
    answered: set[tuple[str, int]] = set()
    async for answer in shard.answers(names, gone=[]):
        key = (answer.batch_id, answer.request)
        if key not in answered:
            answered.add(key)
            counts[answer.batch_id] = counts.get(answer.batch_id, Counts()) + Counts.of(answer)
    return answered


async def _indexed(
    database: Database, storage: Storage, batch: Batch, numbers: NDArray[Any], now: float
) -> NDArray[np.void]:
    """Return the lines of these requests by the batch's index."""
    index, lines = RequestIndex(storage, batch.index_id or ""), np.empty(len(numbers), dtype=LINE)
    try:
        records = await index.pick(numbers)
    except IndexGone as gone:
        await forget_index(database, gone, now)
        raise
    lines["offset"], lines["length"] = records["offset"], records["length"]
    keys = await index.keys(numbers.tolist(), [1] * len(numbers))
    lines["beginning"], lines["kind"] = keys[:, 0], keys[:, 1]
    return lines


class _Asked(NamedTuple):
    """The requests of one batch that are left to do.

    `profiles`: of the lengths of answers, by the hash of a kind of requests. `weight`: their project's.
    """

    numbers: NDArray[Any]
    places: NDArray[np.int64]
    lines: Lines
    profiles: Mapping[int, str]
    weight: float


async def _read(storage: Storage, batch: Batch, now: float, asked: _Asked) -> list[Request]:
    numbers, places, lines, profiles, weight = asked
    try:
        key = file_key(batch.input_file_id)
        texts = await storage.read_ranges(key, lines["offset"].tolist(), lines["length"].tolist())
    except FileNotFoundError:
        if now < (batch.in_progress_at or 0) + LATE_S:
            raise
        log.exception("the input file is gone", batch=batch.id, file=batch.input_file_id)
        return []  # the finalizer says that its requests have no answer; others of the slice run
    accept = Accept.of(batch.accept)
    requests, due = list[Request](), time.monotonic() + batch.expires_at - now
    keys = zip(lines["beginning"].tolist(), lines["kind"].tolist(), strict=True)
    decoded = 0
    for place, number, raw, (beginning, kind) in zip(places.tolist(), numbers.tolist(), texts, keys, strict=True):
        line, decoded = _line_decoder.decode(raw), decoded + len(raw)
        if decoded > AT_ONCE:
            decoded = 0
            await asyncio.sleep(0)
        lengths = profiles.get(beginning) or profiles.get(kind) or ""
        wanted = known(accept, line.batchweave)
        body = with_limit(line.url, line.body, batch.max_tokens)
        terms = Terms(due, lengths, batch.project_id, wanted.loops == "stop", wanted.thinking_tokens, weight)
        requests.append(Request(batch.id, number, line.url, line.custom_id, body, place, len(raw), wanted, terms))
    return requests


def divided(places: NDArray[np.int64], given: Sequence[Request], pieces: int) -> tuple[NDArray[np.int64], list[Part]]:
    """Take the requests `given` out of a slice.

    Returns the places that it keeps, and at most so many equal parts, none of them small.
    """
    ordered = sorted(given, key=lambda request: request.place)
    size = max(LEAST, -(-len(ordered) // pieces))
    parts = [_part(ordered[first : first + size]) for first in range(0, len(ordered), size)]
    return np.setdiff1d(places, [request.place for request in given]), parts


def _part(requests: Sequence[Request]) -> Part:
    places = np.array([request.place for request in requests], dtype=np.int64)
    return Part(places, dict(Counter(request.batch_id for request in requests)))
