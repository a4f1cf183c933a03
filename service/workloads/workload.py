"""Reading what is to be planned: a batch file, or a workload file that describes a trace without its text."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_ext.plan.blend import Wishes
from engine_ext.plan.lengths import LONGEST
from engine_ext.plan.prompts import Prompts, Segment, SegmentError
from engine_ext.plan.window import UNKNOWN, Outputs
from service.jobs.lines import LineChecker
from service.jobs.tokens import PromptTokens
from service.request_output import asked_output

Column = NDArray[np.int64]
TOKENIZE_LINES = 1024


class WorkloadError(Exception):
    """The file cannot be planned; the message names the line and the field."""


class WorkloadLine(msgspec.Struct, forbid_unknown_fields=True):
    """One request of a workload file."""

    segments: list[tuple[str | int, int]]
    output_tokens: int
    id: str | int | None = None
    tenant: str | int | None = None
    deadline_s: float | None = None
    max_tokens: int | None = None


class _Answer(msgspec.Struct):
    """A line of a lengths file, or of a batch's output file."""

    id: str | int | None = None
    custom_id: str | None = None
    output_tokens: int | None = None
    response: Any = None


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in the order of the file. `outputs.known` is the truth where the file tells it."""

    ids: list[str]
    prompts: Prompts
    outputs: Outputs
    wishes: Wishes


@dataclass(slots=True)
class _Columns:
    ids: list[str] = field(default_factory=list[str])
    lines: list[int] = field(default_factory=list[int])
    caps: list[int] = field(default_factory=list[int])
    known: list[int] = field(default_factory=list[int])
    tenants: list[str] = field(default_factory=list[str])
    deadlines: list[float] = field(default_factory=list[float])


def read_workload(path: Path, tokenizer: PromptTokens | None, lengths: dict[str, int]) -> Workload:
    """A file of either form, told by its first line. Raises WorkloadError.

    Without a tokenizer four bytes of text count as a token. `lengths`: true output tokens by id, where there are any.
    """
    first = next(_lines(path), None)
    if first is None:
        raise WorkloadError(f"{path} has no requests")
    columns = _Columns()
    segments = "segments" in _object(path, *first)
    prompts = _read_segments(path, columns) if segments else _read_batch(path, columns, tokenizer)
    for place, name in enumerate(columns.ids):
        if name in lengths:
            columns.known[place] = lengths[name]
    _, tenant = np.unique(np.array(columns.tenants), return_inverse=True)
    caps, known = np.array(columns.caps, dtype=np.int64), np.array(columns.known, dtype=np.int64)
    wishes = Wishes(np.array(columns.deadlines), tenant.astype(np.int64), np.ones(int(tenant.max()) + 1))
    kinds = tenant.astype(np.int64) * (LONGEST + 1) + np.minimum(caps, LONGEST)
    return Workload(columns.ids, prompts, Outputs(np.maximum(caps, known), known, kinds), wishes)


def read_lengths(path: Path) -> dict[str, int]:
    """Output tokens by id, from lines {"id", "output_tokens"} or a batch's output file. Raises WorkloadError."""
    found: dict[str, int] = {}
    for number, raw in _lines(path):
        try:
            answer = msgspec.json.decode(raw, type=_Answer)
        except msgspec.DecodeError as error:
            raise WorkloadError(f"{path}, line {number}: {error}") from error
        name = answer.custom_id if answer.custom_id is not None else answer.id
        tokens = answer.output_tokens
        if tokens is None and isinstance(answer.response, dict):
            usage = (answer.response.get("body") or {}).get("usage") or {}
            tokens = usage.get("completion_tokens", usage.get("output_tokens"))
        if name is None or not isinstance(tokens, int) or tokens < 0:
            raise WorkloadError(
                f"{path}, line {number}: a length needs 'id' and 'output_tokens' (0 or more), or a batch's output line"
            )
        found[str(name)] = tokens
    return found


def _read_segments(path: Path, columns: _Columns) -> Prompts:
    decoder = msgspec.json.Decoder(WorkloadLine)

    def rows() -> Iterator[list[Segment]]:
        for number, raw in _lines(path):
            try:
                line = decoder.decode(raw)
            except msgspec.DecodeError as error:
                raise WorkloadError(f"{path}, line {number}: {error}") from error
            columns.lines.append(number)
            _check(path, number, line)
            columns.ids.append(str(len(columns.ids) if line.id is None else line.id))
            columns.caps.append(LONGEST if line.max_tokens is None else line.max_tokens)
            columns.known.append(line.output_tokens)
            columns.tenants.append("" if line.tenant is None else str(line.tenant))
            columns.deadlines.append(np.inf if line.deadline_s is None else line.deadline_s)
            yield line.segments

    try:
        return Prompts.of_segments(rows())
    except SegmentError as error:
        raise WorkloadError(f"{path}, line {columns.lines[error.number]}: segments: {error.problem}") from error


def _check(path: Path, number: int, line: WorkloadLine) -> None:
    for name, value, least in (
        ("output_tokens", line.output_tokens, 0),
        ("max_tokens", line.max_tokens, 1),
        ("deadline_s", line.deadline_s, 0),
    ):
        if value is not None and not value >= least:
            raise WorkloadError(f"{path}, line {number}: {name} must be at least {least}, not {value}")
    if line.output_tokens > LONGEST:
        raise WorkloadError(f"{path}, line {number}: output_tokens is above {LONGEST}")
    if not line.segments:
        raise WorkloadError(f"{path}, line {number}: segments is empty; a prompt has at least one")
    if sum(max(size, 0) for _, size in line.segments) > LONGEST:
        raise WorkloadError(f"{path}, line {number}: segments: the prompt is longer than {LONGEST} tokens")


def _read_batch(path: Path, columns: _Columns, tokenizer: PromptTokens | None) -> Prompts:
    checker: LineChecker | None = None
    parts: list[NDArray[np.uint32]] = []
    bodies: list[dict[str, Any]] = []

    def flush(endpoint: str) -> None:
        if tokenizer is not None:
            parts.extend(np.array(each, dtype=np.uint32) for each in tokenizer.encode(endpoint, bodies))
        else:
            parts.extend(_by_bytes(endpoint, body) for body in bodies)
        bodies.clear()

    for number, raw in _lines(path):
        if checker is None:
            url = _object(path, number, raw).get("url")
            checker = LineChecker(url if isinstance(url, str) else "")
        request = checker.check(number, raw)
        if request is None:
            error = checker.errors[0]
            raise WorkloadError(f"{path}, line {error.line}: {error.message}")
        asked = asked_output(request.body)
        columns.lines.append(number)
        columns.ids.append(request.custom_id)
        columns.caps.append(asked.most or LONGEST)
        columns.known.append(asked.most if asked.exact else UNKNOWN)
        columns.tenants.append("")
        columns.deadlines.append(np.inf)
        bodies.append(request.body)
        if len(bodies) == TOKENIZE_LINES:
            flush(checker.endpoint)
    if checker is not None:
        flush(checker.endpoint)
    starts = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64)
    return Prompts(np.concatenate(parts), starts)


def _by_bytes(endpoint: str, body: dict[str, Any]) -> NDArray[np.uint32]:
    """Four bytes of text as one token: about right in length, and equal beginnings stay equal."""
    data = PromptTokens(None, None, {}).text(endpoint, body).encode()
    return np.frombuffer(data + b" " * (-len(data) % 4), dtype="<u4").astype(np.uint32)


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not blank, with their 1-based numbers."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                if raw.strip():
                    yield number, raw
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error


def _object(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise WorkloadError(f"{path}, line {number}: {error}") from error
