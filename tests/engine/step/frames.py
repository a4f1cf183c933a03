"""Holds what one step of a real scheduler was decided by, and what became of it."""

from dataclasses import dataclass, field

from engine_ext.scan.state import State
from engine_ext.step.memory import Memory
from engine_ext.step.plan import StepPlan
from engine_ext.step.view import View

RECORD = "BATCHWEAVE_TEST_RECORD"  # the file to which a scheduler appends pickled Frames


@dataclass(slots=True)
class Held:
    """What the engine holds of a request.

    `generated`: output tokens. `cached`: tokens of it in the cache, or computed. `times`: of an online request, when
    it came and got its first and its last token. `made_way`: how often it was taken off.
    """

    is_ours: bool
    is_aborted: bool
    generated: int
    cached: int
    skipped: int = 0
    made_way: int = 0
    times: tuple[float, float, float] = (0.0, 0.0, 0.0)


@dataclass(slots=True)
class Frame:
    """One step. Requests are named by their ids.

    `decoding`: all that decode; `chunked`: whose prompt is computed in chunks; `waiting`: online requests. `places`:
    the requests of the scan's plan. `state`, `memory`: as they were before the decision. `admitted` to `computed` say
    what became of the plan: `is_asked` whether SGLang was asked for a step of prompts, and `computed` the prompt tokens
    of each request.
    """

    view: View
    now: float
    ratio: float
    decoded: int
    held: dict[str, Held]
    decoding: list[str]
    chunked: str | None
    waiting: list[str]
    places: list[str | None] = field(default_factory=list[str | None])
    state: State | None = None
    memory: Memory | None = None
    plan: StepPlan | None = None
    admitted: list[str] = field(default_factory=list[str])
    is_asked: bool = False
    rests: list[str] = field(default_factory=list[str])
    made_way: list[str] = field(default_factory=list[str])
    computed: dict[str, int] = field(default_factory=dict[str, int])
