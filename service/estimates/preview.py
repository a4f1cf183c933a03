"""The preview of a held batch: what it would take if nothing else ran, as stored in its row."""

from dataclasses import asdict, dataclass
from typing import Any

from service.db.tables import Batch


@dataclass(frozen=True, slots=True)
class Preview:
    """Estimates by the planner's cost model. `requests` of the batch were planned; other figures are for all of them.

    `prompt_sharing`: the share of prompt tokens that are in a prefix already computed for an earlier request, if the
    cache keeps them all.
    """

    requests: int
    output_tokens: int
    prompt_sharing: float
    compute_s: float
    memory_s: float
    planned_for: str  # model and machine

    @classmethod
    def of(cls, batch: Batch) -> "Preview | None":
        return cls(**batch.preview) if batch.preview else None

    @property
    def row(self) -> dict[str, Any]:
        return asdict(self)
