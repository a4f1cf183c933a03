"""Models an engine, simulated or emulated: what a step costs by its clock, and how large its KV cache is."""

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from engine_ext.compiled import compiled
from engine_ext.costs.cost import CostModel

# The cost of overlap where it was not measured, as a share of the hidden time: an assumption, see docs/simulator.md.
INTERFERENCE = 0.1
STEP_OVERHEAD_S = 0.0  # engines schedule the next step while this one runs


class Clock(IntEnum):
    """Says how GEMM and attention share the time of a step."""

    OVERLAPPED = 0  # at once, as NanoFlow and PD-multiplexing do
    MIXED = 1  # one after the other; prefill chunks ride on decode's GEMM
    SEQUENTIAL = 2  # one after the other; a prefill batch stops decoding, SGLang's default


class StepModel(NamedTuple):
    """An EngineModel's numbers for compiled functions: every field always has the same type."""

    gemm_s: float
    read_s: float
    quadratic_s: float
    weights_s: float
    overhead_s: float
    interference: float
    clock: int
    capacity: int
    computes_twice: bool


@dataclass(frozen=True, slots=True)
class EngineModel:
    """Says what the steps of an engine cost, and how many tokens its KV cache holds (`capacity`).

    `gemm_s` is seconds of GEMM per token, `read_s` per KV token read, `quadratic_s` per unit of prefill attention
    (end^2 - begin^2 of a chunk), `weights_s` for reading the weights once, `overhead_s` per step on the CPU.
    `interference` is the share of the hidden time that shows anyway. With `computes_twice`, each request of a prefill
    batch computes the prefix that they share, as in stock SGLang.
    """

    gemm_s: float
    read_s: float
    quadratic_s: float
    weights_s: float
    capacity: int
    overhead_s: float = STEP_OVERHEAD_S
    interference: float = INTERFERENCE
    clock: Clock = Clock.OVERLAPPED
    computes_twice: bool = False

    @classmethod
    def of(
        cls,
        cost: CostModel,
        clock: Clock = Clock.OVERLAPPED,
        interference: float = INTERFERENCE,
        usable: float = 0.9,
        overhead_s: float = STEP_OVERHEAD_S,
    ) -> "EngineModel":
        """Build a model from datasheets; weights and KV cache may use the `usable` share of memory."""
        return cls(
            gemm_s=cost.gemm_s_per_token,
            read_s=cost.read_s_per_token,
            quadratic_s=cost.quadratic_s,
            weights_s=cost.weights_s,
            capacity=cost.kv_capacity_tokens(usable),
            overhead_s=overhead_s,
            interference=interference,
            clock=clock,
        )

    @classmethod
    def of_steps(cls, cost: CostModel, clock: Clock) -> "EngineModel":
        """Build a model from datasheets for the times of steps only; nothing has to fit in memory."""
        return cls(
            cost.gemm_s_per_token, cost.read_s_per_token, cost.quadratic_s, cost.weights_s, capacity=0, clock=clock
        )

    @property
    def numbers(self) -> StepModel:
        return StepModel(
            float(self.gemm_s),
            float(self.read_s),
            float(self.quadratic_s),
            float(self.weights_s),
            float(self.overhead_s),
            float(self.interference),
            int(self.clock),
            int(self.capacity),
            bool(self.computes_twice),
        )


@compiled
def compute_time(model: StepModel, tokens: int, quadratic: float) -> float:
    """Return a step's seconds of GEMM and prefill attention; the weights are read at least once."""
    if tokens == 0:
        return 0.0
    return max(tokens * model.gemm_s, model.weights_s) + quadratic * model.quadratic_s


@compiled
def step_time(model: StepModel, compute: float, reads: float) -> float:
    """Return the seconds of a step from its seconds of compute and of KV reads."""
    if model.clock == 0:
        return max(compute, reads) + model.interference * min(compute, reads) + model.overhead_s
    return compute + reads + model.overhead_s
