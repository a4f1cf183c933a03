"""An emulated device: SGLang's scheduler, radix cache and KV accounting as they are, and no forward pass.

Every step takes what the cost model says of the machine that is emulated, on a clock of its own; every output token is
the same. It answers how a policy would fare there, never a request: a worker that runs requests does not start with it,
and its name stands in every report. One engine can take one policy after the other, each with fresh books.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plan.cost import CostModel
from engine_ext.plan.engine_model import READ_S, Clock, EngineModel, compute_time, step_time
from engine_ext.plugin.options import handed_over
from engine_ext.plugin.step_load import load_of

TOKEN = 5
POLICIES = ("fcfs", "lpm", "dfs-weight")
SET = "batchweave_clock"  # the fields of SGLang's set_internal_state, which takes numbers only
CHUNK, RATIO, POLICY = "batchweave_chunk", "batchweave_ratio", "batchweave_policy"


class Device:
    """The clock of one scheduler process, and what it has computed."""

    def __init__(self, cost: CostModel, clock: Clock) -> None:
        self.machine, self.clock = cost.machine, clock
        self.model = EngineModel.of(cost, clock).array
        self.steps = 0
        self.prompt_tokens = 0
        self.seconds = 0.0
        self.compute_s = 0.0
        self.reads_s = 0.0

    def run(self, batch: Any) -> None:
        """Let a step pass: a prefill batch, decodes that ride in it too, or a decode batch."""
        load = load_of(batch)
        compute = float(compute_time(self.model, load.prompt_tokens + load.decoding, load.quadratic))
        seconds_of_reads = load.kv_tokens * float(self.model[READ_S])
        self.seconds += float(step_time(self.model, compute, seconds_of_reads))
        self.compute_s += compute
        self.reads_s += seconds_of_reads
        self.steps += 1
        self.prompt_tokens += load.prompt_tokens

    @property
    def name(self) -> str:
        return f"emulated {self.machine.accelerators} x {self.machine.hardware.name}, {self.clock.name.lower()} clock"


_device: Device | None = None


def books() -> dict[str, Any]:
    """What the device of this process has done; nothing without one."""
    if _device is None:
        return {}
    return {
        "device": _device.name,
        "virtual_s": _device.seconds,
        "virtual_compute_s": _device.compute_s,
        "virtual_reads_s": _device.reads_s,
        "virtual_steps": _device.steps,
        "computed_prompt_tokens": _device.prompt_tokens,
    }


def forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    assert _device is not None, "no device is set"
    _device.run(batch)
    return GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        next_token_ids=torch.full((len(batch.reqs),), TOKEN, dtype=torch.int64),
        can_run_cuda_graph=False,
    )


def configure(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Take another clock, chunk size, new token ratio and policy, and open new books."""
    given = recv_req.server_args
    if SET not in given:
        return original(scheduler, recv_req)
    options = handed_over()
    assert options is not None
    global _device
    _device = Device(options.cost, Clock(int(given[SET])))
    scheduler.is_mixed_chunk = _device.clock is not Clock.SEQUENTIAL
    scheduler.chunked_prefill_size = int(given[CHUNK])
    tracker, ratio = scheduler.new_token_ratio_tracker, float(given[RATIO])
    # As SGLang derives them from the first one.
    tracker.init, tracker.min = ratio, ratio * envs.SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR.get()
    tracker.decay = (tracker.init - tracker.min) / envs.SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.get()
    tracker.reset()
    policy = scheduler.policy
    policy.policy = policy._validate_and_adjust_policy(POLICIES[int(given[POLICY])], scheduler.tree_cache)
    scheduler.batchweave_admission = scheduler.batchweave_steps = None
    return SetInternalStateReqOutput(updated=True)


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = [
    ("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", forward, HookType.AROUND),
    (f"{_SCHEDULER}.set_internal_state", configure, HookType.AROUND),
]
