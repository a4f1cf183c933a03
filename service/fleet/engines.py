"""Says what an engine of a fleet is, and what a cluster that runs engines must be able to do."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from service.fleet.node import NodeState


class NotStarted(Exception):
    """An engine cannot start; the message says why. `blame`: whether its machines should rest before another try."""

    def __init__(self, message: str, blame: bool = True) -> None:
        super().__init__(message)
        self.blame = blame


class Unreachable(OSError):
    """The cluster does not answer for now."""


class Machine(NamedTuple):
    """Counts the GPUs of a machine, and those of them that nobody has taken."""

    gpus: int
    free: int


@dataclass(frozen=True, slots=True)
class NewEngine:
    """Describes an engine to start on these `machines`, by id, with `gpus` on each, for a worker named `name`.

    `digest`: of the entry in fleet.yaml; `variables`: of its workers; `command`: that runs one; `online`: whether the
    worker takes online requests on its machine's address.
    """

    id: str
    digest: str
    gpus: int
    machines: Sequence[str]
    name: str
    variables: Mapping[str, str]
    command: Sequence[str]
    online: bool = False


@dataclass(slots=True)
class Engine:
    """Shows an engine. `nodes`: what its machines said last; `lost`: one of them is gone."""

    id: str
    nodes: list[NodeState] = field(default_factory=list[NodeState])
    lost: bool = False

    @property
    def model(self) -> str:
        return model_of(self.id)

    @property
    def worker(self) -> str:
        """The name of the worker that leads; empty until it runs."""
        return next((node.name for node in self.nodes if node.rank == 0), "")

    @property
    def gpus_on(self) -> list[tuple[str, int]]:
        """The machines that it runs on, and how many GPUs it has on each."""
        return [(node.machine, node.gpus) for node in self.nodes]

    @property
    def digest(self) -> str:
        return next((node.digest for node in self.nodes), "")

    @property
    def exits(self) -> int:
        """How often a worker of it has ended."""
        return max((node.exits for node in self.nodes), default=0)

    @property
    def is_half(self) -> bool:
        """Whether a machine of it has no worker: the fleet that was starting it may have died."""
        return any(not node.name for node in self.nodes)

    @property
    def ended(self) -> bool:
        """Whether nothing keeps the workers of it running."""
        return bool(self.nodes) and all(node.ended for node in self.nodes)


def engine_id(model: str, token: str) -> str:
    """Return an id; with a new `token` for each engine, none is ever taken for another one."""
    return f"{model}@{token}"


def worker_name(leader: str, rank: int) -> str:
    """Return the name of the worker on the machine of this rank; rank 0 leads."""
    return leader if rank == 0 else f"{leader}-{rank}"


def model_of(engine: str) -> str:
    return engine.rpartition("@")[0]


class Cluster(Protocol):
    """Runs engines. Its methods block, and raise Unreachable."""

    def tidy(self, starting: Collection[str]) -> None:
        """Free the GPUs of engines of which no machine is left or was started, except these that are starting."""
        ...

    def machines(self) -> dict[str, Machine]:
        """Return the machines that are there, by id."""
        ...

    def engines(self) -> list[Engine]:
        """Return all engines that a fleet of this service has started here, also those of earlier fleets."""
        ...

    def start(self, new: NewEngine) -> None:
        """Start an engine. Raises NotStarted."""
        ...

    def stop(self, engine: str) -> None:
        """Ask an engine to stop, once or again; `engines` says when it has."""
        ...

    def end(self, engine: str) -> None:
        """End what is left of an engine, and free its GPUs."""
        ...
