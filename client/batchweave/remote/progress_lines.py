"""Says a batch's progress in lines, where there is no terminal to draw a bar on."""

import re
from dataclasses import dataclass

from batchweave.terminal import said

FIRST_LINE_S, LAST_LINE_S = 10.0, 300.0  # between two lines of one state; each pause is twice the one before


@dataclass(slots=True)
class ProgressLines:
    """Prints each change of a batch's state, and how far it is: soon at first, then ever less often."""

    kind: str = ""  # the state without its numbers
    due_at: float = 0.0  # when the next line of this state is printed, by the caller's clock
    pause_s: float = FIRST_LINE_S

    def tell(self, state: str, far: str, now: float) -> None:
        """Print `state`, and `far` with it, if the state is new or has lasted long enough."""
        kind = re.sub(r"\d+", "", state)
        if kind != self.kind:
            self.kind, self.pause_s = kind, FIRST_LINE_S
        elif now < self.due_at:
            return
        else:
            self.pause_s = min(2 * self.pause_s, LAST_LINE_S)
        self.due_at = now + self.pause_s
        if not said.is_terminal:
            said.print(f"{state}: {far}" if far else state)
