"""Runs one machine of an engine: a `batchweave worker`, kept running by a supervisor. Ray makes an actor of it."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from service.errors import ServiceError
from service.settings import load_settings

STOP_S = 30.0  # clouds give so long too
WORKER = (sys.executable, "-m", "service.cli", "worker")
# Ray sets this to the actor's CPUs, which are none: an engine's threads would all share one core.
NOT_FROM_RAY = ("OMP_NUM_THREADS",)


def places(salt: str) -> str:
    """Return a digest of where this process finds SQL, Redis and objects; equal on machines of one service.

    With a new `salt` each time it tells nobody anything else. Raises SettingsError.
    """
    settings = load_settings()
    said = json.dumps([salt, settings.database, settings.redis, settings.storage])
    return hashlib.sha256(said.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class NodeState:
    """What a machine of an engine does. `machines`: how many the engine has, with `gpus` each; `machine`: its id.

    `name` and `pid`: of its worker; `failures`: exits in a row, and `exit`: the status of the last one.
    `ended`: the worker was asked to stop and has.
    """

    engine: str
    rank: int
    machines: int
    gpus: int
    digest: str
    name: str
    host: str
    machine: str
    pid: int | None
    failures: int
    exit: int | None
    ended: bool


class EngineNode:
    """One machine of an engine. `digest`: of the entry in fleet.yaml that the engine was started by."""

    def __init__(self, engine: str, rank: int, machines: int, gpus: int, digest: str, host: str, machine: str) -> None:
        self._started_as = (engine, rank, machines, gpus, digest)
        self.host, self.machine = host, machine
        self._name = ""
        self._pid: int | None = None
        self._failures = 0
        self._exit: int | None = None
        self._ended = False
        self._supervisor: subprocess.Popen[bytes] | None = None

    def check(self, salt: str, expected: str) -> str | None:
        """Return what is wrong with this machine, or None."""
        try:
            same = places(salt) == expected
        except ServiceError as error:
            return str(error)
        if same:
            return None
        return (
            "the variables BATCHWEAVE_DATABASE_URL, BATCHWEAVE_REDIS_URL and BATCHWEAVE_STORAGE_URL (or BATCHWEAVE_"
            "DATA_DIR) with which `ray start` ran there are not those of the fleet"
        )

    def leader(self) -> str:
        """Return an address on this machine at which the machines of its engine can meet."""
        with socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET) as probe:
            probe.bind((self.host, 0))
            port = probe.getsockname()[1]
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def run(self, name: str, variables: Mapping[str, str], command: Sequence[str]) -> None:
        """Start the worker of this name. `variables`: on top of those of `ray start`."""
        self._name = name
        environment = {key: value for key, value in os.environ.items() if key not in NOT_FROM_RAY}
        supervisor = [sys.executable, "-m", "service.fleet.supervise", str(STOP_S), *command]
        self._supervisor = subprocess.Popen(
            supervisor,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, **variables, "BATCHWEAVE_WORKER_NAME": name},
        )
        threading.Thread(target=self._listen, name="supervisor", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """Return a NodeState as a dictionary, which a fleet of another version can read too."""
        found = (self._name, self.host, self.machine, self._pid, self._failures, self._exit, self._ended)
        return asdict(NodeState(*self._started_as, *found))

    def stop(self) -> None:
        """Ask the worker to stop, which gives its slices back; `state` says when it has."""
        if self._supervisor is None or self._supervisor.stdin is None or self._ended:
            self._ended = True
            return
        try:
            self._supervisor.stdin.write(b"stop\n")
            self._supervisor.stdin.flush()
        except OSError:  # it has ended by itself
            self._ended = True

    def _listen(self) -> None:
        assert self._supervisor is not None
        assert self._supervisor.stdout is not None
        for line in self._supervisor.stdout:
            said = json.loads(line)
            self._pid = said.get("pid")
            if "exit" in said:
                self._exit, self._failures = said["exit"], said["failures"]
        self._ended = True
