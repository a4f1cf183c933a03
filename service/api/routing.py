"""Chooses the worker for an online request: one that likely has the prompt's beginning cached, if it is not too busy.

Workers with a door say so in their heartbeats (`queue/progress.py`).
"""

import asyncio
import hashlib
import hmac
import math
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
from redis.exceptions import RedisError

from service.queue.progress import Heartbeat
from service.queue.trust import address_proof

LOOK_S = 1.0  # between two looks at the heartbeats
WITHOUT_REDIS_S = 30.0  # for which the last heartbeats count
AVOIDED_S = 5.0  # for which a worker that did not answer is tried after all others
MOST_OVER_MEAN = 1.25  # times the mean load, up to which a worker gets the requests that share its prefixes
FEW = 4  # requests that any worker may have at once, whatever the mean
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Target:
    """Names a worker that takes online requests, the URL of its door, and when it was started, in Unix seconds."""

    name: str
    url: str
    started_at: int = 0

    @property
    def start(self) -> str:
        """What names one start of the worker, whose name may be the same after the next one."""
        return f"{self.name} {self.started_at}"


class Routes:
    """Knows which workers take online requests for which model, and how many of them this process has sent to each."""

    def __init__(self, heartbeat: Heartbeat, token: str | None) -> None:
        self._heartbeat = heartbeat
        self._token = token
        self._looking = asyncio.Lock()
        self._by_model: dict[str, list[Target]] = {}
        self._looked_at = self._heard_at = -math.inf
        self._avoided_until: dict[Target, float] = {}
        self.load: Counter[str] = Counter()
        self.without_proof: set[str] = set()  # models of workers that all have another key, or are of an older version
        self._told: set[str] = set()

    async def targets(self, model: str, prefix: bytes) -> list[Target]:
        """Return the workers for a request, the best first. `prefix`: how its prompt begins."""
        async with self._looking:  # who comes during a look waits for what it finds
            if time.monotonic() - self._looked_at >= LOOK_S:
                await self._look()
                self._looked_at = time.monotonic()
        now = time.monotonic()
        found = self._by_model.get(model, [])
        return ordered(found, prefix, self.load, {each for each, until in self._avoided_until.items() if now < until})

    def avoid(self, target: Target) -> None:
        """Try this worker after all others for a while: it did not answer. If it is gone, its heartbeat soon is too."""
        now = time.monotonic()
        self._avoided_until = {each: until for each, until in self._avoided_until.items() if now < until}
        self._avoided_until[target] = now + AVOIDED_S
        self._looked_at = -math.inf

    @contextmanager
    def sending(self, target: Target) -> Generator[None, None, None]:
        """Count a request to this worker during the block."""
        self.load[target.name] += 1
        try:
            yield
        finally:
            self.load[target.name] -= 1
            if not self.load[target.name]:
                del self.load[target.name]  # names change at each start of a worker

    async def _look(self) -> None:
        now = time.monotonic()
        try:
            alive = await self._heartbeat.alive()
        except (RedisError, OSError) as error:
            log.warning("workers unknown", error=repr(error))
            if now - self._heard_at > WITHOUT_REDIS_S:
                self._by_model = {}
            return
        self._heard_at, self._by_model = now, {}
        proven, unproven = set[str](), dict[str, str]()  # models; workers and their models
        for state in alive:
            if not all(isinstance(state.get(name), str) and state[name] for name in ("name", "model", "online")):
                continue  # it takes no online requests
            if not self._is_proven(state):
                unproven[state["name"]] = state["model"]
                continue
            proven.add(state["model"])
            if not state.get("drained"):
                started_at = state.get("started_at")
                target = Target(state["name"], state["online"], started_at if isinstance(started_at, int) else 0)
                self._by_model.setdefault(state["model"], []).append(target)
        self.without_proof = set(unproven.values()) - proven
        for name in unproven.keys() - self._told:
            log.warning("a worker gives no proof of its address: start it with our BATCHWEAVE_SECRET_KEY", worker=name)
        self._told = set(unproven)

    def _is_proven(self, state: dict[str, Any]) -> bool:
        """Return whether a worker of this service named its address, and not another writer in Redis."""
        if self._token is None:
            return False
        proof = address_proof(self._token, state["name"], state["model"], state["online"])
        return hmac.compare_digest(proof.encode(), str(state.get("online_proof")).encode(errors="replace"))


def ordered(targets: list[Target], prefix: bytes, load: Counter[str], avoided: set[Target]) -> list[Target]:
    """Return the workers in the order in which to try them.

    Equal prefixes go to the same worker (rendezvous hashing, so that few move when a worker comes or goes) unless it
    has more than its share of the requests; then the next one in the prefix's order has it.
    """
    most = max(FEW, MOST_OVER_MEAN * sum(load[each.name] for each in targets) / max(1, len(targets)))

    def rank(target: Target) -> tuple[bool, bool, bytes]:
        digest = hashlib.blake2b(prefix + b"\0" + target.name.encode(), digest_size=8).digest()
        return target in avoided, load[target.name] >= most, digest

    return sorted(targets, key=rank)
