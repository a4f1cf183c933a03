"""Counts the answered requests of a batch and their tokens."""

from dataclasses import astuple, dataclass, fields

from service.db.tables import Batch
from service.objects.shards import Answer, Outcome


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of answered requests and their tokens; the fields are named like the columns of a batch's row.

    Of those that are completed, some have an outcome that is not ok. `cut_off_tokens`: output tokens of those cut off.
    `not_accepted`: of those that failed, the ones with an answer that their batch does not accept.
    """

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    cut_off: int = 0
    cut_off_tokens: int = 0
    invalid: int = 0
    refused: int = 0
    looped: int = 0
    not_accepted: int = 0

    @classmethod
    def of(cls, answer: Answer) -> "Counts":
        usage, outcome = answer.usage, answer.outcome if answer.ok else Outcome.OK
        is_cut = outcome == Outcome.CUT_OFF
        return cls(
            *(int(answer.ok), int(not answer.ok), usage.input, usage.cached, usage.output, usage.reasoning),
            *(int(is_cut), usage.answer if is_cut else 0),
            *(int(outcome == each) for each in (Outcome.INVALID, Outcome.REFUSED, Outcome.LOOPED)),
            not_accepted=int(not answer.ok and answer.outcome != Outcome.OK),
        )

    @classmethod
    def of_row(cls, row: Batch) -> "Counts":
        """Return the counts of a finished batch."""
        return cls(*(getattr(row, each.name) for each in fields(cls)))

    @classmethod
    def parse(cls, text: str) -> "Counts":
        return cls(*(int(part) for part in text.split(",")))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        return ",".join(str(each) for each in astuple(self))

    @property
    def answered(self) -> int:
        return self.completed + self.failed
