"""Counts the answered requests of a batch and their tokens."""

from dataclasses import astuple, dataclass, fields

from service.db.tables import Batch
from service.objects.shards import Answer


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of answered requests and their tokens; the fields are named like the columns of a batch's row."""

    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    @classmethod
    def of(cls, answer: Answer) -> "Counts":
        usage = answer.usage
        return cls(int(answer.ok), int(not answer.ok), usage.input, usage.cached, usage.output, usage.reasoning)

    @classmethod
    def of_row(cls, row: Batch) -> "Counts":
        """Return the counts of a finished batch."""
        return cls(*(getattr(row, each.name) for each in fields(cls)))

    @classmethod
    def parse(cls, text: str) -> "Counts":
        return cls(*(int(part) for part in text.split(",")))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            self.completed + other.completed,
            self.failed + other.failed,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def __str__(self) -> str:
        return ",".join(str(each) for each in astuple(self))

    @property
    def answered(self) -> int:
        return self.completed + self.failed
