"""Adds to a request the answer that was not accepted, and what is wrong with it, for its next try."""

from typing import Any

from service.objects.shards import Outcome
from service.worker.answer_body import Body
from service.worker.judge import fault_of, only_text

MOST_TEXT = 4000  # characters of an answer that are shown again, from its beginning
CONVERSATIONS = {"/v1/chat/completions": "messages", "/v1/responses": "input"}  # by URL, the field with the turns
WORDS = {
    Outcome.CUT_OFF: "was cut off before its end; give a shorter one",
    Outcome.LOOPED: "repeats itself",
    Outcome.REFUSED: "is a refusal",
}


def explanation(asked: dict[str, Any], answer: Body, outcome: Outcome) -> list[dict[str, str]]:
    """Return the turns that show an answer and say what is wrong with it; none if it is not one text.

    `asked`: the request's body.
    """
    text = only_text(answer)
    wrong = fault_of(asked, text) if text and outcome == Outcome.INVALID else WORDS.get(outcome)
    if not text or not wrong:
        return []
    told = f"Your answer {wrong}. Answer again, with nothing but the answer."
    return [{"role": "assistant", "content": text[:MOST_TEXT]}, {"role": "user", "content": told}]


def with_turns(endpoint: str, body: dict[str, Any], turns: list[dict[str, str]]) -> dict[str, Any]:
    """Return the body with these turns at its end; as it is where its endpoint has no turns."""
    field = CONVERSATIONS.get(endpoint)
    if field is None or not turns:
        return body
    before = body.get(field)
    if isinstance(before, str):
        before = [{"role": "user", "content": before}]
    return body | {field: [*before, *turns]} if isinstance(before, list) else body
