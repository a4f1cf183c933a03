"""Judges an answer when it is written: is it one that its request can use?

JSON that a request asked for is parsed and, where a schema is not large, validated within a budget (schema_budget.py):
the worker judges between the steps of everybody's streams.
"""

from typing import Any, NamedTuple

import msgspec
import structlog

from service.objects.shards import Outcome
from service.requests.asked_json import asked_json
from service.worker.answer_body import Body, Choice, Item
from service.worker.loops import period_of
from service.worker.schema_budget import TooMuch, begin, first_error

SCHEMA_FIELDS = ("response_format", "text", "json_schema")  # of a request, that say which JSON it asks for
MOST_SCHEMA_BYTES = 64 * 1024
MOST_PATH, MOST_VALUE = 100, 300  # characters of what is said about a fault
VALID = ""
# What ends an answer, as chat completions and completions say it, or as responses do.
CUT_OFF, FILTERED = ("length", "max_output_tokens"), "content_filter"
log = structlog.get_logger()


def outcomes_of(asked: dict[str, Any], answer: Body) -> list[Outcome]:
    """Return the outcomes of an answer's choices that are not ok, each once. `asked`: the request's body."""
    found = dict[Outcome, None]()
    begin()
    for end in _ends(answer):
        try:
            found[_outcome_of(asked, end)] = None
        except TooMuch:
            continue
        except Exception as error:  # no schema, however odd, costs its request the answer
            log.info("answer not judged", error=type(error).__name__)  # its text may repeat the schema
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
    begin()
    try:
        ends = _ends(answer)
        return bool(ends) and all(end.reason == "stop" and _fault(asked, end.text) == VALID for end in ends)
    except Exception:  # as in outcomes_of
        return False


def only_text(answer: Body) -> str | None:
    """Return the text of an answer; None if it has several choices."""
    ends = _ends(answer)
    return ends[0].text if len(ends) == 1 else None


def fault_of(asked: dict[str, Any], text: str) -> str | None:
    """Return what is wrong with a text that is not the JSON that was asked for; None if nobody can say."""
    begin()
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
    error = first_error(written, found, len(text))
    if error is None:
        return VALID
    if error.schema is False:  # its error has no keyword and no path
        return "has a part that the schema does not allow"
    value = msgspec.json.encode(error.validator_value).decode()[:MOST_VALUE]
    return f"does not meet the schema at {error.json_path[:MOST_PATH]}, where {error.validator} is {value}"
