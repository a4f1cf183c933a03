"""What a worker tells the scheduler process that SGLang spawns: how to schedule, and by which costs."""

import os
from dataclasses import dataclass
from enum import StrEnum

import msgspec

from engine_ext.plan.cost import CostModel

VARIABLE = "BATCHWEAVE_SCHEDULER"


class Scheduling(StrEnum):
    """Who says which waiting request prefills next, and how much of a step prompts may have."""

    DUAL_SCAN = "dual-scan"
    SGLANG = "sglang"  # its own policy, as if batchweave were not there


@dataclass(frozen=True, slots=True)
class Options:
    """`cost`: of the model on the machine that steps are planned for.

    `emulated`: a device takes the forward pass's place; its name stands in every report. `steps_file`: where the
    scheduler writes what each step did and took, up to 100,000 of them.
    """

    cost: CostModel
    scheduling: Scheduling = Scheduling.DUAL_SCAN
    emulated: bool = False
    steps_file: str | None = None

    def hand_over(self) -> None:
        """Leave them to the processes that this one starts from now on."""
        os.environ[VARIABLE] = msgspec.json.encode(self).decode()


def handed_over() -> Options | None:
    """What the parent left; nothing where SGLang was not started by batchweave."""
    said = os.environ.get(VARIABLE)
    return msgspec.json.decode(said, type=Options) if said else None
