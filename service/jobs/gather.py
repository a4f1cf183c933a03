"""Reads the requests of a window from the indexes of their batches."""

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine_ext import warm_up
from engine_ext.costs.cost import CostModel
from engine_ext.plan.blend import Wishes
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.memory import Keys, Recall, recall
from engine_ext.plan.partition import Slice
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.window import Outputs, Shape, WindowPlan, plan_window
from service.db.sessions import Database
from service.estimates.length_memory import profiles_of, remembered
from service.jobs.fair_window import Span, fitting
from service.objects.plan_artifact import LINE, PLACE, SLICE_BYTES, Lines, Places
from service.objects.request_index import Records, RequestIndex
from service.objects.request_output import EXACT, MOST_TOKENS
from service.objects.storage import Storage
from service.settings import Settings


@dataclass(frozen=True, slots=True)
class Gathered:
    """The requests of a window: their places, lines, prompts and requested outputs (AskedOutput.packed).

    `recall`: what earlier batches say of the lengths of their answers."""

    spans: list[Span]
    places: Places
    lines: Lines
    prompts: Prompts
    asked: NDArray[np.int64]
    recall: Recall | None

    @property
    def projects(self) -> tuple[list[str], NDArray[np.int64]]:
        """Return the projects of the window, and whose each request is: int64 [requests], places in the list."""
        found = list(dict.fromkeys(span.project_id for span in self.spans))
        owners = np.array([found.index(span.project_id) for span in self.spans], dtype=np.int64)
        return found, owners[self.places["batch"]]

    @property
    def outputs(self) -> Outputs:
        """Return what is known of the answers' lengths.

        Requests of one batch with the same length limit are of one kind, since a batch is mostly one task.
        """
        most = self.asked & MOST_TOKENS
        caps = np.where(most > 0, np.minimum(most, LONGEST), LONGEST)
        known = np.where(self.asked & EXACT, caps, UNKNOWN)
        kinds = self.places["batch"].astype(np.int64) * (LONGEST + 1) + caps
        return Outputs(caps, known, kinds, recall=self.recall)

    def wishes(self, now: float) -> Wishes:
        ends = np.array([span.expires_at - now for span in self.spans], dtype=np.float64)
        weights = {span.project_id: span.weight for span in self.spans}
        projects, tenant = self.projects
        ends = np.maximum(ends, 0.0)[self.places["batch"]]
        return Wishes(ends, tenant, np.array([weights[each] for each in projects]))


async def plan_of(found: Gathered, cost: CostModel, now: float, slice_requests: int, shared_cache: bool) -> WindowPlan:
    """Plan the gathered requests in a thread. The first plan waits until the planner's loops are compiled.

    `shared_cache`: whether projects find each other's prefixes in the engine's cache.
    """
    shape, (projects, owners) = Shape(slice_requests=slice_requests), found.projects
    prompts = found.prompts if shared_cache or len(projects) == 1 else found.prompts.kept_apart(projects, owners)
    await asyncio.to_thread(warm_up.ensure)
    plan = await asyncio.to_thread(plan_window, prompts, found.outputs, cost, found.wishes(now), shape)
    return replace(plan, slices=tuple(within(plan.slices, found.lines["length"][plan.order], SLICE_BYTES)))


def within(slices: Sequence[Slice], lengths: NDArray[Any], most: int) -> Iterator[Slice]:
    """Cut the slices whose lines, of these lengths, have more than `most` bytes; a worker reads a slice at once."""
    for each in slices:
        first, size = each.first, 0
        for at, length in enumerate(lengths[each.first : each.first + each.count].tolist(), each.first):
            if size and size + length > most:
                yield Slice(first, at - first)
                first, size = at, 0
            size += length
        yield Slice(first, each.first + each.count - first)


async def gather(database: Database, storage: Storage, settings: Settings, wanted: list[Span]) -> Gathered:
    """Read the wanted spans, as far as they fit into the window's tokens, shared among projects by weight.

    If what is planned again does not fit beside what is new, none of it is planned again.
    """
    new = [span for span in wanted if span.count]
    found = [await _index(storage, span).read(span.first, span.count) for span in new]
    counts = fitting(new, [records["tokens"] for records in found], settings.window_tokens)
    parts = {span.batch_id: records[:count] for span, records, count in zip(new, found, counts, strict=True) if count}
    again = {span.batch_id: await _index(storage, span).pick(span.again) for span in wanted if len(span.again)}
    if _tokens(parts) + _tokens(again) > settings.window_tokens:
        again = {}
    spans: list[Span] = []
    places: list[NDArray[np.void]] = []
    chosen: list[Records] = []
    tokens: list[NDArray[np.uint32]] = []
    keys: list[Keys] = []
    for span in wanted:
        count, repeated = len(parts.get(span.batch_id, ())), span.batch_id in again
        if not count and not repeated:
            continue
        span = replace(span, count=count, again=span.again if repeated else span.again[:0])
        runs = [(span.first, count)] if count else []
        runs += [(number, 1) for number in span.again.tolist()]
        numbers = np.concatenate([np.arange(span.first, span.first + count), span.again])
        index = _index(storage, span)
        for records in (parts.get(span.batch_id), again.get(span.batch_id)):
            if records is not None:
                chosen.append(records)
                tokens.append(await index.token_ids(records))
        place = np.zeros(len(numbers), dtype=PLACE)
        place["batch"], place["request"] = len(spans), numbers
        places.append(place)
        keys.append(await index.keys(*zip(*runs, strict=True)))
        spans.append(span)
    records = np.concatenate(chosen)
    starts = np.concatenate([[0], np.cumsum(records["tokens"].astype(np.int64))])
    known_by = np.concatenate(keys)
    async with database.read() as session:
        profiles = profiles_of(await remembered(session, known_by))
    lines = np.empty(len(records), dtype=LINE)
    lines["offset"], lines["length"] = records["offset"], records["length"]
    lines["beginning"], lines["kind"] = known_by[:, 0], known_by[:, 1]
    # In a thread: at most a gigabyte is copied, in which the planner's other jobs continue.
    prompts = Prompts(await asyncio.to_thread(np.concatenate, tokens), starts)
    asked = records["asked"].astype(np.int64)
    return Gathered(spans, np.concatenate(places), lines, prompts, asked, recall(known_by, profiles))


def _index(storage: Storage, span: Span) -> RequestIndex:
    return RequestIndex(storage, span.index_id)


def _tokens(parts: dict[str, Records]) -> int:
    return sum(int(records["tokens"].sum(dtype=np.int64)) for records in parts.values())
