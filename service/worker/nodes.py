"""Runs one engine on several machines: the first one leads, leases and answers, and the others follow.

SGLang's own flags make the engine one. Here is what it leaves open: that followers lease nothing, that all know of each
other, and that none waits for one that is gone. The GPUs' collectives would wait for minutes.
"""

import multiprocessing
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import RedisError

from engine_ext.errors import EngineEnded
from service.errors import StartError
from service.queue import keys, roll
from service.settings import Settings

PORT = 20_000
LOOK_S = 3.0
ABSENT = 3  # looks at the roll, one after another, without a node that was there: then it is gone
REDIS_S = 3.0
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Nodes:
    """The machines of one engine. `rank`: which of the `count` this is; `leader`: host:port at which they meet."""

    count: int
    rank: int
    leader: str

    @classmethod
    def of(cls, settings: Settings) -> "Nodes | None":
        """Return what the settings say; None for an engine with one machine. Raises StartError."""
        if settings.nodes == 1:
            return None
        if settings.node_rank >= settings.nodes:
            raise StartError(
                f"BATCHWEAVE_NODE_RANK is {settings.node_rank}, but the {settings.nodes} nodes (BATCHWEAVE_NODES) are "
                f"numbered from 0 to {settings.nodes - 1}."
            )
        host = first_host(settings.leader or "")
        if not host:
            raise StartError(
                f"This engine has {settings.nodes} nodes (BATCHWEAVE_NODES), so BATCHWEAVE_LEADER must be the address "
                "of the first one."
            )
        return cls(settings.nodes, settings.node_rank, host if _has_port(host) else f"{host}:{PORT}")

    @property
    def engine_args(self) -> dict[str, Any]:
        found = {"nnodes": self.count, "node_rank": self.rank, "dist_init_addr": self.leader}
        return found if self.rank == 0 else {**found, "custom_sigquit_handler": on_engine_end}


def first_host(text: str) -> str:
    """Return the first of a list of hosts, as in `a b`, `a,b` or Slurm's `node[07-09,12],other`."""
    first = re.split(r"[\s,](?![^\[]*\])", text.strip())[0]
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first) if not first.startswith("[") else first


def _has_port(host: str) -> bool:
    return re.search(r"[^:]:\d+$|\]:\d+$", host) is not None


class Peers:
    """Keeps this node on its engine's roll from a thread, because SGLang blocks the main one.

    `on_lost` is called once, in that thread, with the rank of a node that was there and is gone: of any node for the
    leader, of the leader for the others.
    """

    def __init__(self, redis_url: str, model: str, nodes: Nodes, on_lost: Callable[[int], None]) -> None:
        self._redis = Redis.from_url(redis_url, socket_connect_timeout=REDIS_S, socket_timeout=REDIS_S)
        self._key = keys.nodes(f"{model}@{nodes.leader}")
        self._nodes, self.on_lost = nodes, on_lost
        self._call = self._redis.register_script(roll.CALL)
        self._absent: dict[int, int] = {}  # by rank of each node that was there: looks since then
        self._ended = threading.Event()
        self.hosts: list[str] = []  # of the other nodes that are there, by rank
        self._thread = threading.Thread(target=self._run, name="peers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def leave(self) -> None:
        """Leave the roll, so that the others need not wait for this node."""
        self._ended.set()
        with suppress(RedisError, OSError):
            self._redis.hdel(self._key, str(self._nodes.rank))

    def leader_is_there(self) -> bool:
        try:
            return bool(self._redis.hexists(self._key, "0"))
        except (RedisError, OSError):
            return True

    def look(self) -> int | None:
        """Write this node's line, and return the rank of one that is gone, if there is one that matters."""
        found: Any = self._call(keys=[self._key], args=roll.arguments(str(self._nodes.rank), socket.gethostname()))
        there = {int(rank): host.decode() for rank, host in roll.members(found).items()}
        self.hosts = [there[rank] for rank in sorted(there)]
        self._absent = {rank: 0 if rank in there else looks + 1 for rank, looks in self._absent.items()}
        self._absent |= {rank: 0 for rank in there}
        matter = self._absent if self._nodes.rank == 0 else {0}
        return next((rank for rank in matter if self._absent.get(rank, 0) >= ABSENT), None)

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            try:
                lost = self.look()
            except (RedisError, OSError) as error:  # nobody is known to be gone then
                log.warning("cannot see the engine's other nodes", error=repr(error))
                continue
            if lost is not None and not self._ended.is_set():
                log.error("a node of this engine is gone", rank=lost)
                self.on_lost(lost)
                return


def end_now(code: int) -> None:
    """End this process with its part of an engine that cannot go on."""
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(code)


_following: "Peers | None" = None  # this process's, if it follows


def on_engine_end(*_: Any) -> None:
    """End this process when a rank of SGLang's reports that it cannot go on; 1 if the leader has not left before.

    SGLang carries this function to processes of its own, so it is one that they can import.
    """
    code = 1 if _following is None or _following.leader_is_there() else 0
    if _following is not None:
        _following.leave()
    log.info("the engine has ended")
    end_now(code)


def follow(settings: Settings, nodes: Nodes, make_engine: Callable[[], Any]) -> None:
    """Run this node's part of the engine until the engine ends; `make_engine` blocks for so long."""
    global _following
    peers = _following = Peers(settings.redis, settings.served_model, nodes, on_lost=lambda _: end_now(1))

    def stop(*_: Any) -> None:
        peers.leave()
        end_now(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    peers.start()
    log.info("follows", leader=nodes.leader, rank=nodes.rank, nodes=nodes.count)
    try:
        with suppress(EngineEnded):
            make_engine()
    finally:
        peers.leave()
    log.info("the engine has ended")
