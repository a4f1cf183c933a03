"""`batchweave fleet`: keeps engines of several models on a Ray cluster."""

import asyncio
import os
import secrets
import socket
import sys
from pathlib import Path
from typing import Annotated

import structlog
import typer
from redis.asyncio import Redis

from batchweave.terminal import fail
from service.cli.start import log_to, open_database, run_role, serve_metrics, settings_of, stop_on_signals
from service.db.clock import SharedClock
from service.db.models import register_model
from service.db.sessions import Database
from service.errors import CostsError, ServiceError, StartError
from service.estimates.model_costs import told_machine
from service.fleet.keeper import Keeper
from service.fleet.lease import namespace_of
from service.fleet.spec import FleetSpec, read_fleet
from service.objects.storage import Storage
from service.settings import load_settings

log = structlog.get_logger()

FileOption = Annotated[Path, typer.Option("--models", help="The fleet's models and limits, as in docs/fleet.md.")]
AddressOption = Annotated[str, typer.Option("--address", help="Ray's head; auto: RAY_ADDRESS, or this machine's.")]
DownOption = Annotated[bool, typer.Option("--down", help="Drain and end all engines of the fleet, and exit.")]


def fleet(models: FileOption, address: AddressOption = "auto", down: DownOption = False) -> None:
    """Keep engines of several models on a Ray cluster, as many as there is work for.

    Needs `pip install 'batchweave-server[engine,fleet]'` on every machine, and there the same BATCHWEAVE_DATABASE_URL,
    BATCHWEAVE_REDIS_URL and BATCHWEAVE_STORAGE_URL for `ray start`. When this command ends, the engines stay and work
    on; `--down` ends them. Examples:

    - `batchweave fleet --models fleet.yaml`
    - `batchweave fleet --models fleet.yaml --address 10.0.0.7:6379`
    - `batchweave fleet --models fleet.yaml --down`
    """
    settings = settings_of()
    log_to(sys.stdout)
    try:
        spec = read_fleet(models)
        from service.fleet.cluster import RayCluster
    except StartError as error:
        fail(str(error))
    except ModuleNotFoundError as error:
        fail(f"Ray is not installed ({error.name} is missing): pip install 'batchweave-server[fleet]'")
    open_database(settings)
    serve_metrics(settings)

    async def main(database: Database, _storage: Storage, redis: Redis, stop: asyncio.Event) -> None:
        clock = SharedClock(database)
        await clock.sync()
        cluster = RayCluster(address, await namespace_of(database))
        stop_on_signals(stop)  # again, because Ray takes SIGTERM for itself
        owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        keeper = Keeper(database, redis, cluster, spec, clock, owner)
        if down:
            await keeper.end_all(stop)
        else:
            await _register(database, spec)
            await keeper.run(stop)
        if keeper.holds_lease:
            left = [member.engine.id for member in keeper.members]
            log.info("the engines work on; --down ends them" if left else "no engine is left", engines=left)

    try:
        asyncio.run(run_role(settings, main))
    except ServiceError as error:
        fail(str(error))
    sys.stdout.flush()
    os._exit(0)  # a call of Ray whose head is gone never returns, and its thread would be waited for


async def _register(database: Database, spec: FleetSpec) -> None:
    """Write the models' rows, so that batches for them are accepted before their first engine has started."""
    for each in spec.models:
        gpu = each.settings.get("BATCHWEAVE_GPU")
        own = load_settings(
            model=each.model or each.name,
            model_name=each.name,
            adapters=each.adapters,
            engine_args=each.all_args,
            gpu=gpu,
        )
        try:
            machine = told_machine(own)
        except CostsError as error:  # the calibration's file is on the machines only
            log.warning("plans do not know the machines until one has started", model=each.name, error=str(error))
            machine = None
        await register_model(database, own, None, machine=machine)
