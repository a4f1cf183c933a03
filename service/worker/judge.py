"""Judges an answer when it is written: is it one that its request can use?

JSON that a request asked for is parsed and, where a schema is not large, validated with a budget: a schema can be made
to take hours on an answer, and the worker judges between the steps of everybody's streams.
"""

import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec
import structlog
from jsonschema import Draft202012Validator
from jsonschema.validators import extend
from referencing import Registry

from service.objects.shards import Outcome
from service.requests.asked_json import asked_json
from service.worker.answer_body import Body, Choice, Item
from service.worker.loops import period_of

SCHEMA_FIELDS = ("response_format", "text", "json_schema")  # of a request, that say which JSON it asks for
MOST_SCHEMA_BYTES = 64 * 1024
# Keywords that are applied to the choices of one answer, and members that they look at: tens of milliseconds at most.
MOST_CHECKS = 5000
KNOWN_SCHEMAS = 64
MOST_PATH, MOST_VALUE = 100, 300  # characters of what is said about a fault
CHARACTERS = 500  # of a text that is repeated in an error, which count as one check
VALID = ""
# The grammar enforces patterns, and one can be made to take hours here; formats are annotations; and looking for equal
# items takes the square of their number.
LEFT_OUT = ("pattern", "patternProperties", "format", "uniqueItems")
# What ends an answer, as chat completions and completions say it, or as responses do.
CUT_OFF, FILTERED = ("length", "max_output_tokens"), "content_filter"
log = structlog.get_logger()


class TooMuch(Exception):
    """The budget of an answer is used up: nobody can say whether it is valid."""


def outcomes_of(asked: dict[str, Any], answer: Body) -> list[Outcome]:
    """Return the outcomes of an answer's choices that are not ok, each once. `asked`: the request's body."""
    found = dict[Outcome, None]()
    _budget.left = MOST_CHECKS
    for end in _ends(answer):
        try:
            found[_outcome_of(asked, end)] = None
        except TooMuch:
            continue
        except Exception as error:  # no schema, however odd, costs its request the answer
            log.info("answer not judged", error=repr(error))
    return [outcome for outcome in found if outcome]


def outcome_of(asked: dict[str, Any], answer: Body) -> Outcome:
    """Return the first outcome of an answer's choices that is not ok."""
    return next(iter(outcomes_of(asked, answer)), Outcome.OK)


def _outcome_of(asked: dict[str, Any], end: "_End") -> Outcome:
    if end.reason in CUT_OFF:
        return Outcome.LOOPED if period_of(end.text or end.thought) else Outcome.CUT_OFF
    if end.reason == FILTERED or end.is_refusal:
        return Outcome.REFUSED
    if end.reason == "stop" and _fault(asked, end.text):
        return Outcome.INVALID
    return Outcome.OK


def is_valid(asked: dict[str, Any], answer: Body) -> bool:
    """Return whether each choice is the JSON that was asked for; False if none was asked for, or nobody can say."""
    _budget.left = MOST_CHECKS
    try:
        ends = _ends(answer)
        return bool(ends) and all(end.reason == "stop" and _fault(asked, end.text) == VALID for end in ends)
    except Exception:  # as in outcome_of
        return False


def only_text(answer: Body) -> str | None:
    """Return the text of an answer; None if it has several choices."""
    ends = _ends(answer)
    return ends[0].text if len(ends) == 1 else None


def fault_of(asked: dict[str, Any], text: str) -> str | None:
    """Return what is wrong with a text that is not the JSON that was asked for; None if nobody can say."""
    _budget.left = MOST_CHECKS
    try:
        return _fault(asked, text)
    except Exception:  # as in outcomes_of
        return None


class _End(NamedTuple):
    """Why a choice ended, its text, and what was thought before it."""

    reason: str
    text: str
    thought: str = ""
    is_refusal: bool = False


def _ends(answer: Body) -> list[_End]:
    """Return how each choice ended."""
    if answer.choices:
        return [_end_of(each) for each in answer.choices]
    parts = [part for item in answer.output for part in _parts(item)]
    is_refusal = any(part.type == "refusal" for part in parts)
    text = "".join(part.text or "" for part in parts if part.type == "output_text")
    because = answer.incomplete_details.reason if answer.incomplete_details else None
    is_call = not text and any(item.type == "function_call" for item in answer.output)
    ended = because or ("stop" if answer.status == "completed" and not is_call else answer.status or "")
    return [_End(ended, text, "", is_refusal)] if answer.output or because else []


def _end_of(choice: Choice) -> _End:
    message, reason = choice.message, choice.finish_reason or ""
    if message is None:
        return _End(reason, choice.text or "")
    return _End(reason, message.content or "", message.reasoning_content or "", bool(message.refusal))


def _parts(item: Item) -> list[Any]:
    return item.content if item.type == "message" and isinstance(item.content, list) else []


def _fault(asked: dict[str, Any], text: str) -> str | None:
    """Return what is wrong with a text that must be the JSON that was asked for, or VALID; None if none was.

    Raises TooMuch if nobody can say.
    """
    wanted = asked_json(asked)
    if wanted is None:
        return None
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        return f"is not valid JSON: {error}"
    written = msgspec.json.encode(wanted)
    if len(written) > MOST_SCHEMA_BYTES:
        raise TooMuch
    error = next(_validator(written).iter_errors(found), None)
    if error is None:
        return VALID
    value = msgspec.json.encode(error.validator_value).decode()[:MOST_VALUE]
    return f"does not meet the schema at {error.json_path[:MOST_PATH]}, where {error.validator} is {value}"


_budget = threading.local()  # `left`: for the answer that a thread judges now


def _counted(check: Any) -> Any:
    """Let a keyword's check take from the budget: one, one for each member that it may look at, and for its errors."""

    def checked(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        _take(1 + sum(len(each) for each in (value, instance) if isinstance(each, list | dict)))
        for error in check(validator, value, instance, schema) or ():
            _take(len(error.message) // CHARACTERS)  # it repeats what was judged, however long that is
            yield error

    return checked


def _take(count: int) -> None:
    _budget.left -= count
    if _budget.left < 0:
        raise TooMuch


_CHECKS = {name: None if name in LEFT_OUT else _counted(each) for name, each in Draft202012Validator.VALIDATORS.items()}
_Budgeted: Any = extend(Draft202012Validator, _CHECKS)


@lru_cache(KNOWN_SCHEMAS)
def _validator(written: bytes) -> Any:
    """Return the validator of a schema, for which nothing is fetched."""
    return _Budgeted(msgspec.json.decode(written), registry=Registry())
