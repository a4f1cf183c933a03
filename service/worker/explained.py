"""Adds to a request the answer that was not accepted, and what is wrong with it, for its next try."""

from typing import Any

from service.objects.shards import Outcome
from service.requests.accept import TURNS
from service.worker.answer_body import Body
from service.worker.judge import fault_of, only_text

MOST_TEXT = 4000  # characters of an answer that are shown again, from its beginning


def explanation(endpoint: str, asked: dict[str, Any], answer: Body, outcome: Outcome) -> list[dict[str, str]]:
    """Return the turns that show an answer and say what is wrong with it; none if it is not one invalid text.

    One that was cut off is just asked again: small models take it up where it was cut off, and learn its loop. There
    are no turns either where the request, whose body is `asked`, ends with one of the assistant: the answer continues
    that one.
    """
    if outcome != Outcome.INVALID:
        return []
    text, turns = only_text(answer), _turns(endpoint, asked)
    if not text or not turns or (isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant"):
        return []
    wrong = fault_of(asked, text)
    if not wrong:
        return []
    shown = text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]} [...]"
    told = f"Your answer {wrong}. Answer again, with nothing but the answer."
    return [{"role": "assistant", "content": shown}, {"role": "user", "content": told}]


def with_turns(endpoint: str, body: dict[str, Any], turns: list[dict[str, str]]) -> dict[str, Any]:
    """Return the body with these turns at its end."""
    return body | {TURNS[endpoint]: [*_turns(endpoint, body), *turns]} if turns else body


def _turns(endpoint: str, body: dict[str, Any]) -> list[Any]:
    """Return the turns of a request; none where its endpoint has none."""
    given = body.get(TURNS.get(endpoint, ""))
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    return given if isinstance(given, list) and "input_ids" not in body else []
