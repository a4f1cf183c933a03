"""A real worker with an engine that stands in, as a process of its own: what a fleet of these tests starts.

A prompt says how long its answer takes: "number,seconds", and the variable TEST_SLOWNESS how many times as long here.
TEST_FAULT makes it end at its start, and a file `hold` in the service's folder lets no request begin.
"""

import asyncio
import os
import sys
from collections.abc import Callable
from pathlib import Path

from redis.asyncio import Redis

from benchmarks.paced import PacedEngine
from service.cli.start import log_to, run_role
from service.db.clock import SharedClock
from service.db.models import register_model
from service.db.sessions import Database
from service.objects.storage import Storage
from service.settings import load_settings
from service.worker.loop import Worker
from service.worker.script import Rule

AT_ONCE = 8


class HeldEngine(PacedEngine):
    """Lets no request begin while the file `hold` is there."""

    def __init__(self, seconds: Callable[[str], float], hold: Path) -> None:
        super().__init__(AT_ONCE, seconds)
        self._hold = hold

    async def pause(self, rule: Rule, seconds: float, aborted: asyncio.Event) -> bool:
        while self._hold.exists() and not aborted.is_set():
            await asyncio.sleep(0.1)
        return await super().pause(rule, seconds, aborted)


def main() -> None:
    if os.environ.get("TEST_FAULT"):
        sys.exit(3)
    settings = load_settings()
    log_to(sys.stderr)

    async def follow(_database: Database, _storage: Storage, _redis: Redis, stop: asyncio.Event) -> None:
        await stop.wait()

    async def work(database: Database, storage: Storage, redis: Redis, stop: asyncio.Event) -> None:
        clock = SharedClock(database)
        await clock.sync()
        await register_model(database, settings, 8192, ["/v1/chat/completions"], {"gpu": settings.gpu, "tp": 1})
        slowness = float(os.environ.get("TEST_SLOWNESS", "1"))
        hold = settings.data_dir / "hold"
        engine = HeldEngine(lambda prompt: slowness * float(prompt.split(",")[1]), hold)
        await Worker(database, storage, redis, engine, settings, clock, 2 * AT_ONCE).run(stop)

    asyncio.run(run_role(settings, work if settings.node_rank == 0 else follow))


if __name__ == "__main__":
    main()
