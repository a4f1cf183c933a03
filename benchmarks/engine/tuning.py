"""Describes how a benchmark run is scheduled, in numbers that SGLang's set_internal_state carries to the scheduler."""

from dataclasses import dataclass

from engine_ext.coserve.slo import NAMES, SloClass, SloClasses
from engine_ext.costs.engine_model import Clock
from engine_ext.costs.hardware import MEASURED, Hardware

PRIORITY = "priority"  # fcfs with --enable-priority-scheduling
POLICIES = ("fcfs", "lpm", "dfs-weight", PRIORITY)
MOST_TOKENS = 8192  # in one step
MARK = "batchweave_"
FLOPS = "flops_"


def classes_of(ttft_s: float, tpot_s: float, stronger: float) -> SloClasses:
    """Return the classes of online requests in a run; see Tuning."""
    priority, default, flex = NAMES
    strong = SloClass(priority, stronger * ttft_s, stronger * tpot_s)
    return strong, SloClass(default, ttft_s, tpot_s), SloClass(flex)


@dataclass(frozen=True, slots=True)
class Tuning:
    """How a run is scheduled. `policy`: one of POLICIES, or None for the dual scan.

    `chunk` (chunked prefill size) and `ratio` (initial new token ratio) are SGLang's; the scan uses `chunk` as its
    largest step. `mixed`: decodes ride in prefill chunks. `clock`: the clock of an emulated device, which then decides
    whether decodes ride. `ttft_s` and `tpot_s` bound the tokens of online requests, and `stronger` of them those of the
    class priority; `limit_s`, `price_s` and `prompt_tokens` the steps beside them, 0 for no limit; `prompts_alone`
    leaves batches out of steps with online prompts, and `cuts_prompts` cuts these to `limit_s`. `until_s`: for how long
    online requests arrive on a virtual clock; 0 for none. `measured`: by whose costs to plan; None for those of the run
    before.
    """

    policy: str | None = None
    chunk: int = MOST_TOKENS
    ratio: float = 0.7
    mixed: bool = True
    clock: Clock = Clock.MIXED
    ttft_s: float = 1.0
    tpot_s: float = 0.05
    stronger: float = 1.0
    limit_s: float = 0.0
    price_s: float = 0.0
    prompts_alone: bool = False
    cuts_prompts: bool = False
    prompt_tokens: int = 0
    until_s: float = 0.0
    measured: Hardware | None = None

    @property
    def classes(self) -> SloClasses:
        return classes_of(self.ttft_s, self.tpot_s, self.stronger)

    def numbers(self) -> dict[str, float]:
        values: dict[str, float] = {
            "policy": POLICIES.index(self.policy or "fcfs"),
            # SGLang runs as it is: watching its requests as online ones takes up to milliseconds of each step.
            "alone": int(self.policy is not None and not self.until_s),
            "chunk": self.chunk,
            "ratio": self.ratio,
            "mixed": int(self.mixed),
            "clock": int(self.clock),
            "ttft_s": self.ttft_s,
            "tpot_s": self.tpot_s,
            "stronger": self.stronger,
            "limit_s": self.limit_s,
            "price_s": self.price_s,
            "prompts_alone": int(self.prompts_alone),
            "cuts_prompts": int(self.cuts_prompts),
            "prompt_tokens": self.prompt_tokens,
            "until_s": self.until_s,
        }
        if self.measured is not None:
            values |= {name: getattr(self.measured, name) or 0.0 for name in ("bandwidth", *MEASURED)}
            values |= {FLOPS + dtype: flops for dtype, flops in self.measured.flops.items()}
        return {MARK + name: value for name, value in values.items()}
