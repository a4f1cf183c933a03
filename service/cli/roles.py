"""`batchweave up`, and the commands that run one role each: api, planner, worker."""

import asyncio
import gc
import logging
import platform
import socket
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from prometheus_client import REGISTRY
from redis.asyncio import Redis
from sqlalchemy.exc import SQLAlchemyError

from batchweave.terminal import DataDirOption, fail, said
from service.cli.owners import strangers
from service.cli.start import (
    EngineOption,
    EnginesOption,
    GpusOption,
    HostOption,
    ModelOption,
    ModelsOption,
    NameOption,
    NamesOption,
    PortOption,
    ScriptOption,
    log_to,
    models_of,
    open_database,
    run_role,
    serve_metrics,
    settings_of,
    stop_on_signals,
)
from service.db.clock import SharedClock
from service.db.sessions import Database
from service.errors import CostsError, StartError
from service.estimates.gpus import machine_gpus
from service.estimates.model_costs import check_model, told_machine
from service.metrics.tracing import send_traces
from service.objects.storage import Storage
from service.settings import Settings
from service.up.loop_watch import watched_loop
from service.worker import notice
from service.worker.nodes import Nodes
from service.worker.script import read_script


def up(
    model: ModelsOption = None,
    model_name: NamesOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    port: PortOption = None,
    engine: EngineOption = None,
    script: ScriptOption = None,
    gpus: GpusOption = None,
    engines: EnginesOption = None,
) -> None:
    """Run the whole service in the foreground: Redis, API, planner, and an engine for each GPU.

    A model that is too large for one GPU gets several for each engine, as few as hold it. Several models take turns at
    the GPUs.

    Examples:

    - `batchweave up`
    - `batchweave up --engine scripted`
    - `batchweave up --model Qwen/Qwen2.5-7B-Instruct --gpus 0,1,2,3`
    - `batchweave up --engines 2 --gpus none`
    - `batchweave up --model Qwen/Qwen2.5-7B-Instruct --data-dir /srv/batchweave --port 9000`
    - `batchweave up --model Qwen/Qwen2.5-7B-Instruct --model BAAI/bge-m3:embedding`
    """
    from service.up.engines import engines_of
    from service.up.supervisor import Supervisor

    models = models_of(model, model_name, data_dir=data_dir, host=host, port=port, engine=engine, script=script)
    log_to(sys.stderr, logging.WARNING)
    if wrong := strangers():
        fail(wrong)
    try:
        for each in models:
            check_model(each)
        read_script(models[0].script)
        Supervisor(engines_of(models, gpus, engines), said.print).run()
    except (StartError, CostsError, OSError, SQLAlchemyError) as error:
        fail(f"{type(error).__name__}: {error}" if isinstance(error, SQLAlchemyError) else str(error))


def api(host: HostOption = None, port: PortOption = None) -> None:
    """Run only the HTTP API.

    Reads BATCHWEAVE_DATABASE_URL, BATCHWEAVE_REDIS_URL and BATCHWEAVE_STORAGE_URL. Example:

    - `BATCHWEAVE_DATABASE_URL=postgresql://… batchweave api --host 0.0.0.0`
    """
    import uvicorn

    from service.api.connections import raise_descriptors, served
    from service.app import create_app

    settings = settings_of(host=host, port=port)
    log_to(sys.stdout)
    open_database(settings)
    send_traces(settings.otlp_endpoint, "api")
    raise_descriptors()
    config = served(create_app(settings), settings)
    server = uvicorn.Server(config)
    # All that is loaded now stays. A full collection that looks through it stops all streams for a fifth of a second.
    gc.collect()
    gc.freeze()

    async def run() -> None:
        async with watched_loop():
            await server.serve()

    with suppress(KeyboardInterrupt), asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(run())
    if not server.started:
        sys.exit(1)


def planner(model: ModelOption = None, model_name: NameOption = None) -> None:
    """Run only the control-plane jobs: validator, planner, previewer, reconciler, finalizer, expiry, webhooks,
    historian, sweeper, lost sessions.
    """
    from service.jobs.runner import run_jobs

    settings = settings_of(model=model, model_name=model_name)
    log_to(sys.stdout)
    open_database(settings)
    send_traces(settings.otlp_endpoint, "planner")
    serve_metrics(settings)

    async def main(database: Database, storage: Storage, redis: Redis, stop: asyncio.Event) -> None:
        async with watched_loop():
            await run_jobs(database, storage, redis, settings, stop)

    asyncio.run(run_role(settings, main))


def worker(
    model: ModelOption = None,
    model_name: NameOption = None,
    engine: EngineOption = None,
    script: ScriptOption = None,
) -> None:
    """Run one worker, which leases slices and runs them on an engine: SGLang, for which the server needs its extra
    `engine`, or rules with `--engine scripted`.

    With BATCHWEAVE_ONLINE_HOST, its address, it also answers online requests. With BATCHWEAVE_NODES,
    BATCHWEAVE_NODE_RANK and BATCHWEAVE_LEADER, several machines run one engine: number 0 leads, the others follow. Give
    all of them the same model, BATCHWEAVE_GPU and BATCHWEAVE_ENGINE_ARGS. Examples:

    - `BATCHWEAVE_DATABASE_URL=postgresql://… BATCHWEAVE_ONLINE_HOST=10.0.0.7 batchweave worker --model …`
    - `BATCHWEAVE_NODES=2 BATCHWEAVE_NODE_RANK=1 BATCHWEAVE_LEADER=10.0.0.7 … batchweave worker --model …`
    """
    from service.worker.engine import make_engine
    from service.worker.following import follow

    settings = settings_of(model=model, model_name=model_name, engine=engine, script=script)
    log_to(sys.stdout)
    if settings.database_url is None:
        where = "works for this folder alone; BATCHWEAVE_DATABASE_URL names a database that machines share"
        structlog.get_logger().info(where, folder=str(settings.data_dir.resolve()))
    open_database(settings)
    send_traces(settings.otlp_endpoint, "worker")
    try:
        nodes = Nodes.of(settings)
        command = notice.words(settings.notice_command) if settings.notice_command is not None else []
    except StartError as error:
        fail(str(error))
    if nodes is not None and nodes.rank > 0:
        with _needs_engine():
            follow(settings, nodes, lambda on_fault: make_engine(settings, on_fault=on_fault))
    else:
        _lead(settings, nodes, command)


def _lead(settings: Settings, nodes: Nodes | None, command: list[str]) -> None:
    """Run a worker, which leads the followers of its engine if that has several machines.

    `command`: tells when this machine is about to be taken away, if it is not empty.
    """
    from service.db.models import STAND_IN, register_model
    from service.metrics.engine import EngineMetrics
    from service.metrics.gpu_health import GpuHealth
    from service.queue.progress import Starting
    from service.worker.engine import make_engine
    from service.worker.following import Peers, end_now
    from service.worker.loop import IN_FLIGHT, Worker

    metrics = EngineMetrics(settings.served_model)
    REGISTRY.register(metrics)
    about: dict[str, Any] = {"model": settings.served_model, "models": settings.served_models}
    about["host"] = socket.gethostname()
    starting = Starting(settings.redis, settings.worker_name, about)
    starting.begin()  # before a driver is asked, which may take long
    there, told = machine_gpus(), told_machine(settings)
    about["machine"] = there[0].product or "a GPU" if there else f"the CPU of {platform.node()}"
    about["is_timed"] = STAND_IN not in told
    health = GpuHealth([(each.name, each.product) for each in there] if settings.engine == "sglang" else [])
    REGISTRY.register(health)
    serve_metrics(settings)
    peers, lost = None, list[int]()
    if nodes is not None:
        # SGLang blocks the main thread until the engine has started.
        peers = Peers(settings.redis, settings.served_model, nodes, on_lost=lambda _: end_now(1))
        peers.start()
    try:
        with _needs_engine():
            engine = make_engine(settings, starting.say)
    except StartError as error:
        fail(str(error))

    async def main(database: Database, storage: Storage, redis: Redis, stop: asyncio.Event) -> None:
        await engine.start()
        if settings.engine == "sglang":
            starting.say("tries its largest step")
            await engine.try_largest_step()
        metrics.step_age_s = lambda: engine.step_age_s
        stop_on_signals(stop)  # again, because SGLang takes SIGTERM for itself
        clock = SharedClock(database)
        await clock.sync()
        await register_model(database, settings, engine.context_length, engine.endpoints, told, engine.parsers)
        if settings.emulated_device is not None or settings.engine == "scripted":
            structlog.get_logger().warning("no model runs: no answer is real", device=engine.device)
        structlog.get_logger().info("engine ready", model=settings.served_model, device=engine.device)
        in_flight = IN_FLIGHT * await engine.max_running_requests()
        parts = (database, storage, redis, engine, settings, clock)
        starting.end()
        if peers is not None:
            peers.on_lost = _stopping(asyncio.get_running_loop(), stop, lost)
        worker = Worker(*parts, in_flight, metrics, engine.machine, engine, peers, health, STAND_IN not in told)
        async with watched_loop(), notice.watched(command, stop):
            await worker.run(stop)

    try:
        asyncio.run(run_role(settings, main))
    except StartError as error:
        fail(str(error))
    finally:
        if peers is not None:
            peers.leave()
        engine.close()
    if lost:
        sys.exit(1)


@contextmanager
def _needs_engine() -> Generator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        fail(f"The engine is not installed ({error.name} is missing): pip install 'batchweave-server[engine]'")


def _stopping(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, lost: list[int]) -> Callable[[int], None]:
    """Return the leader's reaction to a lost node: the worker stops and gives its slices back; then it exits with 1."""

    def on_lost(rank: int) -> None:
        lost.append(rank)
        loop.call_soon_threadsafe(stop.set)

    return on_lost
