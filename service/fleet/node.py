"""Runs one machine of an engine: a `batchweave worker`, kept running by a supervisor. Ray makes an actor of it."""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from service.errors import ServiceError
from service.settings import load_settings

STOP_S = 30.0  # clouds give so long too
WORKER = (sys.executable, "-m", "batchweave", "worker")
# Ray sets the first to the actor's CPUs, which are none: an engine's threads would all share one core. The ports may be
# set for other roles on the machine; of several workers only one could have them.
NOT_INHERITED = ("OMP_NUM_THREADS", "BATCHWEAVE_METRICS_PORT", "BATCHWEAVE_ONLINE_PORT")


def service_digest(salt: str) -> str:
    """Return a digest of where this process finds SQL, Redis and objects: equal on machines of one service.

    With a new `salt` each time it tells nobody anything else. Raises SettingsError.
    """
    settings = load_settings()
    # A path is another disk on another machine. Objects may lie on one that machines share.
    is_local = settings.database.startswith("sqlite") or settings.redis.startswith("unix")
    where = socket.gethostname() if is_local else ""
    said = json.dumps([salt, settings.database, settings.redis, settings.storage, where])
    return hashlib.sha256(said.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class NodeState:
    """Says what a machine of an engine does.

    `machines`: how many the engine has, with `gpus` each; `machine`: this one's id. `name` and `pid`: of its worker,
    if it was started and if it runs; `exits`: how often it has ended, and `exit`: the status of the last time. `ended`:
    nothing keeps it running any more.
    """

    rank: int = 0
    machines: int = 1
    gpus: int = 0
    digest: str = ""
    name: str = ""
    host: str = ""
    machine: str = ""
    pid: int | None = None
    exits: int = 0
    exit: int | None = None
    ended: bool = False

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "NodeState":
        """Read what a machine says, which may be of another version."""
        return cls(**{each.name: said[each.name] for each in fields(cls) if each.name in said})


class EngineNode:
    """Runs one machine of an engine. `digest`: of the entry in fleet.yaml that the engine was started by."""

    def __init__(self, rank: int, machines: int, gpus: int, digest: str, host: str, machine: str) -> None:
        self._about: dict[str, Any] = {"rank": rank, "machines": machines, "gpus": gpus, "digest": digest}
        self._about |= {"host": host, "machine": machine}
        self._host = host
        self._supervisor: subprocess.Popen[bytes] | None = None

    def check(self, salt: str, expected: str) -> str | None:
        """Return what is wrong with this machine, or None."""
        try:
            if service_digest(salt) == expected:
                return None
        except ServiceError as error:
            return str(error)
        return (
            "the variables BATCHWEAVE_DATABASE_URL, BATCHWEAVE_REDIS_URL and BATCHWEAVE_STORAGE_URL (or BATCHWEAVE_"
            "DATA_DIR) with which `ray start` ran there are not those of the fleet, or name a path of one machine"
        )

    def leader(self) -> str:
        """Return an address on this machine at which the machines of its engine can meet."""
        with socket.socket(socket.AF_INET6 if ":" in self._host else socket.AF_INET) as probe:
            probe.bind((self._host, 0))
            port = probe.getsockname()[1]
        return f"[{self._host}]:{port}" if ":" in self._host else f"{self._host}:{port}"

    def run(self, name: str, variables: Mapping[str, str], command: Sequence[str]) -> None:
        """Start the worker of this name. `variables`: on top of those of `ray start`."""
        inherited = {key: value for key, value in os.environ.items() if key not in NOT_INHERITED}
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "service.fleet.supervise", str(STOP_S), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**inherited, **variables, "BATCHWEAVE_WORKER_NAME": name},
        )
        self._about["name"] = name
        threading.Thread(target=self._listen, args=(self._supervisor,), name="supervisor", daemon=True).start()

    def state(self) -> dict[str, Any]:
        """Return a NodeState as a dictionary, which a fleet of another version can read too."""
        return asdict(NodeState.of(self._about))

    def stop(self) -> None:
        """Ask the worker to stop, which gives its slices back; `state` says when it has."""
        if self._supervisor is None or self._supervisor.stdin is None:
            self._about["ended"] = True
            return
        try:
            self._supervisor.stdin.write(b"stop\n")
            self._supervisor.stdin.flush()
        except OSError:  # nothing reads it any more
            self._about["ended"] = True

    def _listen(self, supervisor: subprocess.Popen[bytes]) -> None:
        assert supervisor.stdout is not None
        for line in supervisor.stdout:
            self._about |= {"pid": None, **json.loads(line)}
        self._about |= {"pid": None, "ended": True}
