"""Watches the machines of one engine, and runs the part of one that follows.

SGLang runs the engine across machines. This file adds what SGLang lacks: followers lease nothing, each node knows the
others, and a node ends when one that it needs is gone, where GPU collectives would wait for minutes.
"""

import multiprocessing
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import RedisError

from engine_ext.errors import EngineEnded
from service.queue import keys, roll
from service.settings import Settings
from service.worker.nodes import Nodes

LOOK_S = 3.0  # between two looks at the roll
# Looks in a row without a node that was there, after which it is gone; a killed one stays on it for roll.SILENT_S.
ABSENT = 3
SETTLES_S = roll.SILENT_S + LOOK_S
REDIS_S = 3.0  # for an answer of Redis
log = structlog.get_logger()


class Peers:
    """Keeps this node on its engine's roll and watches the others, in a thread, because SGLang blocks the main one.

    Calls `on_lost` once, in that thread, with the rank of a node that was there and is gone. The leader watches all
    nodes; a follower watches only the leader.
    """

    def __init__(self, redis_url: str, model: str, nodes: Nodes, on_lost: Callable[[int], None]) -> None:
        self._redis = Redis.from_url(redis_url, socket_connect_timeout=REDIS_S, socket_timeout=REDIS_S)
        self._key = keys.nodes(f"{model}@{nodes.leader}")
        self._nodes, self.on_lost = nodes, on_lost
        self._call = self._redis.register_script(roll.CALL)
        self._line = f"{secrets.token_hex(4)} {socket.gethostname()}"  # another one after a restart
        # Before that, a line may be one of the engine before this one.
        self._settled_at = time.monotonic() + SETTLES_S
        self._seen: dict[int, str] = {}  # by rank: the line of each node that was there
        self._absent: dict[int, int] = {}  # and looks since then
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
        """Write this node's line, and return the rank of one that is gone, if there is one that matters.

        A node that has started again is gone too: it is not a part of this engine.
        """
        found: Any = self._call(keys=[self._key], args=roll.arguments(str(self._nodes.rank), self._line))
        there = {int(rank): line.decode() for rank, line in roll.members(found).items()}
        self.hosts = [there[rank].partition(" ")[2] for rank in sorted(there)]
        if time.monotonic() < self._settled_at:
            self._seen |= there
        self._seen = there | self._seen
        self._absent = {rank: 0 if rank in there else self._absent.get(rank, 0) + 1 for rank in self._seen}
        matter = [rank for rank in self._seen if rank == 0 or self._nodes.rank == 0]
        return next((rank for rank in matter if self._absent[rank] >= ABSENT or self._is_another(rank, there)), None)

    def _is_another(self, rank: int, there: dict[int, str]) -> bool:
        return there.get(rank, self._seen[rank]) != self._seen[rank]

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
    """End this process because one of SGLang's ranks cannot go on: with 0 if the leader has left the roll, else with 1.

    SGLang pickles this function, so it must be importable; in a process of SGLang's own, `_following` is None.
    """
    code = 1 if _following is None or _following.leader_is_there() else 0
    if _following is not None:
        _following.leave()
    log.info("the engine has ended")
    end_now(code)


def follow(settings: Settings, nodes: Nodes, make_engine: Callable[[Callable[..., None]], Any]) -> None:
    """Run this node's part of the engine.

    `make_engine` gets what SGLang must call when a rank fails, and returns or raises EngineEnded when the engine ends.
    """
    global _following
    peers = _following = Peers(settings.redis, settings.served_model, nodes, on_lost=lambda _: end_now(1))

    def stop(*_: Any) -> None:
        peers.leave()
        end_now(0)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    peers.start()
    log.info("follows", leader=nodes.leader, rank=nodes.rank, nodes=nodes.count)
    with suppress(EngineEnded):
        make_engine(on_engine_end)
    on_engine_end()
