"""Summarizes why requests failed: groups similar errors, each with a count and some custom_ids."""

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

CAUSES = 50
SAMPLES = 3
MESSAGE_CHARACTERS = 500
READ_CHARACTERS = 4000  # of a message, in which what varies is left out before it is cut
_VARIABLE = re.compile(r"'[^']*'|\"[^\"]*\"|\d+")


class _Error(msgspec.Struct):
    code: Any = None  # an engine may send any type
    message: Any = None


class _Body(msgspec.Struct):
    error: _Error | None = None


class _Response(msgspec.Struct):
    status_code: int
    body: _Body


class _Line(msgspec.Struct):
    custom_id: str | None
    response: _Response | None = None
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class Digest:
    """Counts the causes of failed requests. To bound memory, causes after the first fifty are counted together."""

    _causes: dict[tuple[Any, ...], dict[str, Any]] = field(default_factory=dict[tuple[Any, ...], dict[str, Any]])

    def add(self, line: bytes) -> None:
        """Count a line of the error file."""
        try:
            found = _decoder.decode(line)
        except (msgspec.DecodeError, RecursionError):  # an engine may send any body
            found = _Line(None)
        response = found.response
        status = response.status_code if response else None
        error = found.error or (response and response.body.error) or _Error()
        code = None if error.code is None else str(error.code)[:64]
        text = str(error.message or "")[:READ_CHARACTERS]
        message, alike = text[:MESSAGE_CHARACTERS], _VARIABLE.sub("…", text)[:MESSAGE_CHARACTERS]
        key: tuple[Any, ...] = (status, code, alike)
        if key not in self._causes and len(self._causes) >= CAUSES:
            key, status, code, message = ("others",), None, "others", "Other causes."
        cause = self._causes.setdefault(
            key, {"status_code": status, "code": code, "message": message, "count": 0, "custom_ids": []}
        )
        cause["count"] += 1
        if len(cause["custom_ids"]) < SAMPLES and found.custom_id is not None:
            cause["custom_ids"].append(found.custom_id)

    @property
    def causes(self) -> list[dict[str, Any]]:
        """Return the causes, the most frequent first."""
        return sorted(self._causes.values(), key=lambda cause: -cause["count"])
