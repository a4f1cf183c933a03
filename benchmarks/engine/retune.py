"""Sets another policy, chunk size and reserved share of memory between two runs of one engine, and opens new books.

Only an engine whose `Options.extra_hooks` name this module accepts it. SGLang's set_internal_state carries the values,
which must be numbers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from sglang.srt.environ import envs
from sglang.srt.managers.io_struct import SetInternalStateReqOutput
from sglang.srt.plugins.hook_registry import HookType

from benchmarks.engine.arrivals import Arrivals
from benchmarks.engine.tuning import FLOPS, MARK, POLICIES, PRIORITY, classes_of
from engine_ext.coserve.limit import Limits
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock
from engine_ext.costs.hardware import MEASURED
from engine_ext.plugin.options import mine
from engine_ext.plugin.scheduler import emulated


def retune(original: Callable[..., Any], scheduler: Any, recv_req: Any) -> Any:
    """Apply the run's tuning, if the request carries one."""
    given = {name.removeprefix(MARK): value for name, value in recv_req.server_args.items() if name.startswith(MARK)}
    if not given:
        return original(scheduler, recv_req)
    options = mine()
    device = emulated.device_here()
    if "bandwidth" in given:
        replace(options, cost=_measured(options.cost, given)).hand_over()
    scheduler.is_mixed_chunk = bool(given["mixed"])
    if device is not None:
        clock = Clock(int(given["clock"]))
        emulated.set_device(device.cost, clock, device.lasts)
        scheduler.is_mixed_chunk = clock is not Clock.SEQUENTIAL
    if scheduler.chunked_prefill_size is not None:  # else it computes whole prompts, and may be unable to do otherwise
        scheduler.chunked_prefill_size = int(given["chunk"])
    tracker, ratio = scheduler.new_token_ratio_tracker, float(given["ratio"])
    # SGLang derives them from the initial ratio in the same way.
    tracker.init, tracker.min = ratio, ratio * envs.SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR.get()
    tracker.decay = (tracker.init - tracker.min) / envs.SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS.get()
    tracker.reset()
    policy = scheduler.policy
    name = POLICIES[int(given["policy"])]
    _set_priorities(scheduler, name == PRIORITY)
    policy.policy = policy._validate_and_adjust_policy("fcfs" if name == PRIORITY else name, scheduler.tree_cache)
    classes = classes_of(float(given["ttft_s"]), float(given["tpot_s"]), float(given["stronger"]))
    limit_s, price_s = (float(given[name]) or None for name in ("limit_s", "price_s"))
    alone, cuts = bool(given["prompts_alone"]), bool(given["cuts_prompts"])
    limits = Limits(limit_s, price_s, alone, cuts, int(given["prompt_tokens"]) or None)
    scheduler.batchweave_online = classes, limits
    scheduler.batchweave_admission = scheduler.batchweave_steps = None
    scheduler.batchweave_alone = bool(given["alone"])
    scheduler.batchweave_arrivals = Arrivals(float(given["until_s"]))
    return SetInternalStateReqOutput(updated=True)


def _measured(cost: CostModel, given: Mapping[str, float]) -> CostModel:
    """Return the model with the costs of `Tuning.measured`."""
    flops = {name.removeprefix(FLOPS): value for name, value in given.items() if name.startswith(FLOPS)}
    rates = {name: given[name] or None for name in MEASURED}
    hardware = replace(cost.machine.hardware, flops=flops, bandwidth=given["bandwidth"], link_bandwidth=None, **rates)
    return replace(cost, machine=replace(cost.machine, hardware=hardware))


def _set_priorities(scheduler: Any, wanted: bool) -> None:
    """Do what --enable-priority-scheduling and --retraction-policy priority do, or undo it."""
    scheduler.enable_priority_scheduling = scheduler.policy.enable_priority_scheduling = wanted
    scheduler.enable_priority_preemption = wanted
    scheduler.server_args.override("batchweave", retraction_policy="priority" if wanted else "length")


HOOKS = [("sglang.srt.managers.scheduler.Scheduler.set_internal_state", retune, HookType.AROUND)]
