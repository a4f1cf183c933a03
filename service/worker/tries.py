"""Asks a request again while its answers are not accepted, and adds up what all of them took."""

from dataclasses import dataclass
from typing import Any

import msgspec

from engine_ext.plugin.marks import Bounds
from service.objects.shards import Outcome, Usage
from service.requests.accept import Accept
from service.worker.answer_body import NO_USAGE

WARMER = 0.7  # the temperature of another try at a request with none, which would get the same answer again
CUT = (Outcome.CUT_OFF, Outcome.LOOPED, Outcome.REFUSED)
NOT_ACCEPTED = "answer_not_accepted"
WORDS = {
    Outcome.CUT_OFF: "was cut off by max_tokens or the model's context",
    Outcome.LOOPED: "repeats itself until it was cut off",
    Outcome.INVALID: "is not the JSON that the request asked for",
    Outcome.REFUSED: "was refused by the model or a filter",
}


def takes(accept: Accept, outcome: Outcome) -> bool:
    """Return whether an answer with this outcome is accepted."""
    return not ((accept.finish and outcome in CUT) or (accept.schema and outcome == Outcome.INVALID))


@dataclass(slots=True)
class Tries:
    """The tries at one request. `spent`: the tokens of those that were not accepted."""

    accept: Accept
    number: int = 1
    spent: Usage = NO_USAGE

    @property
    def bounds(self) -> Bounds:
        """What ends an answer early."""
        return Bounds(self.accept.loops == "stop", self.accept.thinking_tokens)

    def body(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the request's body for the try that comes now."""
        if self.number == 1:
            return asked
        seed = asked.get("seed")
        warmth = {"temperature": WARMER} if asked.get("temperature") == 0 else {}
        return asked | warmth | ({"seed": seed + self.number - 1} if isinstance(seed, int) else {})

    def has_another(self, outcome: Outcome, usage: Usage) -> bool:
        """Return whether to ask again after this answer; then it counts as spent."""
        if takes(self.accept, outcome) or self.number > self.accept.retries:
            return False
        self.spent = self.plus(usage)
        self.number += 1
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
            answer=usage.output,
        )

    def refusal(self, outcome: Outcome) -> dict[str, str] | None:
        """Return the error of a request whose last answer is not accepted; None if it is."""
        if takes(self.accept, outcome):
            return None
        tries = f", {self.number} times" if self.number > 1 else ""
        return {
            "code": NOT_ACCEPTED,
            "message": f"The answer {WORDS[outcome]}{tries}, and the batch accepts none such.",
        }

    def noted(self, body: bytes) -> bytes:
        """Return an answer whose usage says how many tries there were, and what the others took."""
        if self.number == 1:
            return body
        found = msgspec.json.decode(body)
        names, spent = ("input_tokens", "cached_tokens", "output_tokens"), self.spent
        spent = dict(zip(names, (spent.input, spent.cached, spent.output), strict=True))
        found["usage"] = {**(found.get("usage") or {}), "tries": self.number, "not_accepted": spent}
        return msgspec.json.encode(found)
