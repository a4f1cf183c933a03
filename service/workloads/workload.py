"""Reads the requests to plan: a batch file, or a workload file that describes a trace without its text."""

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from batchweave.files import opened
from engine_ext.errors import SegmentError
from engine_ext.plan.blend import Wishes
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.prompts import Prompts, Segment
from engine_ext.plan.window import Outputs
from service.errors import WorkloadError
from service.objects.request_output import asked_output
from service.requests.lines import LineChecker, quoted
from service.requests.tokens import PromptTokens, token_ids

Kind = TypeVar("Kind")
TOKENIZE_LINES = 1024
MAX_LINE_BYTES = 32 * 1024 * 1024
LATEST_S = 1e12  # a later deadline counts as none
LAST_ARRIVAL_S = 7 * 86_400


class WorkloadLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a workload file; `arrival_s` and `class` matter where online requests run beside a batch."""

    segments: list[tuple[str | int, int]]
    output_tokens: int
    id: str | int | None = None
    tenant: str | int | None = None
    deadline_s: float | None = None
    max_tokens: int | None = None
    arrival_s: float | None = None
    kind: Literal["online", "batch"] | None = msgspec.field(default=None, name="class")


class _Answer(msgspec.Struct):
    """A line of a lengths file, or of a batch's output file."""

    id: str | int | None = None
    custom_id: str | None = None
    output_tokens: int | None = None
    response: Any = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of the file. `outputs.known` holds the true output lengths that the file gives.

    `arrives_s`: seconds of the file's arrivals, NaN where it says none. `classes`: "online", "batch", or None.
    """

    ids: list[str]
    prompts: Prompts
    outputs: Outputs
    wishes: Wishes
    arrives_s: NDArray[np.float64]
    classes: list[str | None]


@dataclass(slots=True)
class _Columns:
    ids: list[str] = field(default_factory=list[str])
    lines: list[int] = field(default_factory=list[int])
    caps: list[int] = field(default_factory=list[int])
    known: list[int] = field(default_factory=list[int])
    tenant: list[int] = field(default_factory=list[int])
    deadlines: list[float] = field(default_factory=list[float])
    arrives: list[float] = field(default_factory=list[float])
    classes: list[str | None] = field(default_factory=list["str | None"])
    tenants: dict[str, int] = field(default_factory=dict[str, int])
    line_of_id: dict[str, int] = field(default_factory=dict[str, int])

    def add(
        self,
        line: int,
        name: str,
        cap: int | None,
        known: int,
        tenant: str = "",
        deadline_s: float | None = None,
        arrival_s: float | None = None,
        kind: str | None = None,
    ) -> None:
        self.arrives.append(np.nan if arrival_s is None else arrival_s)
        self.classes.append(kind)
        self.lines.append(line)
        self.ids.append(name)
        self.caps.append(LONGEST if cap is None else min(cap, LONGEST))
        self.known.append(known)
        self.tenant.append(self.tenants.setdefault(tenant, len(self.tenants)))
        self.deadlines.append(np.inf if deadline_s is None or deadline_s > LATEST_S else deadline_s)


def read_workload(
    path: Path, tokenizer: PromptTokens | None, lengths: dict[str, int], shared_cache: bool = False
) -> Workload:
    """Read a batch file or a workload file; its first line tells which one it is. Raises WorkloadError.

    Without a tokenizer, four bytes of text count as a token. `lengths`: true output tokens by id, if any are known.
    `shared_cache`: whether tenants find each other's prefixes.
    """
    lines = lines_of(path)
    first = next(lines, None)
    if first is None:
        raise WorkloadError(f"{path} has no requests")
    lines = itertools.chain([first], lines)  # a pipe can be read only once
    columns = _Columns()
    segments = "segments" in _decode(path, first[0], first[1], dict[str, Any])
    prompts = _read_segments(path, lines, columns) if segments else _read_batch(path, lines, columns, tokenizer)
    found = 0
    for place, name in enumerate(columns.ids):
        if name in lengths:
            columns.known[place] = lengths[name]
            found += 1
    if lengths and not found:
        raise WorkloadError(f"none of the {len(lengths)} ids of the lengths file is in {path}")
    tenant = np.array(columns.tenant, dtype=np.int64)
    caps, known = np.array(columns.caps, dtype=np.int64), np.array(columns.known, dtype=np.int64)
    if len(columns.tenants) > 1 and not shared_cache:
        prompts = prompts.kept_apart(list(columns.tenants), tenant)
    wishes = Wishes(np.array(columns.deadlines), tenant, np.ones(len(columns.tenants)))
    kinds = tenant * (LONGEST + 1) + caps
    outputs = Outputs(np.maximum(caps, known), known, kinds)
    return Workload(columns.ids, prompts, outputs, wishes, np.array(columns.arrives), columns.classes)


def read_lengths(path: Path) -> dict[str, int]:
    """Return output tokens by id, from lines {"id", "output_tokens"} or a batch's output file. Raises WorkloadError."""
    found: dict[str, int] = {}
    for number, raw in lines_of(path):
        answer = _decode(path, number, raw, _Answer)
        name = answer.custom_id if answer.custom_id is not None else answer.id
        tokens = answer.output_tokens
        if tokens is None and isinstance(answer.response, dict):
            if answer.response.get("status_code", 200) != 200:
                continue  # a failed request tells no length
            tokens = _completion_tokens(answer.response)
        if name is None or tokens is None or not 0 <= tokens <= LONGEST:
            raise WorkloadError(
                f"{path}, line {number}: a length needs 'id' and 'output_tokens' (0 to {LONGEST}), "
                "or must be a line of a batch's output file"
            )
        found[str(name)] = tokens
    if not found:
        raise WorkloadError(f"{path} has no lengths")
    return found


def _completion_tokens(response: dict[str, Any]) -> int | None:
    body = response.get("body")
    usage = body.get("usage") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return None
    tokens = usage.get("completion_tokens", usage.get("output_tokens"))
    return tokens if isinstance(tokens, int) and not isinstance(tokens, bool) else None


def _read_segments(path: Path, lines: Iterator[tuple[int, bytes]], columns: _Columns) -> Prompts:
    def rows() -> Iterator[list[Segment]]:
        for number, raw in lines:
            line = _decode(path, number, raw, WorkloadLine)
            _check(path, number, line)
            name = str(len(columns.ids) if line.id is None else line.id)
            _only_once(path, columns, number, name)
            tenant = "" if line.tenant is None else str(line.tenant)
            wish = (tenant, line.deadline_s, line.arrival_s, line.kind)
            columns.add(number, name, line.max_tokens, line.output_tokens, *wish)
            yield line.segments

    try:
        return Prompts.of_segments(rows())
    except SegmentError as error:
        where = f" (line {columns.lines[error.other]})" if error.other is not None else ""
        line = columns.lines[error.number]
        raise WorkloadError(f"{path}, line {line}: segments: {error.problem}{where}") from error


def _only_once(path: Path, columns: _Columns, number: int, name: str) -> None:
    before = columns.line_of_id.setdefault(name, number)
    if before != number:
        raise WorkloadError(f"{path}, line {number}: id {quoted(name)} is already on line {before}")


def _check(path: Path, number: int, line: WorkloadLine) -> None:
    for name, value, least in (
        ("output_tokens", line.output_tokens, 0),
        ("max_tokens", line.max_tokens, 1),
        ("deadline_s", line.deadline_s, 0),
        ("arrival_s", line.arrival_s, 0),
    ):
        if value is not None and not value >= least:
            raise WorkloadError(f"{path}, line {number}: {name} must be at least {least}, not {value}")
    if line.arrival_s is not None and line.arrival_s > LAST_ARRIVAL_S:
        raise WorkloadError(f"{path}, line {number}: arrival_s must be at most {LAST_ARRIVAL_S}, which is a week")
    if line.max_tokens is not None and line.max_tokens < line.output_tokens:
        raise WorkloadError(
            f"{path}, line {number}: output_tokens {line.output_tokens} is above max_tokens {line.max_tokens}"
        )
    if line.output_tokens > LONGEST:
        raise WorkloadError(f"{path}, line {number}: output_tokens is above {LONGEST}")
    if not line.segments:
        raise WorkloadError(f"{path}, line {number}: segments is empty; a prompt has at least one")
    if sum(max(size, 0) for _, size in line.segments) > LONGEST:
        raise WorkloadError(f"{path}, line {number}: segments: the prompt is longer than {LONGEST} tokens")


def _read_batch(
    path: Path, lines: Iterator[tuple[int, bytes]], columns: _Columns, tokenizer: PromptTokens | None
) -> Prompts:
    checker: LineChecker | None = None
    parts: list[NDArray[np.uint32]] = []
    bodies: list[dict[str, Any]] = []

    def flush(endpoint: str) -> None:
        if tokenizer is not None:
            parts.extend(np.array(each.ids, dtype=np.uint32) for each in tokenizer.encode(endpoint, bodies))
        else:
            parts.extend(_by_bytes(endpoint, body) for body in bodies)
        bodies.clear()

    for number, raw in lines:
        if checker is None:
            url = _decode(path, number, raw, dict[str, Any]).get("url")
            checker = LineChecker(url if isinstance(url, str) else "")
        request = checker.check(number, raw)
        if request is None:
            error = checker.errors[0]
            raise WorkloadError(f"{path}, line {error.line}: {error.message}")
        asked = asked_output(request.url, request.body)
        known = min(asked.most, LONGEST) if asked.exact else UNKNOWN
        _only_once(path, columns, number, request.custom_id)
        columns.add(number, request.custom_id, asked.most or None, known)
        bodies.append(request.body)
        if len(bodies) == TOKENIZE_LINES:
            flush(checker.endpoint)
    if checker is not None:
        flush(checker.endpoint)
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return Prompts(np.concatenate(parts), starts)


def _by_bytes(endpoint: str, body: dict[str, Any]) -> NDArray[np.uint32]:
    """Return the text as tokens of four bytes: about the right length, and equal beginnings stay equal."""
    ids = token_ids(body.get("prompt"))
    if ids is not None:
        return np.array(ids, dtype=np.uint32)
    data = PromptTokens(None, None, {}).text(endpoint, body).string.encode()
    return np.frombuffer(data + b" " * (-len(data) % 4), dtype="<u4").astype(np.uint32)


def lines_of(path: Path, most_bytes: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes]]:
    """Yield non-blank lines with their 1-based numbers. Raises WorkloadError for a line that is too long."""
    try:
        with opened(path) as file:
            number = 0
            while raw := file.readline(most_bytes + 1):
                number += 1
                if len(raw) > most_bytes:
                    raise WorkloadError(f"{path}, line {number}: the line is longer than {most_bytes} bytes")
                if raw.strip():
                    yield number, raw
    except (EOFError, zlib.error) as error:
        raise WorkloadError(f"{path}: the gzip file is damaged: {error}") from error
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror or error}") from error


def _decode(path: Path, number: int, raw: bytes, kind: type[Kind]) -> Kind:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkloadError(f"{path}, line {number}: {error}") from error
