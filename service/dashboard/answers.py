"""Searches a batch's files for requests and their answers, within bounds, since a file may have millions of lines."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from sqlalchemy import select

from service.api.content import answered_so_far
from service.api.context import Context
from service.dashboard.conversation import Turn, Verdict, answered, asked, begin, verdict
from service.db.moves import LIVE
from service.db.tables import Batch, File, OutputOrder
from service.jobs.bad_answers import bad_answers
from service.objects.shards import Outcome, Usage
from service.objects.storage import file_key
from service.requests.files import BYTE_ORDER_MARK
from service.worker.answer_body import read
from service.worker.judge import outcome_of

SHOWN = 50
MOST_BYTES = 64 * 1024 * 1024
MOST_OF_FIRST, MOST_OF_PARSED, MOST_OF_LINE = 1024 * 1024, 256 * 1024, 16 * 1024 * 1024
MOST_OF_TEXT = 300  # bytes shown of a line with an error
MOST_CHARACTERS = 20_000  # shown of a line that cannot be read
SHOWN_CHARACTERS = 300  # of a prompt or an answer in the list
MOST_OF_ONE = 4 * 1024 * 1024  # of the line of one request that is shown alone
MOST_BEFORE = 4 * 1024 * 1024  # that is searched for the request before another

_searches: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()  # by project


class _Named(msgspec.Struct):
    custom_id: str | None = None


class _Response(msgspec.Struct):
    body: msgspec.Raw


class _Answer(msgspec.Struct):
    response: _Response


class _Url(msgspec.Struct):
    url: str | None = None


_name = msgspec.json.Decoder(_Named)  # skips the rest of a line; parsing it into Python objects would take seconds
_answer = msgspec.json.Decoder(_Answer)
_url = msgspec.json.Decoder(_Url)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a result file. `at`: its first byte in the file. `prompt`: how the request ends, if it was found."""

    custom_id: str
    at: int
    verdict: Verdict
    prompt: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """The lines that a search found. `more_at`: the byte at which the next search continues; None at the end."""

    lines: list[Line]
    more_at: int | None


@dataclass(frozen=True, slots=True)
class Wish:
    """Which lines are wanted: of which outcome, or all that are answered, with which text in their custom_id."""

    kind: str
    text: str = ""

    @property
    def of_output(self) -> bool:
        return self.kind != "failed"


async def search(context: Context, batch: Batch, wish: Wish, start: int = 0, most: int = SHOWN) -> Found:
    """Return the first lines from the byte `start` on that are wanted."""
    raws: list[tuple[int, bytes]] = []
    is_wanted, more_at = await _filter(context, batch, wish), start

    def look(at: int, raw: bytes) -> bool:
        nonlocal more_at
        if is_wanted(raw):
            if len(raws) == most:
                more_at = at
                return True
            raws.append((at, raw))
        more_at = at + len(raw) + 1
        return False

    is_end = await _look_through(batch, _results(context, batch, wish.of_output, start), look, start=start)
    names = {_named(raw) or "" for _, raw in raws}
    bodies = await _bodies(context, batch, names)
    lines = [_line(at, raw, wish.of_output, bodies) for at, raw in raws]
    return Found(lines, None if is_end else more_at)


async def _filter(context: Context, batch: Batch, wish: Wish) -> Callable[[bytes], bool]:
    """Return what tells whether a line is wanted. What is bad was noted when the batch ended; before, the line says."""
    outcome = next((each for each in Outcome if each and each == wish.kind), None)
    names = None
    if outcome is not None and batch.status not in LIVE:
        with suppress(FileNotFoundError):
            names = await bad_answers(context.storage, batch.id, [outcome])

    def is_wanted(raw: bytes) -> bool:
        name = _named(raw)
        if name is None or wish.text not in name:
            return False
        if outcome is None:
            return True
        return name in names if names is not None else _outcome(raw) == outcome

    return is_wanted


def _outcome(raw: bytes) -> Outcome:
    with suppress(msgspec.DecodeError, RecursionError):
        return outcome_of({}, read(bytes(_answer.decode(raw).response.body)))
    return Outcome.OK


async def _bodies(context: Context, batch: Batch, names: set[str]) -> dict[str, dict[str, Any]]:
    """Return the bodies of these requests, as far as the search finds them within bounds."""
    found: dict[str, dict[str, Any]] = {}

    def look(at: int, raw: bytes) -> bool:
        name = _named(raw)
        if name in names:
            body = (parsed(raw) or {}).get("body")
            found[name] = body if isinstance(body, dict) else {}
        return len(found) == len(names)

    if names:
        await _look_through(batch, context.storage.stream(file_key(batch.input_file_id)), look)
    return found


@dataclass(frozen=True, slots=True)
class Whole:
    """One request and its answer, as they stand in their files; None for what was not found within bounds."""

    asked: dict[str, Any] | str | None
    answer: dict[str, Any] | str | None
    ok: bool = True
    at: int | None = None  # the answer's first byte in its file


async def request_of(context: Context, batch: Batch, custom_id: str, at: int = 0) -> Whole:
    """Return a request and its answer. `at`: where to begin to look among the answers."""
    asked = await _one(batch, context.storage.stream(file_key(batch.input_file_id)), custom_id)
    for is_output, start in ((True, at), (False, at), *(((True, 0), (False, 0)) if at else ())):
        found = await _one(batch, _results(context, batch, is_output, start), custom_id, start)
        if found is not None:
            return Whole(asked and asked[1], found[1], is_output, found[0])
    return Whole(asked and asked[1], None)


async def before(context: Context, batch: Batch, wish: Wish, at: int) -> Line | None:
    """Return the wanted line before the byte `at`, if it is near."""
    start = max(0, at - MOST_BEFORE)
    found: list[tuple[int, bytes]] = []
    is_wanted = await _filter(context, batch, wish)

    def look(begin: int, raw: bytes) -> bool:
        if begin >= at:
            return True
        if begin != start or start == 0:  # otherwise the end of a line
            found[:] = [(begin, raw)] if is_wanted(raw) else found
        return False

    await _look_through(batch, _results(context, batch, wish.of_output, start), look, start=start)
    return _line(*found[0], wish.of_output, {}) if found else None


async def neighbours(context: Context, batch: Batch, wish: Wish, whole: Whole) -> tuple[Line | None, Line | None]:
    """Return the wanted lines before and after an answer, if they are near."""
    if whole.at is None or wish.of_output != whole.ok:
        return None, None
    later = [line for line in (await search(context, batch, wish, whole.at, 2)).lines if line.at > whole.at]
    return await before(context, batch, wish, whole.at), later[0] if later else None


@dataclass(frozen=True, slots=True)
class Talk:
    """A request and its answer as people read them, and as JSON. `said`: what the answer says, to copy it."""

    turns: list[Turn]
    verdict: Verdict | None
    said: str
    raw: list[tuple[str, str]]


def talk_of(whole: Whole) -> Talk:
    request = whole.asked.get("body") if isinstance(whole.asked, dict) else None
    request = request if isinstance(request, dict) else {}
    line = whole.answer if isinstance(whole.answer, dict) else None
    response = line.get("response") if line else None
    body = response.get("body") if isinstance(response, dict) else None
    turns = answered(body) if isinstance(body, dict) else []
    if line and not whole.ok and not turns:
        error = line.get("error")
        turns = [Turn("error", str(error.get("message")) if isinstance(error, dict) else "")]
    raw = [("Request", whole.asked), ("Answer", whole.answer)]
    return Talk(
        asked(request) + turns,
        None if line is None else verdict(request, line, whole.ok),
        "\n".join(turn.text for turn in turns if turn.role.startswith("answer")),
        [(name, _json(each)) for name, each in raw if each is not None],
    )


def _json(found: dict[str, Any] | str) -> str:
    text = found if isinstance(found, str) else json.dumps(found, indent=2, ensure_ascii=False)
    return text[:MOST_CHARACTERS]


async def lines_of(context: Context, batch: Batch, numbers: set[int]) -> dict[int, str]:
    """Return the beginnings of these lines of the input file by number, from 1 on, as far as they are in bounds."""
    found: dict[int, str] = {}
    number = 0

    def look(at: int, raw: bytes) -> bool:
        nonlocal number
        number += 1
        if number in numbers:
            found[number] = raw[:MOST_OF_TEXT].decode(errors="replace")
        return len(found) == len(numbers)

    if numbers:
        await _look_through(batch, context.storage.stream(file_key(batch.input_file_id)), look, blank=True)
    return found


async def first_url(context: Context, file: File) -> str | None:
    """Return the `url` of the request on a file's first line; None if the line is too long or not a request."""
    with suppress(FileNotFoundError, msgspec.DecodeError, RecursionError):
        head = await context.storage.read_range(file_key(file.id), 0, min(file.size_bytes, MOST_OF_FIRST))
        return _url.decode(head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0]).url
    return None


def parsed(raw: bytes, most: int = MOST_OF_PARSED) -> dict[str, Any] | None:
    """Return the object on a line; None if the line is too long or holds anything else.

    A file that failed its validation may hold anything.
    """
    if len(raw) > most:
        return None
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _named(raw: bytes) -> str | None:
    """Return a line's custom_id, or "" if it has none; None if the line is not an object."""
    try:
        return _name.decode(raw).custom_id or ""
    except (msgspec.DecodeError, RecursionError):
        return None


async def _one(
    batch: Batch, parts: AsyncIterator[bytes], custom_id: str, start: int = 0
) -> tuple[int, dict[str, Any] | str] | None:
    """Return where the line with this custom_id begins, and its object, or its text where it has none."""
    wanted = [json.dumps(custom_id, ensure_ascii=each).encode(errors="surrogatepass") for each in (True, False)]
    found: list[tuple[int, dict[str, Any] | str]] = []

    def look(at: int, raw: bytes) -> bool:
        if any(each in raw for each in wanted) and _named(raw) == custom_id:
            found.append((at, parsed(raw, MOST_OF_ONE) or raw[:MOST_CHARACTERS].decode(errors="replace")))
        return bool(found)

    await _look_through(batch, parts, look, start=start)
    return found[0] if found else None


async def _look_through(
    batch: Batch,
    parts: AsyncIterator[bytes],
    look: Callable[[int, bytes], bool],
    blank: bool = False,
    start: int = 0,
) -> bool:
    """Pass each line, and its first byte, to `look` until it has seen enough.

    Return whether it saw all lines, within the bounds on reading. `look` runs in a thread, one per project at a time,
    since a file may have a million lines to parse. It gets blank lines only if they are wanted. `start`: the byte at
    which the parts begin.
    """
    read, at, rest = 0, start, b""
    lock = _searches.setdefault(batch.project_id, asyncio.Lock())
    with suppress(FileNotFoundError):  # the file was deleted or has expired
        async with lock:
            async for part in parts:
                read += len(part)
                whole, cut, rest = (rest + part).rpartition(b"\n")
                if cut and await asyncio.to_thread(_look_at, at, whole, look, blank):
                    return False
                at += len(whole) + len(cut)
                if read > MOST_BYTES or len(rest) > MOST_OF_LINE:
                    return False
            return not await asyncio.to_thread(_look_at, at, rest, look, blank)
    return True


def _look_at(at: int, text: bytes, look: Callable[[int, bytes], bool], blank: bool) -> bool:
    """Return whether `look` has seen enough after one of these lines."""
    for line in text.split(b"\n"):
        if (blank or not (line == b"" or line.isspace())) and look(at, line):
            return True
        at += len(line) + 1
    return False


async def _results(context: Context, batch: Batch, is_output: bool, start: int = 0) -> AsyncIterator[bytes]:
    """Yield the contents of the finished file from the byte `start` on, or the answers so far."""
    file_id = batch.output_file_id if is_output else batch.error_file_id
    if file_id is not None:
        async with context.database.read() as session:
            size = await session.scalar(select(File.size_bytes).where(File.id == file_id))
        if start < (size or 0):
            async for part in context.storage.stream(file_key(file_id), start):
                yield part
    elif batch.status in LIVE and batch.output_order == OutputOrder.ANY:
        async for part in answered_so_far(context, batch.id, is_output, start):
            yield part


def _line(at: int, raw: bytes, ok: bool, bodies: dict[str, dict[str, Any]]) -> Line:
    line, name = parsed(raw), _named(raw) or ""
    request = bodies.get(name, {})
    prompt = begin(asked(request), SHOWN_CHARACTERS)
    if line is None:
        return Line(name, at, Verdict("too long to show here", "", Usage()), prompt, "")
    response, error = line.get("response"), line.get("error")
    body = response.get("body") if isinstance(response, dict) else None
    text = begin(answered(body), SHOWN_CHARACTERS) if isinstance(body, dict) else ""
    if not ok and not text and isinstance(error, dict):
        text = str(error.get("message") or "")[:SHOWN_CHARACTERS]
    return Line(name, at, verdict(request, line, ok), prompt, text)
