"""Says how long the next step may take, so that every online request gets its next token in time."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from engine_ext.compiled import compiled
from engine_ext.coserve.slo import Bounds
from engine_ext.coserve.tuning import GUARD
from engine_ext.errors import InputError


class Profiled(NamedTuple):
    """Holds what keeps the bounds that only many requests together have, found by trying.

    `limit_s`: the longest step with work of a batch, in seconds, which bounds percentiles. `price_s`: how many seconds
    longer a batch may make a step, divided by the online requests that wait for it, which bounds means: the same
    seconds delay fewer tokens where few decode. `prompts_alone`: whether steps do nothing for batches while an online
    prompt waits or is computed. A first token waits for every step of its prompt, but only for the rest of one step
    before them, so leaving batches out of the prompt's steps shortens it most, and the others may be longer.
    `cuts_prompts`: whether `limit_s` also bounds steps with online prompts while others decode, so that these prompts
    are computed in smaller chunks. That shortens the longest times between tokens, for longer TTFT.
    """

    limit_s: float = math.inf
    price_s: float = math.inf
    prompts_alone: bool = False
    cuts_prompts: bool = False

    def numbers(self) -> "Profiled":
        """Return the same with one type per field, so that functions compile once."""
        return Profiled(float(self.limit_s), float(self.price_s), bool(self.prompts_alone), bool(self.cuts_prompts))


NOT_PROFILED = Profiled()


@dataclass(frozen=True, slots=True)
class Limits:
    """Holds what was profiled where JSON must carry it, which has no infinity: None where nothing is limited.

    `prompt_tokens`: the most prompt tokens of a step while online requests come or are expected. Unlike SGLang's chunk
    it does not shrink as more requests decode.
    """

    limit_s: float | None = None
    price_s: float | None = None
    prompts_alone: bool = False
    cuts_prompts: bool = False
    prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.prompt_tokens is not None and self.prompt_tokens < 1:
            raise InputError(f"the prompt_tokens of a profile must be at least 1, not {self.prompt_tokens}")
        for field in ("limit_s", "price_s"):
            value = getattr(self, field)
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"the {field} of a profile must be a number of seconds above 0, not {value:g}")

    @property
    def profiled(self) -> Profiled:
        limit_s, price_s = (math.inf if each is None else float(each) for each in (self.limit_s, self.price_s))
        return Profiled(limit_s, price_s, self.prompts_alone, self.cuts_prompts)


NO_LIMITS = Limits()


@compiled
def step_limit(
    bounds: Bounds, profiled: Profiled, least_slack_s: float, alone_s: float, online: int, has_prompts: bool
) -> float:
    """Return the most seconds that a step may take.

    `least_slack_s`: the least time until the next token of a request in the step is due, less what still runs.
    `alone_s`: the seconds of the step with nothing of the batches in it; no limit is shorter, because leaving out
    decodes of online requests would only move the delay to them. `online`: how many online requests are in the step.
    `has_prompts`: whether an online prompt is in the step or waits.
    """
    if has_prompts and profiled.prompts_alone:
        return alone_s
    if online == 0:
        return GUARD * bounds.ttft_s
    # A step longer than the pace would be made good later, but a reader sees it.
    most = min(least_slack_s, GUARD * bounds.ttft_s, bounds.tpot_s, bounds.tbt_s, profiled.limit_s)
    return max(min(most, alone_s + profiled.price_s / online), alone_s)


@compiled
def while_prompts_wait(alone_s: float, slack_s: float, rest: int, chunk: int) -> float:
    """Return the most seconds of a step that leaves `rest` tokens of online prompts to further steps of `chunk` each.

    `slack_s`: the least time until the first token of one of them is due. Half of it is spread over these steps, on top
    of the `alone_s` seconds that each takes anyway.
    """
    return alone_s + max(0.0, slack_s) / (2 * (rest // max(chunk, 1) + 1))
