"""Measures how fast each model's workers answer, from counts taken every few seconds."""

import math
from collections.abc import Mapping, Sequence, Set

from service.db.tables import Batch
from service.estimates.standing import work_of
from service.metrics.history import Pace

FORGET_S = 120.0


class Paces:
    """Averages the paces of models. Time in which a model had no work, or no worker, does not count."""

    def __init__(self) -> None:
        self._answered: dict[str, int] = {}  # by batch, at the last look
        self._looked_at: int | None = None
        self._sums: dict[str, list[float]] = {}  # by model: answers, work and seconds, each decaying with age
        self._busy: set[str] = set()  # models that had work at the last look

    @property
    def looked_at(self) -> int | None:
        return self._looked_at

    @property
    def answers_per_second(self) -> float:
        """Return the answers per second of all busy models together."""
        busy = (self._sums[model] for model in self._busy)
        return round(sum(answers / seconds for answers, _, seconds in busy), 6)

    @property
    def by_model(self) -> dict[str, Pace]:
        return {model: Pace(work / seconds, answers) for model, (answers, work, seconds) in self._sums.items()}

    def look(self, batches: Sequence[Batch], answered: Mapping[str, int], alive: Set[str], now: int) -> None:
        """Update the paces.

        `batches`: those that run, or ended since the last look; `answered`: answers by batch id; `alive`: models that
        have workers.
        """
        if self._looked_at is not None and now > self._looked_at:
            elapsed_s = now - self._looked_at
            keep = math.exp(-elapsed_s / FORGET_S)
            self._busy = {batch.model or "" for batch in batches} & alive
            for model in self._busy:
                sums = self._sums.setdefault(model, [0.0, 0.0, 0.0])
                sums[:] = [keep * each for each in sums]
                sums[2] += elapsed_s
            for batch in batches:
                if sums := self._sums.get(batch.model or ""):
                    more, work = max(answered[batch.id] - self._answered.get(batch.id, 0), 0), work_of(batch)
                    sums[0] += more
                    sums[1] += more * work.gpu_s / batch.total if work else 0.0
        self._answered, self._looked_at = dict(answered), now
