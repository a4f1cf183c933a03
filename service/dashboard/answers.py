"""Searches a batch's files for requests and their answers, within bounds, since a file may have millions of lines."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from batchweave.files import BYTE_ORDER_MARK
from service.api.context import Context
from service.dashboard.conversation import MOST_CHARACTERS, Verdict, answered, asked, beginning, verdict
from service.dashboard.lines import MOST_OF_PARSED, look_through, named, parsed, results
from service.db.moves import LIVE
from service.db.tables import Batch, File
from service.jobs.bad_answers import bad_answers
from service.objects.shards import Outcome
from service.objects.storage import file_key
from service.worker.answer_body import NO_USAGE, read
from service.worker.judge import SCHEMA_FIELDS, outcome_of

SHOWN = 50  # requests on a page of a list
SHOWN_CHARACTERS = 300  # of a prompt or an answer in the list
MOST_OF_FIRST = 1024 * 1024
MOST_OF_ONE = 1024 * 1024  # of the line of one request that is shown alone
MOST_BEFORE = 4 * 1024 * 1024  # that is searched for the request before another
MOST_OF_TEXT = 300  # bytes shown of a line with an error


class _Response(msgspec.Struct):
    body: msgspec.Raw


class _Answer(msgspec.Struct):
    response: _Response


class _Url(msgspec.Struct):
    url: str | None = None


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

    @property
    def outcome(self) -> Outcome | None:
        """Return which one is wanted; None for all answers, and for what failed."""
        return next((each for each in Outcome if each and each == self.kind), None)


@dataclass(frozen=True, slots=True)
class _Raw:
    """A line that was found. `text`: nothing if it is too long to be parsed."""

    at: int
    name: str
    text: bytes


@dataclass(frozen=True, slots=True)
class _Request:
    """What a list shows of a request: how it ends, and the fields that say which JSON it asks for."""

    prompt: str = ""
    fields: dict[str, Any] | None = None


async def search(context: Context, batch: Batch, wish: Wish, start: int = 0, most: int = SHOWN) -> Found:
    """Return the first lines from the byte `start` on that are wanted."""
    raws, more_at = list[_Raw](), start
    is_wanted = await _filter(context, batch, wish)

    def look(at: int, raw: bytes) -> bool:
        nonlocal more_at
        if is_wanted(raw):
            if len(raws) == most:
                more_at = at
                return True
            raws.append(_Raw(at, named(raw) or "", raw if len(raw) <= MOST_OF_PARSED else b""))
        more_at = at + len(raw) + 1
        return False

    is_end = await look_through(batch, results(context, batch, wish.of_output, start), look, start=start)
    requests = await _requests(context, batch, {raw.name for raw in raws})
    lines = await asyncio.to_thread(_lines, raws, wish, requests)
    return Found(lines, None if is_end or more_at == start else more_at)


async def _filter(context: Context, batch: Batch, wish: Wish) -> Callable[[bytes], bool]:
    """Return what tells whether a line is wanted. What is bad was noted when the batch ended; before, the line says."""
    outcome, names = wish.outcome, None
    if outcome is not None and batch.status not in LIVE:
        with suppress(FileNotFoundError):
            names = await bad_answers(context.storage, batch.id, batch.output_file_id, [outcome])

    def is_wanted(raw: bytes) -> bool:
        name = named(raw)
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


async def _requests(context: Context, batch: Batch, names: set[str]) -> dict[str, _Request]:
    """Return what these requests ask, as far as they are found within bounds."""
    found: dict[str, _Request] = {}

    def look(at: int, raw: bytes) -> bool:
        name = named(raw)
        if name in names:
            body = (parsed(raw) or {}).get("body")
            body = body if isinstance(body, dict) else {}
            fields = {field: body[field] for field in SCHEMA_FIELDS if field in body}
            found[name] = _Request(beginning(asked(body), SHOWN_CHARACTERS), fields)
        return len(found) == len(names)

    if names:
        await look_through(batch, context.storage.stream(file_key(batch.input_file_id)), look)
    return found


@dataclass(frozen=True, slots=True)
class Whole:
    """One request and its answer, as they stand in their files; None for what was not found within bounds."""

    asked: dict[str, Any] | str | None
    answer: dict[str, Any] | str | None
    ok: bool = True
    at: int | None = None  # the answer's first byte in its file


async def request_of(context: Context, batch: Batch, custom_id: str, wish: Wish, at: int = 0) -> Whole:
    """Return a request and its answer. `at`: where the answer is likely to begin among those that are wanted."""
    asked = await _one(batch, context.storage.stream(file_key(batch.input_file_id)), custom_id)
    places = [(wish.of_output, at), *([(wish.of_output, 0)] if at else []), (not wish.of_output, 0)]
    for is_output, start in places:
        found = await _one(batch, results(context, batch, is_output, start), custom_id, start)
        if found is not None:
            return Whole(asked and asked[1], found[1], is_output, found[0])
    return Whole(asked and asked[1], None)


async def neighbours(context: Context, batch: Batch, wish: Wish, whole: Whole) -> tuple[Line | None, Line | None]:
    """Return the wanted lines before and after an answer, if they are near."""
    if whole.at is None or wish.of_output != whole.ok:
        return None, None
    later = [line for line in (await search(context, batch, wish, whole.at, 2)).lines if line.at > whole.at]
    return await _before(context, batch, wish, whole.at), later[0] if later else None


async def _before(context: Context, batch: Batch, wish: Wish, at: int) -> Line | None:
    start, found = max(0, at - MOST_BEFORE), list[_Raw]()
    is_wanted = await _filter(context, batch, wish)

    def look(begin: int, raw: bytes) -> bool:
        if begin >= at:
            return True
        if (begin != start or start == 0) and is_wanted(raw):  # otherwise the end of a line
            found[:] = [_Raw(begin, named(raw) or "", b"")]
        return False

    await look_through(batch, results(context, batch, wish.of_output, start), look, start=start)
    return _line(found[0], wish, _Request()) if found else None


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
        await look_through(batch, context.storage.stream(file_key(batch.input_file_id)), look, blank=True)
    return found


async def first_url(context: Context, file: File) -> str | None:
    """Return the `url` of the request on a file's first line; None if the line is too long or not a request."""
    with suppress(FileNotFoundError, msgspec.DecodeError, RecursionError):
        head = await context.storage.read_range(file_key(file.id), 0, min(file.size_bytes, MOST_OF_FIRST))
        return _url.decode(head.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0]).url
    return None


async def _one(
    batch: Batch, parts: AsyncIterator[bytes], custom_id: str, start: int = 0
) -> tuple[int, dict[str, Any] | str] | None:
    """Return where the line with this custom_id begins, and its object, or its text where it has none."""
    wanted = [json.dumps(custom_id, ensure_ascii=each).encode(errors="surrogatepass") for each in (True, False)]
    found: list[tuple[int, dict[str, Any] | str]] = []

    def look(at: int, raw: bytes) -> bool:
        if (b"\\" in raw or any(each in raw for each in wanted)) and named(raw) == custom_id:
            found.append((at, parsed(raw, MOST_OF_ONE) or raw[:MOST_CHARACTERS].decode(errors="replace")))
        return bool(found)

    await look_through(batch, parts, look, start=start)
    return found[0] if found else None


def _lines(raws: list[_Raw], wish: Wish, requests: dict[str, _Request]) -> list[Line]:
    return [_line(raw, wish, requests.get(raw.name, _Request())) for raw in raws]


def _line(raw: _Raw, wish: Wish, request: _Request) -> Line:
    line, ok = parsed(raw.text), wish.of_output
    if line is None:
        return Line(raw.name, raw.at, Verdict("too long to show here", "", NO_USAGE), request.prompt, "")
    response, error = line.get("response"), line.get("error")
    body = response.get("body") if isinstance(response, dict) else None
    text = beginning(answered(body), SHOWN_CHARACTERS) if isinstance(body, dict) else ""
    if not ok and not text and isinstance(error, dict):
        text = str(error.get("message") or "")[:SHOWN_CHARACTERS]
    return Line(raw.name, raw.at, verdict(request.fields or {}, line, ok, wish.outcome), request.prompt, text)
