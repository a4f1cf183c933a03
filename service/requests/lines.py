"""Checks the lines of a batch file: finds every fault that needs no engine, with its line and OpenAI's error code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from batchweave.files import BYTE_ORDER_MARK
from service.endpoints import BY_PATH, ENDPOINTS
from service.objects.request_output import with_limit
from service.requests.accept import EVERY_ANSWER, Accept, known
from service.requests.body_limits import body_faults
from service.requests.custom_ids import CustomIds, Names

MAX_ERRORS = 1000
MAX_CUSTOM_ID = 512
MAX_NESTING = 200  # well below the depths at which the various parsers give up
MAX_MARKS = 100_000  # brackets and names of members: each becomes an object while the line is being checked
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(b"]}")] = 1, -1


class RequestLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]
    batchweave: Any = None  # options beyond OpenAI's, as in a batch's create: `accept`


@dataclass(frozen=True, slots=True)
class LineError:
    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def shape(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


class _CustomId(msgspec.Struct):
    custom_id: str


_decoder = msgspec.json.Decoder(RequestLine)
# The first half of a pair without the second one, or the second without the first.
_SURROGATE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB][0-9a-fA-F]{2})\\u[dD][c-fC-F]"
)
_custom_id = msgspec.json.Decoder(_CustomId)


class Fault(Exception):
    """A line that cannot run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


@dataclass(slots=True)
class LineChecker:
    """Checks lines in the order of the file and collects the first thousand errors.

    These do not include duplicate custom_ids yet: `custom_ids` knows those once all lines are checked.
    """

    endpoint: str
    only: Names | None = None  # custom_ids that are wanted from the file; None is all
    allow_patterns: bool = False  # see body_limits.PATTERNS
    accept: Accept = EVERY_ANSWER  # what the batch does
    is_known: bool = False  # the file has been validated before, maybe by an older version
    model: str | None = None  # the first model that a line names
    model_line: int = 0
    requests: int = 0
    errors: list[LineError] = field(default_factory=list[LineError])
    custom_ids: CustomIds = field(default_factory=CustomIds)

    def check(self, number: int, raw: bytes) -> RequestLine | None:
        """Return the request of line `number` (1-based); None if it is blank, not wanted, or its errors are noted."""
        if not raw.strip():
            return None
        try:
            request = self._parse(raw)
        except Fault as fault:
            self.add(LineError(fault.code, fault.message, number, fault.param))
            return None
        faults = [*self._judge_envelope(number, request), *self._judge_body(number, request)]
        for fault in faults:
            self.add(LineError(fault.code, fault.message, number, fault.param))
        if faults:
            return None
        if self.only is not None and request.custom_id not in self.only:
            return None
        self.requests += 1
        return request

    def add(self, error: LineError) -> None:
        if len(self.errors) < MAX_ERRORS:
            self.errors.append(error)

    def _parse(self, raw: bytes) -> RequestLine:
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            raise Fault("invalid_encoding", f"The line is not UTF-8 at byte {error.start + 1}.") from error
        if reason := nesting_fault(raw):
            raise Fault("invalid_json_line", f"The line {reason}.")
        try:
            return _decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _explain(raw, error) from error

    def _judge_envelope(self, number: int, request: RequestLine) -> Iterator[Fault]:
        if not request.custom_id:
            yield Fault("missing_required_parameter", "'custom_id' is empty.", "custom_id")
        elif len(request.custom_id) > MAX_CUSTOM_ID:
            yield Fault("invalid_request", f"custom_id is longer than {MAX_CUSTOM_ID} characters.", "custom_id")
        else:
            self.custom_ids.add(number, request.custom_id)
        if request.method != "POST":
            yield Fault("invalid_method", f"method must be 'POST', not {quoted(request.method)}.", "method")
        if request.url not in ENDPOINTS:
            yield Fault("invalid_url", f"url must be one of {', '.join(ENDPOINTS)}, not {quoted(request.url)}.", "url")
        elif request.url != self.endpoint:
            yield Fault("url_mismatch", f"url {request.url!r} is not the batch's endpoint {self.endpoint!r}.", "url")
        try:
            if not self.is_known:
                self.accept.with_line(request.batchweave)
        except ValueError as error:
            yield Fault("invalid_request", f"{error}.", "batchweave")

    def _judge_body(self, number: int, request: RequestLine) -> Iterator[Fault]:
        body = request.body
        for name in BY_PATH[self.endpoint].required:
            # An empty prompt fails its line, when it runs.
            if body.get(name) is None or (name == "model" and not body[name]):
                yield Fault("missing_required_parameter", f"'body.{name}' is missing or empty.", f"body.{name}")
        if body.get("stream"):
            yield Fault("streaming_unsupported", "A batch cannot stream: remove 'stream'.", "body.stream")
        raised = with_limit(self.endpoint, body, None, known(self.accept, request.batchweave).more)
        for param, reason in body_faults(raised, self.allow_patterns):
            yield Fault("invalid_request", f"'body.{param}' {reason}.", f"body.{param}")
        if body.get("model"):
            yield from self._judge_model(number, body["model"])

    def _judge_model(self, number: int, model: Any) -> Iterator[Fault]:
        if not isinstance(model, str):
            yield Fault("invalid_request", "'body.model' must be a string.", "body.model")
        elif self.model is None:
            self.model, self.model_line = model, number
        elif model != self.model:
            first = f"{quoted(self.model)} on line {self.model_line}"
            message = f"model {quoted(model)} differs from {first}: a batch can use only one model."
            yield Fault("model_mismatch", message, "body.model")


def nesting_fault(raw: bytes) -> str | None:
    """Return why JSON is too deep or has too many values to be parsed, or None."""
    marks, depth = nesting(raw)
    if depth > MAX_NESTING:
        return f"is nested more than {MAX_NESTING} levels deep"
    return f"has more than {MAX_MARKS} brackets and members outside its strings" if marks > MAX_MARKS else None


def nesting(raw: bytes) -> tuple[int, int]:
    """Return how many brackets, braces and colons there are outside strings, and how deeply it is nested.

    Cheap for lines with few of them, for which both are 0; linear for all others, even with an unterminated string.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_NESTING and raw.count(b":") <= MAX_MARKS:
        return 0, 0
    text = np.frombuffer(raw.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    is_outside = np.cumsum(text == ord('"'), dtype=np.int32) % 2 == 0
    steps = np.where(is_outside, _STEPS[text], 0)
    members = int(np.count_nonzero(is_outside & (text == ord(":"))))
    return members + int(np.count_nonzero(steps)), int(np.cumsum(steps, dtype=np.int32).max(initial=0))


def duplicate(custom_id: str, number: int, before: int) -> LineError:
    """Return the error of line `number`, whose custom_id is already used on line `before`."""
    message = f"custom_id {quoted(custom_id)} is already used on line {before}."
    return LineError("duplicate_custom_id", message, number, "custom_id")


def custom_id_of(line: bytes) -> str:
    """Return the custom_id of a checked line of an input or result file."""
    return _custom_id.decode(line).custom_id


def quoted(text: str) -> str:
    """Quote a client's text for use in a message, and cut it if it is long."""
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


def _in_words(raw: bytes, error: Exception) -> str:
    """Say what the parser means."""
    if raw.startswith(BYTE_ORDER_MARK):
        return "it begins with a byte order mark, as if files were joined; only the first line may have one"
    if _SURROGATE.search(raw):
        return "it has half of a surrogate pair, such as \\ud83d without the second half"
    if raw.strip() in (b"{", b"["):
        return "it ends after its first bracket; a request must be on one line"
    return str(error)


def _explain(raw: bytes, error: Exception) -> Fault:
    """Explain why a line is not a request: a field is missing or has the wrong type, or the JSON is invalid."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return Fault("invalid_json_line", f"The line is not valid JSON: {_in_words(raw, error)}.")
    if not isinstance(found, dict):
        return Fault("invalid_json_line", "The line is not a JSON object.")
    if missing := [name for name in ("custom_id", "method", "url", "body") if name not in found]:
        names = " and ".join(f"'{name}'" for name in missing)
        return Fault(
            "missing_required_parameter", f"{names} {'is' if len(missing) == 1 else 'are'} missing.", missing[0]
        )
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if not isinstance(found[name], kind):
            wanted = "an object" if kind is dict else "a string"
            return Fault("invalid_request", f"'{name}' must be {wanted}.", name)
    return Fault("invalid_json_line", f"The line is not valid: {error}.")
