"""Reads a batch's slices in plan order, and the prefix tree of its current planning window, for the batch's page."""

from collections import Counter, OrderedDict
from dataclasses import dataclass

from msgspec import structs
from sqlalchemy import func, select

from service.api.context import Context
from service.db.sessions import Database
from service.db.tables import Slice, SliceBatch, SliceStatus, Window, fixed
from service.objects.plan_artifact import PlanArtifact
from service.objects.plan_picture import TEXT_TOKENS, Box, PlanPicture
from service.objects.storage import Storage

MOST_SLICES = 2000
MOST_REACHES = 64


@dataclass(frozen=True, slots=True)
class SliceBar:
    """A slice: the part of the batch's width that it takes, and its state."""

    slice_id: int
    left: float  # of the width, 0 to 1
    width: float
    status: str
    owner: str | None
    requests: int
    deaths: int


async def slice_bars(database: Database, batch_id: str) -> list[SliceBar]:
    """Return the batch's slices in plan order, at most `MOST_SLICES`; empty before the batch is planned."""
    async with database.read() as session:
        rows = (
            await session.execute(
                select(Slice, SliceBatch)
                .join(SliceBatch, SliceBatch.slice_id == Slice.id)
                .where(SliceBatch.batch_id == batch_id)
                .order_by(Slice.id)
                .limit(MOST_SLICES)
            )
        ).all()
    whole = sum(share.total for _, share in rows)
    found: list[SliceBar] = []
    done = 0
    for each, share in rows:
        found.append(
            SliceBar(each.id, done / whole, share.total / whole, _state(share), each.owner, share.total, each.deaths)
        )
        done += share.total
    return found


def workers_of(slices: list[SliceBar]) -> list[tuple[str, int, int]]:
    """Return the workers of these slices: how many requests are in those that each has done, and in those it runs."""
    done, runs = Counter[str](), Counter[str]()
    for each in slices:
        if each.owner and each.status in (SliceStatus.DONE, SliceStatus.LEASED):
            (done if each.status == SliceStatus.DONE else runs)[each.owner] += each.requests
    return [(name, done[name], runs[name]) for name in sorted({*done, *runs})]


def _state(share: SliceBatch) -> str:
    """Return the state of the batch's share of a slice, or "not_run" if it is done but none of it ran.

    That is so when the batch expired or was cancelled first.
    """
    is_empty = share.status == SliceStatus.DONE and not share.completed and not share.failed
    return "not_run" if is_empty else str(share.status)


@dataclass(frozen=True, slots=True)
class Scan:
    """How far the scan of a planning window has come.

    `left`, `right`: the shares of the width taken from each end. `plan_id` names the window's plan; `has_texts`:
    whether its picture may show texts of requests.
    """

    plan_id: str
    has_texts: bool
    left: float
    right: float
    slices: int
    begun: int


async def scan_of(context: Context, batch_id: str) -> Scan | None:
    """Return the scan of the window that the batch runs in, or of its last one; None if its picture is gone."""
    async with context.database.read() as session:
        mine = select(SliceBatch.slice_id).where(SliceBatch.batch_id == batch_id)
        wanted = [
            select(mine.where(SliceBatch.status == fixed(status)).order_by(SliceBatch.slice_id).limit(1).subquery())
            for status in (SliceStatus.READY, SliceStatus.LEASED)
        ]
        wanted.append(mine.order_by(SliceBatch.slice_id.desc()).limit(1))
        slice_id = None
        for each in wanted:  # what waits was planned last, and maybe with requests of an older window
            slice_id = slice_id or await session.scalar(each)
        found = (await session.scalars(select(Slice).where(Slice.id == slice_id))).one_or_none()
        if found is None:
            return None
        about = select(Window.plan_id, Window.texts).where(Window.id == found.window_id)
        plan_id, has_texts = (await session.execute(about)).one()
        whole = Slice.window_id == found.window_id
        slices = (await session.scalars(select(func.count()).select_from(Slice).where(whole))).one()
        begun = (
            await session.scalars(
                select(func.count()).select_from(Slice).where(whole, Slice.status != SliceStatus.READY)
            )
        ).one()
    reach = await _reach(context.storage, plan_id)
    if reach is None:
        return None
    left, right = reach[min(begun, len(reach)) - 1] if begun and reach else (0.0, 0.0)
    return Scan(plan_id, bool(has_texts), left, right, slices, begun)


@dataclass(frozen=True, slots=True)
class Boxes:
    """What one viewer may see of a window's prefix tree."""

    requests: int
    depth: int
    shown: list[Box]


async def boxes_of(context: Context, scan: Scan | None, project: str) -> Boxes | None:
    """Return the boxes of the window's tree that the project may see."""
    if scan is None:
        return None
    try:
        artifact = PlanArtifact(context.storage, scan.plan_id)
        picture, texts = await artifact.picture(), await artifact.texts() if scan.has_texts else []
    except FileNotFoundError:  # deleted since its reach was read
        return None
    if texts or not scan.has_texts:
        texts += [""] * (len(picture.boxes) - len(texts))
        named = [structs.replace(box, text=text) for box, text in zip(picture.boxes, texts, strict=True)]
        picture = structs.replace(picture, boxes=named)
    boxes = own(picture, project)
    return Boxes(picture.requests, max((box.end for box in boxes), default=1), boxes)


def own(picture: PlanPicture, project: str) -> list[Box]:
    """Return the tree as if it had the project's requests alone: boxes as wide as those, and no cut that others cause.

    Anything else would tell what others ask: a guess at a prefix would show whether somebody shares it, and how far.
    """
    found = list[Box]()
    above: list[tuple[int, Box]] = []  # places of found boxes, and what they are in the tree of all projects
    for box in picture.boxes:  # parents before their children
        mine = sum(count for owner, count in box.owners if picture.projects[owner] == project)
        if not mine:
            continue
        while above and not _holds(above[-1][1], box):
            above.pop()
        told = box if len(box.owners) == 1 else structs.replace(box, density=0.0, output_tokens=0)
        told = structs.replace(told, width=mine / picture.requests)
        before = found[above[-1][0]] if above else None
        if before is not None and before.width == told.width:  # only others' requests part here
            is_short = before.end - before.begin < TEXT_TOKENS
            text = before.text + told.text if is_short else before.text
            found[above[-1][0]] = structs.replace(told, begin=before.begin, text=text)
            above[-1] = (above[-1][0], box)
        else:
            above.append((len(found), box))
            found.append(told)
    return found


def _holds(above: Box, box: Box) -> bool:
    """Return whether the requests of `box` go on from where `above` ends."""
    return above.end == box.begin and above.left <= box.left < above.left + above.width


_reaches: OrderedDict[str, list[tuple[float, float]]] = OrderedDict()  # by plan, which never changes


async def _reach(storage: Storage, plan_id: str) -> list[tuple[float, float]] | None:
    """Return how far the scan has come after each slice, without reading the picture at each look at a live page."""
    if plan_id not in _reaches:
        try:
            _reaches[plan_id] = (await PlanArtifact(storage, plan_id).picture()).reach
        except FileNotFoundError:
            return None
        while len(_reaches) > MOST_REACHES:
            _reaches.popitem(last=False)
    return _reaches[plan_id]
