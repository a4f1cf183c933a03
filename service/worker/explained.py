"""Adds to a request the answer that was not accepted, and what is wrong with it, for its next try."""

from typing import Any

from service.objects.shards import Outcome
from service.requests.accept import TURNS
from service.worker.answer_body import Body
from service.worker.judge import fault_of, only_text

MOST_TEXT = 4000  # characters of an answer that are shown again, from its beginning
A_GLIMPSE = 200  # of one that was cut off, whose next try needs the room, or that would teach its loop
WORDS = {
    Outcome.CUT_OFF: "was cut off before its end; give a shorter one",
    Outcome.LOOPED: "repeats itself",
    Outcome.REFUSED: "is a refusal",
}


def explanation(endpoint: str, asked: dict[str, Any], answer: Body, outcome: Outcome) -> list[dict[str, str]]:
    """Return the turns that show an answer and say what is wrong with it; none if it is not one text.

    `asked`: the request's body. None either where it ends with a turn of the assistant, which the answer continues.
    """
    text, turns = only_text(answer), _turns(endpoint, asked)
    if not text or not turns or (isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant"):
        return []
    wrong = fault_of(asked, text) if outcome == Outcome.INVALID else WORDS.get(outcome)
    if not wrong:
        return []
    most = MOST_TEXT if outcome == Outcome.INVALID else A_GLIMPSE
    shown = text if len(text) <= most else f"{text[:most]} [...]"
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
