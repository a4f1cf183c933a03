"""Emulates a device: SGLang's scheduler, radix cache and KV accounting run as they are, without a forward pass.

Every step takes as long as the cost model says for the emulated machine, on a clock of its own or in real time, and
every output token is the same. This shows how a policy would perform there, or how the service bears load. In real time
a step still runs while the scheduler prepares the next one, as on a GPU. The device's name is in every report and in
every answer.
"""

import time
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel, compute_time, step_time
from engine_ext.plugin.options import Emulation, emulated_name, handed_over
from engine_ext.plugin.platform_entry import gpu_is_present
from engine_ext.plugin.scheduler.step_load import load_of

TOKEN = 5


class Device:
    """The clock of one scheduler process, and what it has computed."""

    def __init__(self, cost: CostModel, clock: Clock, lasts: bool) -> None:
        self.cost, self.clock, self.lasts = cost, clock, lasts
        self.model = EngineModel.of(cost, clock).numbers
        self.steps = 0
        self.prompt_tokens = 0
        self.seconds = 0.0
        self.compute_s = 0.0
        self.reads_s = 0.0
        self.free_at = 0.0  # in real time, when the steps launched so far will have ended

    def run(self, batch: Any) -> None:
        """Let one step pass: a prefill batch, with or without decodes that ride in it, or a decode batch."""
        load = load_of(batch)
        compute = float(compute_time(self.model, load.prompt_tokens + load.decoding, load.quadratic))
        seconds_of_reads = load.kv_tokens * float(self.model.read_s)
        self.seconds += float(step_time(self.model, compute, seconds_of_reads))
        self.compute_s += compute
        self.reads_s += seconds_of_reads
        self.steps += 1
        self.prompt_tokens += load.prompt_tokens

    def launch(self, now: float, seconds: float) -> float:
        """Return when a step of so many seconds ends, after those that were launched before it."""
        self.free_at = max(now, self.free_at) + seconds
        return self.free_at

    @property
    def name(self) -> str:
        return f"{emulated_name(self.cost.machine)}, {self.clock.name.lower()} clock"


_device: Device | None = None


def books() -> dict[str, Any]:
    """Return what this process's device has done; empty without a device."""
    device = device_here()
    if device is None:
        return {}
    return {
        "device": device.name,
        "virtual_s": device.seconds,
        "virtual_compute_s": device.compute_s,
        "virtual_reads_s": device.reads_s,
        "virtual_steps": device.steps,
        "computed_prompt_tokens": device.prompt_tokens,
    }


def clock() -> Callable[[], float] | None:
    """Return the clock of a device whose steps take no real time; None for real time."""
    device = device_here()
    return None if device is None or device.lasts else lambda: device.seconds


def forward(original: Callable[..., Any], worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the forward pass: launch the step on the device, and return the same token for every request."""
    device = device_here()
    assert device is not None
    before = device.seconds
    device.run(batch)
    found: Any = GenerationBatchResult(
        logits_output=LogitsProcessorOutput(next_token_logits=None),
        next_token_ids=torch.full((len(batch.reqs),), TOKEN, dtype=torch.int64),
        can_run_cuda_graph=False,
    )
    if device.lasts:
        found.batchweave_ends_at = device.launch(time.perf_counter(), device.seconds - before)
    return found


def wait_for(result: Any) -> None:
    """Wait until the device has run the step of this result, as SGLang does before it reads the result's tokens."""
    ends_at = getattr(result, "batchweave_ends_at", None)
    if ends_at is not None:
        time.sleep(max(0.0, ends_at - time.perf_counter()))
    elif getattr(result, "copy_done", None) is not None:
        result.copy_done.synchronize()
    elif gpu_is_present():  # without the overlap schedule
        torch.cuda.current_stream().synchronize()


def outlasts_launch() -> bool:
    """Return whether a step still runs when its launch has returned: on a GPU, or on a device in real time."""
    device = device_here()
    return gpu_is_present() if device is None else device.lasts


def set_device(cost: CostModel, clock: Clock, lasts: bool) -> Device:
    """Create this process's device, with its clock at zero; `lasts`: whether steps take real time."""
    global _device
    _device = Device(cost, clock, lasts)
    return _device


def device_here() -> Device | None:
    """Return this process's device; None where steps run as they are."""
    if _device is not None:
        return _device
    options = handed_over()
    if options is None or options.emulated is None:
        return None
    clock = Clock.MIXED if options.overlap.mixes else Clock.SEQUENTIAL
    return set_device(options.cost, clock, options.emulated is Emulation.REAL)


HOOKS = [("sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation", forward, HookType.AROUND)]
