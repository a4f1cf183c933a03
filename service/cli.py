"""The command line: `batchweave up` for everything, or each role on its own."""

import asyncio
import logging
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import structlog
import typer
from redis.asyncio import Redis
from rich.console import Console
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from service.db.migrate import upgrade
from service.db.sessions import Database
from service.model_costs import FALLBACK, CostsError, measured_overlap, planning_costs
from service.queue.connection import open_redis
from service.settings import Settings, SettingsError, load_settings
from service.storage import Storage
from service.tenants.commands import keys, projects, show_audit
from service.workloads.commands import plan, simulate

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Offline batch inference on SGLang behind an OpenAI-style Batch API.",
)
console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)

ModelOption = Annotated[str | None, typer.Option("--model", help="'demo', a local path, or a hub id.")]
NameOption = Annotated[str | None, typer.Option("--model-name", help="Name that requests use for the model.")]
DataDirOption = Annotated[Path | None, typer.Option("--data-dir", help="Folder for everything that is kept.")]
HostOption = Annotated[str | None, typer.Option("--host", help="Address that the API listens on.")]
PortOption = Annotated[int | None, typer.Option("--port", help="Port of the API.")]


@app.command()
def up(
    model: ModelOption = None,
    model_name: NameOption = None,
    data_dir: DataDirOption = None,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Run the whole service in the foreground: Redis, API, planner, worker.

    Examples:

    - `batchweave up`
    - `batchweave up --model Qwen/Qwen2.5-7B-Instruct --data-dir /srv/batchweave --port 9000`
    """
    from service.supervisor import StartError, Supervisor

    settings = _settings(model=model, model_name=model_name, data_dir=data_dir, host=host, port=port)
    _log_to(sys.stderr, logging.WARNING)
    try:
        Supervisor(settings, say=console.print).run()
    except (StartError, OSError, SQLAlchemyError) as error:
        _fail(f"{type(error).__name__}: {error}" if isinstance(error, SQLAlchemyError) else str(error))


@app.command()
def api(host: HostOption = None, port: PortOption = None) -> None:
    """Run the HTTP API alone.

    Reads BATCHWEAVE_DATABASE_URL, BATCHWEAVE_REDIS_URL and BATCHWEAVE_STORAGE_URL. Example:

    - `BATCHWEAVE_DATABASE_URL=postgresql://… batchweave api --host 0.0.0.0`
    """
    import uvicorn

    from service.app import create_app

    settings = _settings(host=host, port=port)
    _log_to(sys.stdout)
    _open_database(settings)
    uvicorn.run(
        create_app(settings),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        http="h11",  # it bounds a request's headers; httptools does not
        timeout_graceful_shutdown=5,
    )


@app.command()
def planner(model: ModelOption = None, model_name: NameOption = None) -> None:
    """Run the jobs of the control plane alone: validator, planner, reconciler, finalizer, expiry."""
    from service.jobs.runner import run_jobs

    settings = _settings(model=model, model_name=model_name)
    _log_to(sys.stdout)
    _open_database(settings)

    async def main(database: Database, storage: Storage, redis: Redis, stop: asyncio.Event) -> None:
        await run_jobs(database, storage, redis, settings, stop)

    asyncio.run(_role(settings, main))


@app.command()
def worker(model: ModelOption = None, model_name: NameOption = None) -> None:
    """Run one engine and the slices that it leases; needs `pip install batchweave[engine]`."""
    from service.engine_metrics import EngineMetrics
    from service.jobs.runner import Abilities, register_model
    from service.worker import Worker, make_engine

    settings = _settings(model=model, model_name=model_name)
    _log_to(sys.stdout)
    _open_database(settings)
    metrics = EngineMetrics(settings.served_model)
    try:
        if settings.metrics_port is not None:
            metrics.serve(settings.metrics_host, settings.metrics_port)
    except OSError as error:
        _fail(f"BATCHWEAVE_METRICS_PORT {settings.metrics_port}: {error}")
    try:
        engine = make_engine(settings)
    except ModuleNotFoundError as error:
        _fail(f"The engine is not installed ({error.name} is missing): pip install 'batchweave[engine]'")

    async def main(database: Database, storage: Storage, redis: Redis, stop: asyncio.Event) -> None:
        await engine.start()
        _stop_on_signals(stop)  # again, because SGLang takes SIGTERM for itself
        await register_model(database, settings, Abilities(engine.context_length, engine.endpoints))
        if settings.emulated_device is not None:
            structlog.get_logger().warning("the device is emulated: no answer is real", device=engine.device)
        structlog.get_logger().info("engine ready", model=settings.served_model, device=engine.device)
        in_flight = 4 * await engine.max_running_requests()
        await Worker(database, storage, redis, engine, settings, time.time, in_flight, metrics).run(stop)

    try:
        asyncio.run(_role(settings, main))
    finally:
        engine.close()


@app.command()
def calibrate(
    model: ModelOption = None,
    output: Annotated[Path, typer.Option("--output", help="File to write.")] = Path("calibration.json"),
    steps: Annotated[
        Path | None, typer.Option("--steps", help="Steps measured before, by BATCHWEAVE_STEPS_FILE: fit to these.")
    ] = None,
) -> None:
    """Measure what steps cost on this machine with this model, and write it as hardware for BATCHWEAVE_GPU and --gpu.

    Starts the engine alone, with BATCHWEAVE_ENGINE_ARGS as a worker would, and runs synthetic prompts for some minutes;
    the steps are kept beside the output, for `batchweave simulate --profile`. Then runs the same requests with each way
    to overlap prefill and decodes that works here; workers that plan with the file use the fastest. Examples:

    - `batchweave calibrate --model Qwen/Qwen2.5-7B-Instruct --output h100.json`
    - `BATCHWEAVE_GPU=h100.json batchweave up --model Qwen/Qwen2.5-7B-Instruct`
    - `batchweave calibrate --model Qwen/Qwen2.5-7B-Instruct --steps worker-steps.jsonl`
    """
    from service.calibration import CalibrationError, calibrated, compare, measure
    from service.model_costs import read_shape
    from service.worker import make_engine, possible_overlaps
    from service.workloads.workload import WorkloadError

    settings = _settings(model=model)
    _log_to(sys.stderr, logging.WARNING)
    if settings.emulated_device is not None:
        _fail("BATCHWEAVE_EMULATED_DEVICE is set: nothing can be measured on an emulated device; unset it")
    measured_on = "another machine"
    is_measured_here = steps is None
    _check_calibration_files(output, steps)
    try:
        read_shape(settings.model_source)
        if steps is None:
            steps = output.with_suffix(".steps.jsonl")
            console.print("starting the engine")
            engine = make_engine(settings.model_copy(update={"steps_file": steps, "overlap": "none"}))
            measured_on = engine.machine
            try:
                measure(engine, steps, console.print)
            finally:
                engine.close()
        found = calibrated(settings, steps, output, measured_on)
    except ModuleNotFoundError as error:
        _fail(f"The engine is not installed ({error.name} is missing): pip install 'batchweave[engine]'")
    except (CalibrationError, WorkloadError, CostsError, OSError, ValueError, RuntimeError) as error:
        _fail(str(error))
    for name, misfit in found.errors.items():
        console.print(
            f"{name}: off by {misfit.mean:.1%} on average over {misfit.steps:,}, at most {misfit.largest:.0%}"
        )
    console.print(f"wrote {output}: {found.gemm_s:.3g} s a token, {found.read_s:.3g} s a KV token read")
    if is_measured_here and len(names := possible_overlaps(settings)) > 1:
        seconds = compare(settings, output, names, console.print)
        if seconds:
            console.print(f"the fastest overlap: {min(seconds, key=lambda name: seconds[name])}, noted in {output}")


def _check_calibration_files(output: Path, steps: Path | None) -> None:
    if output.suffix != ".json":
        _fail(f"{output}: its name must end in .json, for BATCHWEAVE_GPU to know it as a calibration")
    if output.is_dir() or not output.parent.is_dir():
        _fail(f"{output}: no file can be written there; name one in a folder that exists")
    if steps is not None and steps.resolve() == output.resolve():
        _fail(f"{output}: is the file of the steps; name another one to write")


@app.command()
def demo(
    file: Annotated[
        Path | None, typer.Option("--file", help="Your own JSONL file instead of the built-in ones.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the service up until Ctrl-C.")] = False,
    model: ModelOption = None,
    data_dir: Annotated[Path, typer.Option("--data-dir", help="Folder for everything that is kept.")] = Path(".demo"),
    port: PortOption = None,
) -> None:
    """Start the service, run a real batch through the official openai client, show what came back, stop.

    Examples:

    - `batchweave demo`
    - `batchweave demo --file requests.jsonl --keep`
    """
    from service.demo.run import DemoError, run_demo

    settings = _settings(model=model, data_dir=data_dir, port=port)
    _log_to(sys.stderr, logging.WARNING)
    try:
        run_demo(settings, file, keep)
    except DemoError as error:
        _fail(str(error))


app.command()(plan)
app.command()(simulate)
app.add_typer(keys, name="keys")
app.add_typer(projects, name="projects")
app.command("audit")(show_audit)


@app.command()
def openapi() -> None:
    """Print the OpenAPI description of the HTTP API as YAML."""
    import yaml

    from service.app import create_app

    print(yaml.safe_dump(create_app(load_settings()).openapi(), sort_keys=False, allow_unicode=True, width=110), end="")


async def _role(settings: Settings, main: Callable[[Database, Storage, Redis, asyncio.Event], Awaitable[None]]) -> None:
    """Open the parts, run `main` until SIGINT or SIGTERM, and close them."""
    stop = asyncio.Event()
    _stop_on_signals(stop)
    database = Database(settings.database, settings.database_timeout_s)
    redis = open_redis(settings.redis)
    try:
        await main(database, Storage.open(settings.storage), redis, stop)
    finally:
        await redis.aclose()
        await database.close()


def _stop_on_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)


def _settings(**overrides: Any) -> Settings:
    try:
        settings = load_settings(**overrides)
        # A worker would find it out only after SGLang's import, and be started again for ever.
        planning_costs(FALLBACK, settings.gpu, 1)
        measured_overlap(settings.gpu)
    except SettingsError as error:
        _fail(str(error))
    except CostsError as error:
        _fail(f"BATCHWEAVE_GPU: {error}")
    return settings


def _open_database(settings: Settings) -> None:
    """Make the folder of an embedded one, and bring it to the newest schema."""
    url = make_url(settings.database)
    try:
        if url.get_backend_name() == "sqlite":
            Path(url.database or "").parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        upgrade(settings.database)
    except (OSError, SQLAlchemyError) as error:
        why = str(getattr(error, "orig", None) or error).splitlines()[0]
        _fail(f"The database cannot be opened: {why}. BATCHWEAVE_DATABASE_URL and BATCHWEAVE_DATA_DIR say where it is.")


def _fail(message: str) -> NoReturn:
    console.print(f"error: {message}", style="red")
    raise typer.Exit(1)


def _log_to(stream: Any, level: int = logging.INFO) -> None:
    """JSON lines, ours and the libraries'."""
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.processors.JSONRenderer()],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(stream),
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.JSONRenderer(),
            ],
            foreign_pre_chain=shared,
        )
    )
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)


if __name__ == "__main__":
    app()
