"""Asks a request again while its answers are not accepted, and adds up what all of them took."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from service.objects.request_output import with_limit
from service.objects.shards import Outcome, Usage
from service.requests.accept import Accept
from service.requests.asked_json import asked_json
from service.requests.parameters import KNOWN
from service.worker.answer_body import NO_USAGE, Body
from service.worker.explained import explanation, with_turns

WARMER = 0.7  # the temperature of another try at a greedy request, which would get the same answer again
GREEDY = {"temperature": 0, "top_p": 0, "top_k": 1}
MOST_SEED = 1 << 63
NOT_WHOLE = (Outcome.CUT_OFF, Outcome.LOOPED, Outcome.REFUSED)
NOT_ACCEPTED = "answer_not_accepted"
WORDS = {
    Outcome.CUT_OFF: "was cut off by max_tokens or the model's context",
    Outcome.LOOPED: "repeated itself until it was cut off",
    Outcome.INVALID: "was not the JSON that the request asked for",
    Outcome.REFUSED: "was refused by the model or a filter",
}


@dataclass(slots=True)
class Tries:
    """The tries at one request. `asked`: its body. `spent`: the tokens of the answers that were not accepted.

    `is_due`: another try is to come. `has_room`: the context may hold the tokens beyond the request's own limit.
    `turns`: what the next try is told of the last answer.
    """

    accept: Accept
    endpoint: str
    asked: dict[str, Any]
    number: int = 1
    spent: Usage = NO_USAGE
    is_due: bool = False
    has_room: bool = True
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def next_body(self) -> dict[str, Any]:
        """Return the request's body for the try that comes now."""
        self.is_due = False
        body = with_limit(self.endpoint, self.asked, None, self.accept.more) if self.has_room else self.asked
        if self.number == 1:
            return body
        body = with_turns(self.endpoint, body, self.turns)
        greedy = {name for name, value in GREEDY.items() if body.get(name) == value}
        if greedy:
            body = {name: value for name, value in body.items() if name not in greedy} | {"temperature": WARMER}
        if "seed" in KNOWN[self.endpoint]:  # without one, an engine with deterministic inference takes the same again
            body = body | {"seed": ((body.get("seed") or 0) + self.number - 1) % MOST_SEED}
        return body

    def takes(self, outcome: Outcome) -> bool:
        """Return whether an answer with this outcome is accepted."""
        if outcome in NOT_WHOLE:
            return not (self.accept.finish or (self.accept.schema and asked_json(self.asked) is not None))
        return not (self.accept.schema and outcome == Outcome.INVALID)

    def has_another(self, outcomes: Sequence[Outcome], usage: Usage, answer: Body) -> bool:
        """Return whether to ask again after an answer whose choices have these outcomes; then it counts as spent."""
        bad = next((each for each in outcomes if not self.takes(each)), None)
        if bad is None or self.number > self.accept.retries:
            return False
        self.turns = explanation(self.endpoint, self.asked, answer, bad) if self.accept.explain else []
        self.spent = self.plus(usage)
        self.number += 1
        self.is_due = True
        return True

    def asks_for_less(self, error_code: str | None) -> bool:
        """Return whether to ask again without what was added to the request, because the engine refuses it.

        A template may refuse the added turns, and the model's context may hold neither them nor a longer answer.
        """
        if self.turns:
            self.turns = []
        elif self.has_room and self.accept.more and error_code == "context_length_exceeded":
            self.has_room = False
        else:
            return False
        self.is_due = True
        return True

    def plus(self, usage: Usage) -> Usage:
        """Return these tokens with those of all tries before."""
        if self.number == 1:
            return usage
        before = self.spent
        return Usage(
            before.input + usage.input,
            before.cached + usage.cached,
            before.output + usage.output,
            before.reasoning + usage.reasoning,
            last=usage.output,
        )

    def refusal(self, outcomes: Sequence[Outcome]) -> dict[str, str] | None:
        """Return the error of a request whose last answer is not accepted; None if it is."""
        outcome = next((each for each in outcomes if not self.takes(each)), None)
        if outcome is None:
            return None
        which = f"The last of {self.number} answers" if self.number > 1 else "The answer"
        return {"code": NOT_ACCEPTED, "message": f"{which} {WORDS[outcome]}, and is not accepted."}

    def noted(self, body: bytes) -> bytes:
        """Return an answer whose usage says how many tries there were, and what the others took."""
        if self.number == 1:
            return body
        found, spent = msgspec.json.decode(body, type=dict[str, msgspec.Raw]), self.spent
        not_accepted = {
            "input_tokens": spent.input,
            "cached_tokens": spent.cached,
            "output_tokens": spent.output,
            "reasoning_tokens": spent.reasoning,
        }
        usage = msgspec.json.decode(found.get("usage", b"{}")) or {}
        usage |= {"tries": self.number, "not_accepted": not_accepted}
        return msgspec.json.encode(found | {"usage": msgspec.Raw(msgspec.json.encode(usage))})
