"""Judges an answer when it is written: is it one that its request can use?

JSON that a request asked for is parsed and, where a schema is not large, validated with a budget: a schema can be made
to take hours on an answer, and the worker judges between the steps of everybody's streams.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from service.objects.shards import Outcome
from service.worker.answer_body import Body, Choice, Item

MOST_SCHEMA_BYTES = 64 * 1024
MOST_CHECKS = 5000  # keywords of a schema that are applied to one answer: tens of milliseconds at most
KNOWN_SCHEMAS = 256
# The grammar enforces patterns, and one can be made to take hours here; formats are annotations.
LEFT_OUT = ("pattern", "patternProperties", "format")
# What ends an answer, as chat completions and completions say it, or as responses do.
CUT_OFF, FILTERED = ("length", "max_output_tokens"), "content_filter"


class TooMuch(Exception):
    """The budget of an answer is used up: nobody can say whether it is valid."""


def outcome_of(asked: dict[str, Any], answer: Body) -> Outcome:
    """Return the first outcome of an answer's choices that is not ok. `asked`: the request's body."""
    for reason, text, is_refusal in _ends(answer):
        if reason in CUT_OFF:
            return Outcome.CUT_OFF
        if reason == FILTERED or is_refusal:
            return Outcome.REFUSED
        if reason == "stop" and text and _is_invalid(asked, text):
            return Outcome.INVALID
    return Outcome.OK


def _ends(answer: Body) -> list[tuple[str, str, bool]]:
    """Return why each choice ended, its text, and whether it is a refusal."""
    if answer.choices:
        return [_end_of(each) for each in answer.choices]
    parts = [part for item in answer.output for part in _parts(item)]
    is_refusal = any(part.type == "refusal" for part in parts)
    text = "".join(part.text or "" for part in parts if part.type == "output_text")
    because = answer.incomplete_details.reason if answer.incomplete_details else None
    ended = because or ("stop" if answer.status == "completed" else answer.status or "")
    return [(ended, text, is_refusal)] if answer.output or because else []


def _end_of(choice: Choice) -> tuple[str, str, bool]:
    message = choice.message
    text = choice.text if message is None else message.content
    return choice.finish_reason or "", text or "", bool(message and message.refusal)


def _parts(item: Item) -> list[Any]:
    return item.content if item.type == "message" and isinstance(item.content, list) else []


def _is_invalid(asked: dict[str, Any], text: str) -> bool:
    wanted = _wanted(asked)
    if wanted is None:
        return False
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return True
    try:
        written = msgspec.json.encode(wanted)
        return len(written) <= MOST_SCHEMA_BYTES and not _validator(written)(found)
    except (TooMuch, RecursionError, SchemaError, Unresolvable, TypeError, ValueError, AttributeError):
        return False  # nobody can say


def _wanted(asked: dict[str, Any]) -> Any:
    """Return the schema that the answer must meet; None for any text."""
    given = asked.get("response_format") or (asked.get("text") or {}).get("format") or {}
    if not isinstance(given, dict):
        return None
    kind = given.get("type")
    if kind == "json_object":
        return {"type": "object"}
    if kind == "json_schema":
        inner = given.get("json_schema", given)
        return inner.get("schema", inner.get("schema_")) if isinstance(inner, dict) else None
    plain = asked.get("json_schema")  # SGLang's own
    if isinstance(plain, str):
        try:
            return msgspec.json.decode(plain)
        except (msgspec.DecodeError, RecursionError):
            return None
    return None


@lru_cache(KNOWN_SCHEMAS)
def _validator(written: bytes) -> Callable[[Any], bool]:
    """Return whether JSON is valid by a schema, of which nothing is fetched. Raises TooMuch."""
    schema, left = msgspec.json.decode(written), [0]

    def counted(check: Any) -> Any:
        def checked(*given: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise TooMuch
            return check(*given)

        return checked

    checks = {
        name: None if name in LEFT_OUT else counted(each) for name, each in Draft202012Validator.VALIDATORS.items()
    }
    validator = extend(Draft202012Validator, checks)(schema, registry=Registry())

    def is_valid(found: Any) -> bool:
        left[0] = MOST_CHECKS
        return validator.is_valid(found)

    return is_valid
