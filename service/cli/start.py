"""Start-up of the commands that run parts of the service: settings, logs, the database, one-line errors."""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from redis.asyncio import Redis
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from batchweave.terminal import fail
from service.db.migrate import upgrade
from service.db.private import keep_private
from service.db.sessions import Database
from service.errors import CostsError, SettingsError, StartError
from service.estimates.engine_arguments import argument_fault
from service.estimates.model_costs import FALLBACK, measured_overlap, planning_costs
from service.estimates.slo_file import read_slo_file
from service.metrics.counters import serve
from service.objects.storage import Storage
from service.queue.connection import open_redis
from service.settings import AUTO, Settings, load_settings

EMBEDDING = ":embedding"  # ends a --model that is served for embeddings
ModelOption = Annotated[str | None, typer.Option("--model", help="'demo', a local path, or a hub id.")]
ModelsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--model", help="'demo', a local path, or a hub id; repeatable. MODEL:embedding is served for embeddings."
    ),
]
NamesOption = Annotated[
    list[str] | None, typer.Option("--model-name", help="Name that requests use for the model; one for each model.")
]
NameOption = Annotated[str | None, typer.Option("--model-name", help="Name that requests use for the model.")]
EngineOption = Annotated[
    str | None, typer.Option("--engine", help="'sglang', or 'scripted': answers by rules, without a model.")
]
ScriptOption = Annotated[
    Path | None, typer.Option("--script", help="JSON file with a scripted engine's rules (docs/api.md).")
]
GpusOption = Annotated[
    str | None, typer.Option("--gpus", help="GPUs to use, such as 0,1,2,3, or 'none'; default: all of this machine.")
]
EnginesOption = Annotated[
    int | None, typer.Option("--engines", help="Number of engines; default: one for each GPU, or one on a CPU.")
]
HostOption = Annotated[str | None, typer.Option("--host", help="Address that the API listens on.")]
PortOption = Annotated[int | None, typer.Option("--port", help="Port of the API.")]


def settings_of(**overrides: Any) -> Settings:
    try:
        settings = load_settings(**overrides)
        # Checked here: a worker would fail only after importing SGLang, and would be restarted again and again.
        if settings.gpu != AUTO:
            planning_costs(FALLBACK, settings.gpu, 1)
            measured_overlap(settings.gpu)
        if settings.slo_file is not None:
            read_slo_file(settings.slo_file)
        if wrong := argument_fault(settings.engine_args):
            fail(f"BATCHWEAVE_ENGINE_ARGS: {wrong}")
    except SettingsError as error:
        fail(str(error))
    except CostsError as error:
        fail(f"BATCHWEAVE_GPU: {error}")
    return settings


def models_of(models: list[str] | None, names: list[str] | None, **overrides: Any) -> list[Settings]:
    """Return the settings for each model of `up`, the first one's first."""
    if names and len(names) != len(models or [""]):
        fail(f"{len(names)} times --model-name for {len(models or [''])} models: give one for each, in their order.")
    found = list[Settings]()
    for number, given in enumerate(models or [None]):
        if given in ("", EMBEDDING):
            fail("--model is empty: name a local path or a hub id.")
        source, is_embedding = (given or "").removesuffix(EMBEDDING), (given or "").endswith(EMBEDDING)
        own: dict[str, Any] = {"model": source or None, "model_name": names[number] if names else None}
        if number:  # adapters, and a name in the environment, are the first one's
            own |= {"adapters": {}, "model_name": own["model_name"] or ""}
        settings = settings_of(**overrides, **own)
        args = settings.engine_args | ({"is_embedding": True} if is_embedding else {})
        found.append(settings.model_copy(update={"engine_args": args}))
    served = [each.served_model for each in found]
    if twice := next((name for name in served if served.count(name) > 1), None):
        given = " and ".join(f"--model {each.model}" for each in found if each.served_model == twice)
        fail(f"{given} have one name, {twice}: give each its own by --model-name.")
    return found


def open_database(settings: Settings) -> None:
    """Create the folder of an embedded database, and upgrade the database to the newest schema."""
    keep_private(settings)
    url = make_url(settings.database)
    try:
        if url.get_backend_name() == "sqlite":
            Path(url.database or "").parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        upgrade(settings.database)
    except StartError as error:
        fail(str(error))
    except (OSError, SQLAlchemyError) as error:
        why = str(getattr(error, "orig", None) or error).splitlines()[0]
        fail(f"The database cannot be opened: {why}. BATCHWEAVE_DATABASE_URL and BATCHWEAVE_DATA_DIR say where it is.")


def log_to(stream: Any, level: int = logging.INFO) -> None:
    """Log to `stream` as JSON lines, including what libraries log."""
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


def serve_metrics(settings: Settings) -> None:
    """Serve this process's metrics if the settings name a port for them."""
    if settings.metrics_port is not None:
        try:
            serve(settings.metrics_host, settings.metrics_port)
        except OSError as error:
            fail(f"BATCHWEAVE_METRICS_PORT {settings.metrics_port}: {error}")


async def run_role(
    settings: Settings, main: Callable[[Database, Storage, Redis, asyncio.Event], Awaitable[None]]
) -> None:
    """Open the parts, run `main` until SIGINT or SIGTERM, and close them."""
    stop = asyncio.Event()
    stop_on_signals(stop)
    database = Database(settings.database, settings.database_timeout_s, connections=settings.database_connections)
    redis = open_redis(settings.redis)
    try:
        await main(database, Storage.open(settings.storage), redis, stop)
    finally:
        await redis.aclose()
        await database.close()


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` at SIGINT and SIGTERM, whatever a library has made of them."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
