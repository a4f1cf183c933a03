"""Says which stages a comparison on a GPU has, in which order, and how long each may take."""

from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.engine.tuning import Tuning
from benchmarks.gpu.records import Asked
from engine_ext.plugin.options import Overlap


@dataclass(frozen=True, slots=True)
class Run:
    """How one policy runs.

    `overlap`: of the engine; an engine with mixed chunks also runs policies without them. `is_sorted`: requests are
    sent sorted depth first.
    """

    tuning: Tuning
    overlap: Overlap = Overlap.MIXED
    is_sorted: bool = False


RUNS = {
    "fcfs": Run(Tuning("fcfs", mixed=False)),  # SGLang's defaults
    "lpm": Run(Tuning("lpm", mixed=False)),
    "dfs-weight": Run(Tuning("dfs-weight", mixed=False)),
    "dfs-2048": Run(Tuning("fcfs", chunk=2048, mixed=False), is_sorted=True),
    "dfs-8192": Run(Tuning("fcfs", mixed=False), is_sorted=True),
    "dfs-2048-mixed": Run(Tuning("fcfs", chunk=2048), is_sorted=True),
    "dfs-8192-mixed": Run(Tuning("fcfs"), is_sorted=True),
    "batchweave-none": Run(Tuning(mixed=False)),
    "batchweave-mixed": Run(Tuning()),
    "batchweave-nano": Run(Tuning(), Overlap.NANO),
    "batchweave-pdmux": Run(Tuning(mixed=False), Overlap.PDMUX),
}


class Group(StrEnum):
    """What the stages of one process share."""

    PROBE = "probe"  # no engine
    MIXED = "mixed"  # one engine, whose scheduling changes from stage to stage
    NANO = "nano"
    PDMUX = "pdmux"


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the plan. `limit_s`: when it is given up; `least_s`: it does not begin with less time left.

    A stage with a `mix` runs that workload by a policy of RUNS, and has a row.
    """

    name: str
    group: Group
    limit_s: float
    least_s: float
    mix: str | None = None
    policy: str | None = None

    @property
    def is_start(self) -> bool:
        """Whether the engine of the group starts in it."""
        return self.name.endswith(ENGINE)


ENGINE, ANOTHER = "engine", "another "  # the latter where the process before has died
ALONE, OURS, PRIORITY = "online alone", "online batchweave", "online priority"
ROWS = (  # policies by mix
    ("documents", ("batchweave-mixed", "dfs-8192")),
    ("h200-1", ("fcfs", "batchweave-mixed", "dfs-8192-mixed", "batchweave-nano", "batchweave-pdmux")),
)
ROWS_OF_A_FILE = (("file", ("fcfs", "dfs-8192", "dfs-8192-mixed", "batchweave-mixed")),)
BUSY = 4.0  # times as long are limits where a CPU emulates the device, because it may be busy


def plan_of(asked: Asked) -> list[Stage]:
    """Return the stages that were asked for; what shows most for its time comes first."""
    seconds, found = asked.seconds, list[Stage]()
    if asked.file is None:
        found += [
            Stage("machine", Group.PROBE, 60, 5),
            Stage("kernels", Group.PROBE, 30, 5),
            Stage("overlap", Group.PROBE, 45, 10),
        ]
    found.append(Stage(ENGINE, Group.MIXED, 150, 40))
    if asked.file is None:
        found.append(Stage("smoke", Group.MIXED, 60, 15))
    found.append(Stage("calibrate", Group.MIXED, 120, 30))
    rows = [_row(mix, policy, seconds) for mix, policies in asked.rows for policy in policies]
    found += [row for row in rows if row.group is Group.MIXED]
    if asked.has_online:
        found += [Stage(name, Group.MIXED, 2.5 * seconds + 20, seconds + 5) for name in (ALONE, OURS, PRIORITY)]
    for group in (Group.NANO, Group.PDMUX):
        own = [row for row in rows if row.group is group]
        found += [Stage(f"{group} {ENGINE}", group, 180, 40), *own] if own else []
    if asked.slower:
        found = [replace(stage, limit_s=BUSY * stage.limit_s) for stage in found]
    if not asked.only:
        return found
    groups = {stage.group for stage in found if stage.name in asked.only}
    return [stage for stage in found if stage.name in asked.only or (stage.is_start and stage.group in groups)]


def _row(mix: str, policy: str, seconds: float) -> Stage:
    return Stage(f"{mix} {policy}", Group(RUNS[policy].overlap), 3 * seconds + 20, seconds / 2 + 5, mix, policy)
