"""Tells the scheduler process that SGLang spawns how to schedule, and by which costs."""

import os
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

import msgspec

from engine_ext.coserve.limit import NO_LIMITS, Limits
from engine_ext.coserve.slo import CLASSES, SloClasses
from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine

VARIABLE = "BATCHWEAVE_SCHEDULER"


class Scheduling(StrEnum):
    """What decides which waiting request prefills next, and how much of a step prompts may have."""

    DUAL_SCAN = "dual-scan"
    SGLANG = "sglang"  # its own policy, as if batchweave were not there


class Overlap(StrEnum):
    """How prefill and decodes share the GPU."""

    NONE = "none"  # in turns
    MIXED = "mixed"  # SGLang's mixed chunks: decodes ride in the GEMMs of a prefill
    NANO = "nano"  # mixed chunks in two halves: the GEMM of one beside the attention of the other
    PDMUX = "pdmux"  # SGLang's PD-multiplexing: each on its own SMs at once

    @property
    def mixes(self) -> bool:
        """Whether SGLang puts prompts and decodes into one step."""
        return self in (Overlap.MIXED, Overlap.NANO)


class Emulation(StrEnum):
    """How fast the device that replaces the forward pass runs."""

    VIRTUAL = "virtual"  # at once, on a clock of its own
    REAL = "real"  # each step lasts as long as it says, for tests of the service around it


@dataclass(frozen=True, slots=True)
class Options:
    """Everything that the scheduler process is told.

    `cost`: the cost model of the model on the machine that steps are planned for. `online`: how late the tokens of
    online requests may be, by class; `sheds`: whether those that would be later are refused. `limits`: how long steps
    may be beside them, where that was profiled. `emulated`: a device replaces the forward pass; its name is in every
    report and answer. `steps_file`: where the scheduler writes what each step did and took, up to 100,000 steps.
    `extra_hooks`: modules whose HOOKS are registered too, such as those of benchmarks, which set how an engine
    schedules between two runs.
    `sm_margin`: the SMs that the attention of nano-batches leaves to the GEMM beside it, where FA3 computes it.
    `pulses`: memory into which the scheduler writes that it is alive (`plugin/pulse.py`). `shares_cache`: whether
    projects find each other's prefixes in the KV cache. `least_share`: the part of the engine's time that batches get
    in any case, whatever online requests need. `cpu_threads`: those of the forward pass on a CPU; None is one, and an
    answer has the same bits in any batch (`plugin/cpu/attention.py`). `cpu_step_s`: how long a step of prompts on a CPU
    may take, by which chunks are sized (`plugin/cpu/chunks.py`); None is any time.
    """

    cost: CostModel
    scheduling: Scheduling = Scheduling.DUAL_SCAN
    overlap: Overlap = Overlap.NONE
    emulated: Emulation | None = None
    extra_hooks: tuple[str, ...] = ()
    steps_file: str | None = None
    pulses: str | None = None
    sm_margin: int = 0
    shares_cache: bool = False
    online: SloClasses = CLASSES
    sheds: bool = False
    limits: Limits = NO_LIMITS
    least_share: float = 0.0
    cpu_threads: int | None = None
    cpu_step_s: float | None = None

    def hand_over(self) -> None:
        """Pass the options to all processes that this one starts from now on."""
        os.environ[VARIABLE] = msgspec.json.encode(self).decode()


def handed_over() -> Options | None:
    """Return the options that the parent passed, or None if batchweave did not start SGLang."""
    said = os.environ.get(VARIABLE)
    return _read(said) if said else None


def mine() -> Options:
    """Return the options that the parent passed; hooks run in no other process."""
    found = handed_over()
    assert found is not None
    return found


@lru_cache(maxsize=1)  # every step asks several times
def _read(said: str) -> Options:
    return msgspec.json.decode(said, type=Options)


def emulated_name(machine: Machine) -> str:
    """Return the machine's name in reports and answers of an emulated device."""
    return f"emulated {machine.accelerators} x {machine.hardware.name}"
