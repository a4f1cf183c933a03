"""Reads the requests of one leased slice, without those that are answered, and divides them among workers."""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from sqlalchemy import select

from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, SliceBatch, Window
from service.estimates.length_memory import remembered
from service.objects.plan_artifact import PlanArtifact
from service.objects.request_index import RequestIndex
from service.objects.shards import Shard
from service.objects.storage import Storage, file_key
from service.queue.counts import Counts
from service.queue.crew import LEAST
from service.queue.leases import Lease
from service.queue.parts import Part, places_of
from service.requests.lines import RequestLine


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A request of the slice, ready to run.

    `place`: its position in the window's plan. `due`: when its batch expires, by time.monotonic.
    `lengths`: the profile of earlier answers to requests like it, or nothing.
    """

    batch_id: str
    number: int
    endpoint: str
    custom_id: str
    body: dict[str, Any]
    place: int
    due: float
    lengths: str
    request_id: str = field(default_factory=lambda: f"req_{secrets.token_hex(16)}")  # in its answer line and in the log


@dataclass(frozen=True, slots=True)
class Loaded:
    """The unanswered requests of a slice's live batches, in the order of the plan.

    `places`: int64 [requests of the slice], the positions of all its requests in the window's plan. `counts`: its
    durable answers by batch.
    """

    requests: list[Request]
    places: NDArray[np.int64]
    batch_ids: set[str]
    counts: dict[str, Counts]


_line_decoder = msgspec.json.Decoder(RequestLine)


async def load(lease: Lease, database: Database, storage: Storage, clock: Callable[[], float]) -> Loaded:
    """Read what is left to do of a slice."""
    async with database.read() as session:
        plan_id = (await session.scalars(select(Window.plan_id).where(Window.id == lease.window_id))).one()
        mine = select(SliceBatch.batch_id).where(SliceBatch.slice_id == lease.slice_id)
        rows = (await session.scalars(select(Batch).where(Batch.id.in_(mine)))).all()
    live = {row.id: row for row in rows if row.status == BatchStatus.IN_PROGRESS}
    found = Loaded([], places_of(lease.first, lease.count, lease.offsets), {row.id for row in rows}, {})
    if not live or not len(found.places):
        return found
    artifact = PlanArtifact(storage, plan_id)
    header = await artifact.header()
    order = await artifact.places(lease.first, int(found.places[-1]) - lease.first + 1)
    wanted = order[found.places - lease.first]
    answered = await _resume(Shard(storage, lease.slice_id), found.counts)
    for member in np.unique(wanted["batch"]).tolist():
        batch = live.get(header.batches[member])
        if batch is None:
            continue
        chosen = [
            at
            for at in np.flatnonzero(wanted["batch"] == member).tolist()
            if (batch.id, int(wanted["request"][at])) not in answered
        ]
        due = time.monotonic() + batch.expires_at - clock()
        found.requests.extend(
            await _read(database, storage, batch, due, wanted["request"][chosen], found.places[chosen])
        )
    found.requests.sort(key=lambda request: request.place)
    return found


async def _resume(shard: Shard, counts: dict[str, Counts]) -> set[tuple[str, int]]:
    """Return the requests that earlier leases of this slice answered, as (batch, number), and count them."""
    answered: set[tuple[str, int]] = set()
    async for answer in shard.answers():
        key = (answer.batch_id, answer.request)
        if key not in answered:
            answered.add(key)
            counts[answer.batch_id] = counts.get(answer.batch_id, Counts()) + Counts.of(answer)
    return answered


async def _read(
    database: Database, storage: Storage, batch: Batch, due: float, numbers: NDArray[Any], places: NDArray[np.int64]
) -> list[Request]:
    index = RequestIndex(storage, batch.index_id or "")
    records = await index.pick(numbers)
    keys = await index.keys(numbers.tolist(), [1] * len(numbers))
    async with database.read() as session:
        profiles = await remembered(session, keys)
    lines = await storage.read_ranges(
        file_key(batch.input_file_id), records["offset"].tolist(), records["length"].tolist()
    )
    requests: list[Request] = []
    for place, number, raw, (beginning, kind) in zip(
        places.tolist(), numbers.tolist(), lines, keys.tolist(), strict=True
    ):
        line = _line_decoder.decode(raw)
        lengths = profiles.get(beginning) or profiles.get(kind) or ""
        requests.append(Request(batch.id, number, line.url, line.custom_id, line.body, place, due, lengths))
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
