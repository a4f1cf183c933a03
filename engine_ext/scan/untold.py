"""Collects what a scan is to be told of the last step, so that what it admitted in vain returns in its own order."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine_ext.scan.events import PUT_BACK, Event


@dataclass(slots=True)
class Untold:
    """The events of which a scan does not know yet; requests by number.

    Some requests of a step are held back for their twins, and then the engine may refuse others. Each goes to the front
    of its queue when the scan hears of it, so the one that stood first must be the last that is told.
    """

    events: list[Event] = field(default_factory=list[Event])
    _turns: dict[int, int] = field(default_factory=dict[int, int])  # where each stood in the step, by number
    _back: list[int] = field(default_factory=list[int])  # the turns, negative, of those that `events` begins with

    def hold(self, step: Sequence[int], held: Sequence[int]) -> None:
        """Note a step that was just decided, before any other event, and which of its requests are held back."""
        self._turns = {number: turn for turn, number in enumerate(step)}
        for number in held:
            self.add((PUT_BACK, number, 0))

    def add(self, event: Event) -> None:
        """Add what happened last; a request of the step that is put back takes its turn among those before it."""
        kind, number, _ = event
        at, turn = len(self.events), self._turns.get(number)
        if kind == PUT_BACK and turn is not None:
            at = bisect(self._back, -turn)
            self._back.insert(at, -turn)
        self.events.insert(at, event)

    def clear(self) -> None:
        self.events.clear()
        self._turns.clear()
        self._back.clear()
