"""Checks on the lines of a batch file: every fault that needs no engine, with its line and a code of OpenAI's."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from service.endpoints import BY_PATH, ENDPOINTS
from service.jobs.custom_ids import CustomIds

MAX_ERRORS = 1000
MAX_CUSTOM_ID = 512


class RequestLine(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: dict[str, Any]


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
_custom_id = msgspec.json.Decoder(_CustomId)


class Fault(Exception):
    """A line that cannot run."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.param = code, message, param


@dataclass(slots=True)
class LineChecker:
    """Checks lines in the order of the file and collects the first thousand errors.

    A custom_id that comes twice is none of them yet: `custom_ids` knows it when all lines were checked.
    """

    endpoint: str
    only: frozenset[str] | None = None  # custom_ids that are wanted of the file; all
    model: str | None = None  # what the first good line asks for
    model_line: int = 0
    requests: int = 0
    errors: list[LineError] = field(default_factory=list[LineError])
    custom_ids: CustomIds = field(default_factory=CustomIds)

    def check(self, number: int, raw: bytes) -> RequestLine | None:
        """The request of line `number` (1-based), or None: the line is blank or not wanted, or its error is noted."""
        if not raw.strip():
            return None
        try:
            request = self._parse(raw)
            self._judge(number, request)
        except Fault as fault:
            self.add(LineError(fault.code, fault.message, number, fault.param))
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
        try:
            return _decoder.decode(raw)
        except (msgspec.DecodeError, RecursionError) as error:
            raise _explain(raw, error) from error

    def _judge(self, number: int, request: RequestLine) -> None:
        if not request.custom_id:
            raise Fault("missing_required_parameter", "'custom_id' is empty.", "custom_id")
        if len(request.custom_id) > MAX_CUSTOM_ID:
            raise Fault("invalid_request", f"custom_id is longer than {MAX_CUSTOM_ID} characters.", "custom_id")
        self.custom_ids.add(number, request.custom_id)
        if request.method != "POST":
            raise Fault("invalid_method", f"method must be 'POST', not {quoted(request.method)}.", "method")
        if request.url != self.endpoint:
            if request.url not in ENDPOINTS:
                raise Fault("invalid_url", f"url {quoted(request.url)} is none of {', '.join(ENDPOINTS)}.", "url")
            raise Fault("url_mismatch", f"url {request.url!r} is not the batch's endpoint {self.endpoint!r}.", "url")
        for name in BY_PATH[self.endpoint].required:
            if not request.body.get(name):
                raise Fault("missing_required_parameter", f"'body.{name}' is missing or empty.", f"body.{name}")
        if request.body.get("stream"):
            raise Fault("streaming_unsupported", "A batch cannot stream: remove 'stream'.", "body.stream")
        self._judge_model(number, request.body["model"])

    def _judge_model(self, number: int, model: Any) -> None:
        if not isinstance(model, str):
            raise Fault("invalid_request", "'body.model' must be a string.", "body.model")
        if self.model is None:
            self.model, self.model_line = model, number
        elif model != self.model:
            first = f"{quoted(self.model)} of line {self.model_line}"
            message = f"model {quoted(model)} is not {first}: a batch names one model."
            raise Fault("model_mismatch", message, "body.model")


def duplicate(custom_id: str, number: int, before: int) -> LineError:
    """The error of line `number`, whose custom_id is on line `before` already."""
    message = f"custom_id {quoted(custom_id)} is already on line {before}."
    return LineError("duplicate_custom_id", message, number, "custom_id")


def custom_id_of(line: bytes) -> str:
    """Of a line that was checked, of an input or of a result file."""
    return _custom_id.decode(line).custom_id


def quoted(text: str) -> str:
    """A client's text inside a message, cut where it is long."""
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


def _explain(raw: bytes, error: Exception) -> Fault:
    """Why a line is no request: which field is missing or of the wrong type, or where its JSON ends."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return Fault("invalid_json_line", f"The line is not valid JSON: {error}.")
    if not isinstance(found, dict):
        return Fault("invalid_json_line", "The line is not a JSON object.")
    for name in ("custom_id", "method", "url", "body"):
        if name not in found:
            return Fault("missing_required_parameter", f"'{name}' is missing.", name)
    for name, kind in (("custom_id", str), ("method", str), ("url", str), ("body", dict)):
        if not isinstance(found[name], kind):
            wanted = "an object" if kind is dict else "a string"
            return Fault("invalid_request", f"'{name}' must be {wanted}.", name)
    return Fault("invalid_json_line", f"The line is not valid: {error}.")
