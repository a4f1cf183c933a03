"""Says what an engine of a fleet is, and what a cluster that runs engines must be able to do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from service.fleet.node import NodeState


class NotStarted(Exception):
    """An engine cannot start; the message says why."""


class Unreachable(OSError):
    """The cluster does not answer for now."""


@dataclass(frozen=True, slots=True)
class NewEngine:
    """An engine to start on these `machines`, by id, with `gpus` on each, for a worker whose name begins with `name`.

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
    """An engine as the cluster shows it. `nodes`: what its machines say; `lost`: one of them is gone."""

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
    def places(self) -> list[tuple[str, int]]:
        """The machines that it runs on, and how many GPUs it has on each."""
        return [(node.machine, node.gpus) for node in self.nodes]

    @property
    def digest(self) -> str:
        return next((node.digest for node in self.nodes), "")

    @property
    def failures(self) -> int:
        """How often in a row a worker of it has ended by itself soon after its start."""
        return max((node.failures for node in self.nodes), default=0)

    @property
    def ended(self) -> bool:
        """Whether all its workers have stopped as they were asked to."""
        return bool(self.nodes) and all(node.ended for node in self.nodes)


def engine_id(model: str, number: int) -> str:
    return f"{model}@{number}"


def model_of(engine: str) -> str:
    return engine.rpartition("@")[0]


class Cluster(Protocol):
    """Runs engines. Its methods block, and raise Unreachable."""

    def tidy(self) -> None:
        """Free the GPUs of engines of which a fleet that died had started no machine yet."""
        ...

    def machines(self) -> dict[str, int]:
        """Return the GPUs of each machine, by its id, that nobody else has taken: free ones, and those of engines."""
        ...

    def engines(self) -> list[Engine]:
        """Return all engines that a fleet has started here, also those of earlier fleets."""
        ...

    def start(self, new: NewEngine) -> None:
        """Start an engine. Raises NotStarted."""
        ...

    def stop(self, engine: str) -> None:
        """Ask an engine to stop; `engines` says when it has."""
        ...

    def end(self, engine: str) -> None:
        """End what is left of an engine, and free its GPUs."""
        ...
