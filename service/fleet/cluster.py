"""Starts and ends engines on a Ray cluster. Nothing else in the service knows Ray.

An engine is a placement group with one bundle for each machine, and in each bundle an actor (`EngineNode`). Both are
detached: they outlive the fleet's process, and the next one finds them by name. Ray restarts nothing, because an engine
that has lost a machine is not what it was: the fleet ends what is left of it and starts another.
"""

import logging
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import ray
import structlog
from ray._private.state import available_resources_per_node
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError
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
from service.fleet.engines import Engine, NewEngine, NotStarted, Unreachable
from service.fleet.node import EngineNode, NodeState, places

NAMESPACE = "batchweave"
GROUP = "batchweave:"  # before an engine's id: the name of its placement group, of which there is one space for all
ANSWER_S = 10.0  # for an answer of an actor
PLACE_S = 10.0  # for a placement group on machines that have room
ACTOR_S = 120.0  # for its actors to start, on machines that are busy
log = structlog.get_logger()


@contextmanager
def _reached() -> Generator[None]:
    """Raise Unreachable where Ray says in its many ways that its head does not answer."""
    try:
        yield
    except (RayError, RuntimeError, ConnectionError) as error:
        raise Unreachable(f"Ray: {(str(error).splitlines() or [type(error).__name__])[0]}") from error


class Actor(EngineNode):
    """A machine of an engine, which knows from Ray where it is."""

    def __init__(self, engine: str, rank: int, machines: int, gpus: int, digest: str) -> None:
        machine = ray.get_runtime_context().get_node_id()
        super().__init__(engine, rank, machines, gpus, digest, get_node_ip_address(), machine)

    def where(self) -> str:
        return self.host


class RayCluster:
    """The engines of a fleet on a Ray cluster (`engines.Cluster`), for any number of threads."""

    def __init__(self, address: str) -> None:
        """Connect to the cluster at `address`, or with `auto` to the one of RAY_ADDRESS or of this machine.

        Raises StartError.
        """
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            raise StartError(
                f"No Ray cluster can be reached ({why}). Start one with `ray start --head`, or say where it is with "
                "--address or RAY_ADDRESS."
            ) from error
        self._nodes: dict[str, dict[int, ActorHandle[Any]]] = {}  # by engine and rank
        self._lock = threading.Lock()

    def close(self) -> None:
        """Leave the cluster; its engines stay."""
        ray.shutdown()

    @_reached()
    def tidy(self) -> None:
        there = self._find()
        for about in _groups():
            if str(about["name"]).removeprefix(GROUP) not in there:
                _remove_group(str(about["name"]))

    @_reached()
    def machines(self) -> dict[str, int]:
        gpus = Counter[str]()
        for about in _groups():
            if about["state"] == "CREATED":
                for number, machine in about["bundles_to_node_id"].items():
                    gpus[machine] += int(about["bundles"][number].get("GPU", 0))
        there = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for machine, free in available_resources_per_node().items():
            gpus[machine] += int(free.get("GPU", 0))
        return {machine: each for machine, each in gpus.items() if each and machine in there}

    @_reached()
    def engines(self) -> list[Engine]:
        there = self._find()
        answers = [
            (engine, rank, node.state.remote()) for engine, nodes in there.items() for rank, node in nodes.items()
        ]
        found = {engine: Engine(engine) for engine in there}
        until = time.monotonic() + ANSWER_S
        for engine, rank, answer in answers:
            try:
                said: Any = ray.get(answer, timeout=max(0.01, until - time.monotonic()))
                found[engine].nodes.append(NodeState(**said))
                found[engine].lost |= said["machines"] > len(there[engine])
            except GetTimeoutError:
                log.warning("a machine of an engine does not answer", engine=engine, rank=rank)
            except RayActorError:
                found[engine].lost = True
        return list(found.values())

    def start(self, new: NewEngine) -> None:
        try:
            self._start(new)
        except NotStarted:
            self.end(new.id)
            raise
        except (RayError, GetTimeoutError, ValueError) as error:
            self.end(new.id)
            raise NotStarted(f"{type(error).__name__}: {str(error).splitlines()[0]}") from error

    def _start(self, new: NewEngine) -> None:
        group = placement_group(
            [{"GPU": new.gpus}] * len(new.machines),
            strategy="STRICT_PACK" if len(new.machines) == 1 else "STRICT_SPREAD",
            name=GROUP + new.id,
            lifetime="detached",
            bundle_label_selector=[{"ray.io/node-id": machine} for machine in new.machines],
        )
        if not group.wait(PLACE_S):
            raise NotStarted(f"{new.gpus} GPUs that were free on {' and '.join(new.machines)} are free no more")
        nodes = [_actor(group, new, rank) for rank in range(len(new.machines))]
        hosts: list[str] = ray.get([node.where.remote() for node in nodes], timeout=ACTOR_S)
        salt = secrets.token_hex(8)
        checks = ray.get([node.check.remote(salt, places(salt)) for node in nodes], timeout=ANSWER_S)
        for host, wrong in zip(hosts, checks, strict=True):
            if wrong is not None:
                raise NotStarted(f"on {host}: {wrong}")
        leader = ray.get(nodes[0].leader.remote(), timeout=ANSWER_S)
        for rank, (node, host, machine) in enumerate(zip(nodes, hosts, new.machines, strict=True)):
            variables = {
                **new.variables,
                "BATCHWEAVE_NODES": str(len(new.machines)),
                "BATCHWEAVE_NODE_RANK": str(rank),
                "BATCHWEAVE_LEADER": leader,
                **({"BATCHWEAVE_ONLINE_HOST": host} if new.online and rank == 0 else {}),
            }
            # A worker that starts again under its name takes back what it held. Elsewhere it must not.
            name = f"{new.name}-{machine[:8]}"
            ray.get(node.run.remote(name, variables, list(new.command)), timeout=ANSWER_S)

    @_reached()
    def stop(self, engine: str) -> None:
        for node in self._find().get(engine, {}).values():
            node.stop.remote()

    @_reached()
    def end(self, engine: str) -> None:
        self._find()
        with self._lock:
            left = self._nodes.pop(engine, {})
        for node in left.values():
            ray.kill(node)
        _remove_group(GROUP + engine)

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
            return {engine: dict(nodes) for engine, nodes in self._nodes.items()}


def _actor(group: PlacementGroup, new: NewEngine, rank: int) -> ActorHandle[Any]:
    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
    actor: Any = ray.remote(Actor)
    return actor.options(
        name=f"{new.id}#{rank}",
        lifetime="detached",
        num_cpus=0,
        num_gpus=new.gpus,
        max_restarts=0,
        scheduling_strategy=place,
    ).remote(new.id, rank, len(new.machines), new.gpus, new.digest)


def _groups() -> list[dict[str, Any]]:
    """Return what Ray says of the placement groups of all engines."""
    every = placement_group_table().values()
    return [about for about in every if str(about["name"]).startswith(GROUP) and about["state"] != "REMOVED"]


def _remove_group(name: str) -> None:
    try:
        remove_placement_group(get_placement_group(name))
    except ValueError:  # it is gone already
        return
