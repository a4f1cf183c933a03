"""Starts and ends engines on a Ray cluster. Nothing else in the service knows Ray.

An engine is a placement group with one bundle for each machine, and in each bundle an actor (`EngineNode`). Both are
detached: they outlive the fleet's process, and the next one finds them by name. Ray restarts nothing, because an engine
that has lost a machine is not what it was: the fleet ends what is left of it and starts another.
"""

import logging
import secrets
import threading
from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any

import ray
import structlog
from ray._private.state import available_resources_per_node
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util import (
    get_node_ip_address,
    get_placement_group,
    list_named_actors,
    placement_group_table,
    remove_placement_group,
)
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from service.errors import StartError
from service.fleet.engines import Engine, Machine, NewEngine, NotStarted, Unreachable, worker_name
from service.fleet.node import EngineNode, NodeState, service_digest

ANSWER_S = 10.0  # for an answer of all actors
PLACE_S = 10.0  # for a placement group on machines that have room
ACTOR_S = 120.0  # for its actors to start, on machines that are busy
log = structlog.get_logger()


class Actor(EngineNode):
    """Runs a machine of an engine, and knows from Ray where it is."""

    def __init__(self, rank: int, machines: int, gpus: int, digest: str) -> None:
        machine = ray.get_runtime_context().get_node_id()
        super().__init__(rank, machines, gpus, digest, get_node_ip_address(), machine)

    def where(self) -> str:
        return self._host


class RayCluster:
    """Holds the engines of one service on a Ray cluster (`engines.Cluster`), for any number of threads."""

    def __init__(self, address: str, namespace: str) -> None:
        """Connect to the cluster at `address`, or with `auto` to the one of RAY_ADDRESS or of this machine.

        `namespace`: of the service, so that two of them on one cluster leave each other alone. Raises StartError.
        """
        try:
            ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
            raise StartError(
                f"No Ray cluster can be reached ({_first_line(error)}). Start one with `ray start --head`, or say "
                "where it is with --address or RAY_ADDRESS. This machine must be a part of it."
            ) from error
        self._group = f"{namespace}:"  # groups have one space of names for all
        self._nodes: dict[str, dict[int, ActorHandle[Any]]] = {}  # by engine and rank
        self._said: dict[tuple[str, int], NodeState] = {}  # by engine and rank: what it said last
        self._lock = threading.Lock()

    def close(self) -> None:
        """Leave the cluster; its engines stay."""
        ray.shutdown()

    def tidy(self, starting: Collection[str]) -> None:
        with _reached():
            there = {*self._find(), *starting}
            for about in placement_group_table().values():
                name, is_there = str(about["name"]), about["state"] != "REMOVED"
                if is_there and name.startswith(self._group) and name.removeprefix(self._group) not in there:
                    _remove_group(name)

    def machines(self) -> dict[str, Machine]:
        with _reached():
            free = available_resources_per_node()
            return {
                node["NodeID"]: Machine(int(gpus), int(free.get(node["NodeID"], {}).get("GPU", 0)))
                for node in ray.nodes()
                if node["Alive"] and (gpus := node["Resources"].get("GPU", 0))
            }

    def engines(self) -> list[Engine]:
        with _reached():
            there = self._find()
            asked: dict[Any, tuple[str, int]] = {
                node.state.remote(): (engine, rank) for engine, nodes in there.items() for rank, node in nodes.items()
            }
            answered, silent = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S) if asked else ([], [])
            found = {engine: Engine(engine) for engine in there}
            for answer in (*answered, *silent):
                engine, rank = asked[answer]
                try:
                    said: Any = ray.get(answer, timeout=0)
                    self._said[engine, rank] = NodeState.of(said)
                except (GetTimeoutError, ActorUnavailableError, RayTaskError) as error:
                    log.warning("a machine of an engine does not answer", engine=engine, rank=rank, error=repr(error))
                except RayActorError:
                    found[engine].lost = True
                if (engine, rank) in self._said:
                    found[engine].nodes.append(self._said[engine, rank])
            for engine in found.values():
                # The actors of an engine that is being started appear one by one.
                is_whole = len(there[engine.id]) >= max((node.machines for node in engine.nodes), default=1)
                engine.lost |= not is_whole and not engine.is_half
            return list(found.values())

    def start(self, new: NewEngine) -> None:
        try:
            self._start(new)
        except (NotStarted, RayError, RuntimeError, ConnectionError, ValueError) as error:
            self.end(new.id)
            if isinstance(error, NotStarted):
                raise
            cause = getattr(error, "cause", None) or error
            raise NotStarted(f"{type(cause).__name__}: {_first_line(cause)}") from error

    def _start(self, new: NewEngine) -> None:
        group = placement_group(
            [{"GPU": new.gpus}] * len(new.machines),
            strategy="STRICT_PACK" if len(new.machines) == 1 else "STRICT_SPREAD",
            name=self._group + new.id,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": machine} for machine in new.machines],
        )
        if not group.wait(PLACE_S):
            raise NotStarted(f"the {new.gpus} GPUs on {' and '.join(new.machines)} are no longer free", blame=False)
        nodes = [_actor(group, new, rank) for rank in range(len(new.machines))]
        hosts: list[str] = ray.get([node.where.remote() for node in nodes], timeout=ACTOR_S)
        salt = secrets.token_hex(8)
        checks = ray.get([node.check.remote(salt, service_digest(salt)) for node in nodes], timeout=ANSWER_S)
        for host, wrong in zip(hosts, checks, strict=True):
            if wrong is not None:
                raise NotStarted(f"on {host}: {wrong}")
        leader = ray.get(nodes[0].leader.remote(), timeout=ANSWER_S)
        for rank in reversed(range(len(nodes))):  # the leader last: an engine whose leader has a name is whole
            variables = {
                **new.variables,
                "BATCHWEAVE_NODES": str(len(nodes)),
                "BATCHWEAVE_NODE_RANK": str(rank),
                "BATCHWEAVE_LEADER": leader,
                **({"BATCHWEAVE_ONLINE_HOST": hosts[rank]} if new.online and rank == 0 else {}),
            }
            name = worker_name(new.name, rank)
            ray.get(nodes[rank].run.remote(name, variables, list(new.command)), timeout=ANSWER_S)

    def stop(self, engine: str) -> None:
        with _reached():
            for node in self._find().get(engine, {}).values():
                node.stop.remote()

    def end(self, engine: str) -> None:
        with _reached():
            left = self._find().get(engine, {})
            _remove_group(self._group + engine)  # which ends its actors too
            for node in left.values():
                ray.kill(node)
        with self._lock:
            self._nodes.pop(engine, None)
            self._said = {key: said for key, said in self._said.items() if key[0] != engine}

    def _find(self) -> dict[str, dict[int, ActorHandle[Any]]]:
        """Return the actors that are there, by engine and rank. One that was there and died is kept until `end`."""
        with self._lock:
            for name in list_named_actors():
                engine, mark, rank = name.rpartition("#")
                if mark and rank.isdigit() and int(rank) not in self._nodes.get(engine, {}):
                    try:
                        self._nodes.setdefault(engine, {})[int(rank)] = ray.get_actor(name)
                    except ValueError:  # it has just ended
                        continue
            self._nodes = {engine: nodes for engine, nodes in self._nodes.items() if nodes}
            return {engine: dict(nodes) for engine, nodes in self._nodes.items()}


@contextmanager
def _reached() -> Generator[None]:
    """Raise Unreachable where Ray says in its many ways that its head does not answer."""
    try:
        yield
    except (RayError, RuntimeError, ConnectionError) as error:
        raise Unreachable(f"Ray: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _actor(group: PlacementGroup, new: NewEngine, rank: int) -> ActorHandle[Any]:
    bundle = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    actor: Any = ray.remote(Actor)
    return actor.options(
        name=f"{new.id}#{rank}",
        lifetime="detached",
        num_cpus=0,
        num_gpus=new.gpus,
        max_restarts=0,
        scheduling_strategy=bundle,
    ).remote(rank, len(new.machines), new.gpus, new.digest)


def _remove_group(name: str) -> None:
    try:
        remove_placement_group(get_placement_group(name))
    except ValueError:  # it is gone already
        return
