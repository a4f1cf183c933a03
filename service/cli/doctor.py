"""`batchweave doctor`: checks what the service needs on this machine, and says how to fix what is missing."""

import asyncio
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Literal, cast
from urllib.parse import unquote

import typer
from redis.exceptions import RedisError
from sqlalchemy import inspect, make_url, text
from sqlalchemy.ext.asyncio import AsyncSession

from batchweave.terminal import DataDirOption, said
from engine_ext.costs.hardware import preset_of
from service.cli.owners import strangers
from service.cli.start import ModelOption, settings_of
from service.db.migrate import known, newer, newest
from service.db.sessions import Database
from service.demo import smollm
from service.errors import CostsError
from service.estimates.model_costs import assumed_gpu, check_model, machine_gpu, planning_costs
from service.objects.storage import Storage
from service.queue.connection import open_redis
from service.requests.model_check import faults
from service.requests.weights import weight_faults
from service.settings import AUTO, DEMO_MODEL, TINY_MODEL, Settings
from service.worker import compilers, notice
from service.worker.engine import check_version
from service.worker.nodes import Nodes
from service.worker.script import read_script

CHECK_S = 10.0
LIMITS_S = {"parsers": 60.0}  # it loads SGLang
SKEW_S = 2.0  # between two clocks; leases last many times as long
MARKS = {"ok": "green", "note": "yellow", "wrong": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `todo` says what to do, if anything."""

    part: str
    state: Literal["ok", "note", "wrong"]
    what: str
    todo: str = ""


def doctor(
    model: ModelOption = None,
    data_dir: DataDirOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on standard output, for programs.")] = False,
) -> None:
    """Check that this machine has everything the service needs, and say how to fix what is wrong.

    Checks versions, database, Redis, storage, model, GPU and clocks, with the settings that `batchweave up` would use.
    Changes nothing. Exits with code 1 if anything is wrong. Examples:

    - `batchweave doctor`
    - `BATCHWEAVE_DATABASE_URL=postgresql://… batchweave doctor --model Qwen/Qwen2.5-7B-Instruct --json`
    """
    settings = settings_of(model=model, data_dir=data_dir)
    findings = asyncio.run(_all(settings))
    if as_json:
        print(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        for each in findings:
            said.print(f"{each.state:<6} {each.part:<9} {each.what}", style=MARKS[each.state])
            if each.todo:
                said.print(f"{'':<16} {each.todo}")
    raise typer.Exit(any(each.state == "wrong" for each in findings))


async def _all(settings: Settings) -> list[Finding]:
    checks: list[tuple[str, Callable[[Settings], Awaitable[Finding]]]] = [
        ("settings", _settings),
        ("versions", _versions),
        ("database", _database),
        ("redis", _redis),
        ("storage", _storage),
        ("model", _model),
        ("adapters", _adapters),
        ("parsers", _parsers),
        ("gpu", _gpu),
    ]
    found: list[Finding] = []
    for part, check in checks:
        limit_s = LIMITS_S.get(part, CHECK_S)
        try:
            async with asyncio.timeout(limit_s):
                found.append(await check(settings))
        except TimeoutError:
            found.append(Finding(part, "wrong", f"no answer in {limit_s:.0f} s", f"Is it up? Check {_where(part)}."))
        except Exception as error:  # a library may raise anything; its own message says most
            why = (str(getattr(error, "orig", None) or error).splitlines() or [type(error).__name__])[0]
            found.append(Finding(part, "wrong", why, f"Check {_where(part)}."))
    return found


def _where(part: str) -> str:
    named = {
        "parsers": "BATCHWEAVE_TOOL_PARSER and BATCHWEAVE_REASONING_PARSER",
        "gpu": "BATCHWEAVE_GPU",
        "model": "--model or BATCHWEAVE_MODEL",
        "settings": "the setting that it names; docs/settings.md has all",
        "versions": "the installation",
    }
    return named.get(part, f"BATCHWEAVE_{part.upper()}_URL")


async def _versions(_settings: Settings) -> Finding:
    python = ".".join(str(each) for each in sys.version_info[:3])
    what = f"batchweave {version('batchweave-server')}, Python {python}"
    if wrong := strangers():
        return Finding("versions", "wrong", what, f"{wrong[0].upper()}{wrong[1:]}")
    try:
        return Finding("versions", "ok", f"{what}, SGLang {version('sglang')}")
    except PackageNotFoundError:
        todo = "Only a worker needs it: pip install 'batchweave-server[engine]'."
        return Finding("versions", "note", f"{what}, SGLang is not installed", todo)


async def _settings(settings: Settings) -> Finding:
    read_script(settings.script)
    Nodes.of(settings)
    if settings.notice_command is not None:
        notice.words(settings.notice_command)
    if importlib.util.find_spec("sglang") is not None and settings.engine == "sglang":
        check_version(settings)
    return Finding("settings", "ok", "their values make sense together")


async def _database(settings: Settings) -> Finding:
    url = make_url(settings.database)
    name = url.render_as_string(hide_password=True)
    if url.get_backend_name() == "sqlite" and not Path(url.database or "").exists():
        return _folder("database", Path(url.database or "").parent, f"{name} will be created at the first start")
    database = Database(settings.database, CHECK_S)
    try:
        async with database.read() as session:
            now = None
            if url.get_backend_name() == "postgresql":
                now = float((await session.execute(text("SELECT extract(epoch FROM clock_timestamp())"))).scalar_one())
            revision = await _revision(session)
    finally:
        await database.close()
    if now is not None and abs(now - time.time()) > SKEW_S:
        todo = "Leases and deadlines depend on these clocks; synchronize them (chrony, systemd-timesyncd)."
        return Finding("database", "wrong", f"{name}: its clock is off by {now - time.time():+.1f} s", todo)
    if revision is None:
        return Finding("database", "ok", f"{name} is reachable; the first start creates the tables")
    if revision != newest():
        if revision not in known():
            return Finding("database", "wrong", f"{name}: its schema is {revision}", newer(revision))
        what = f"{name}: its schema is {revision}, this version needs {newest()}"
        return Finding("database", "note", what, "The next start of any role upgrades an older schema.")
    return Finding("database", "ok", name)


async def _revision(session: AsyncSession) -> str | None:
    """Return the revision of the database's schema; None if it has none yet."""
    there = await session.run_sync(lambda sync: inspect(sync.connection()).has_table("alembic_version"))
    return (await session.execute(text("SELECT max(version_num) FROM alembic_version"))).scalar_one() if there else None


async def _redis(settings: Settings) -> Finding:
    if settings.redis_url is None and not settings.redis_socket.exists():
        return Finding("redis", "ok", "`batchweave up` starts the embedded one")
    redis = open_redis(settings.redis)
    try:
        await cast(Awaitable[object], redis.ping())
    except (RedisError, OSError) as error:
        if settings.redis_url is None:
            return Finding("redis", "ok", "`batchweave up` starts the embedded one")
        raise error
    finally:
        await redis.aclose()
    return Finding("redis", "ok", "reachable")


async def _storage(settings: Settings) -> Finding:
    if settings.storage.startswith("file://"):
        folder = Path(unquote(settings.storage.removeprefix("file://")))
        return _folder("storage", folder, str(folder))
    await Storage.open(settings.storage).check()
    return Finding("storage", "ok", settings.storage)


async def _model(settings: Settings) -> Finding:
    if settings.own_model == TINY_MODEL:
        return Finding("model", "ok", "random weights, whose answers are noise", "Choose a real model with --model.")
    if settings.own_model == DEMO_MODEL and not smollm.is_there(Path(settings.model_source)):
        todo = f"A worker needs one: --model, or {smollm.INSTALL}"
        return Finding("model", "note", "none is named, and the demo's is not installed", todo)
    if settings.own_model == DEMO_MODEL:
        return Finding("model", "ok", "SmolLM2-135M, the demo's", "Choose a larger one with --model.")
    source = settings.model_source
    try:
        await asyncio.to_thread(check_model, settings)
    except CostsError as error:
        return Finding("model", "wrong", str(error), "Give a folder, or a hub id that this machine can download.")
    if Path(source).is_dir():
        lacking = [name for name in ("config.json", "tokenizer_config.json") if not (Path(source) / name).exists()]
        if lacking:
            return Finding("model", "wrong", f"{source} has no {' and no '.join(lacking)}", "Give a model's folder.")
        folder = Path(source)
        if wrong := await asyncio.to_thread(lambda: weight_faults(folder) or faults(folder)):
            return Finding("model", "wrong", f"{source}: {wrong[0]}", "Copy or convert it again.")
        return Finding("model", "ok", f"{source}, served as {settings.served_model}")
    try:
        planning_costs(source, assumed_gpu(settings), settings.replica)
    except CostsError as error:
        return Finding("model", "wrong", str(error), "Give a folder, or a hub id that this machine can download.")
    return Finding("model", "ok", f"{source} on the hub, served as {settings.served_model}")


async def _adapters(settings: Settings) -> Finding:
    wrong: list[str] = []
    for name, given in settings.adapters.items():
        is_folder = Path(given).is_dir()
        if is_folder and not (Path(given) / "adapter_config.json").exists():
            wrong.append(f"{name}: {given} has no adapter_config.json")
        if not is_folder and (given.startswith((".", "/", "~")) or given.count("/") != 1):
            wrong.append(f"{name}: {given} is neither a folder nor a hub id")
    if wrong:
        advice = 'Set BATCHWEAVE_ADAPTERS to JSON such as {"name": "folder or hub id"}.'
        return Finding("adapters", "wrong", "; ".join(wrong), advice)
    return Finding("adapters", "ok", ", ".join(settings.served_models[1:]) or "none")


async def _parsers(settings: Settings) -> Finding:
    """Find what will find tool calls and reasoning in the model's answers."""
    if settings.engine == "scripted" or importlib.util.find_spec("sglang") is None:
        return Finding("parsers", "ok", "only a worker with SGLang needs them")
    from service.worker.engine import parsers_of

    tools, reasoning = await asyncio.to_thread(parsers_of, settings)
    what = f"tool calls: {tools or 'none, they stay text'}; reasoning: {reasoning or 'none, it stays in the text'}"
    asked = "auto" in (settings.tool_parser, settings.reasoning_parser) and settings.own_model is None
    todo = "The chat template names none. If the model has them, set BATCHWEAVE_TOOL_PARSER (…_REASONING_PARSER)."
    return Finding("parsers", "ok", what, todo if asked and not (tools and reasoning) else "")


async def _gpu(settings: Settings) -> Finding:
    if shutil.which("nvidia-smi") is None:
        todo = "That is enough for the demo and the tests only. The API and the planner need no GPU."
        return Finding("gpu", "note", "no nvidia-smi: workers here run on the CPU", todo)
    asked = ["nvidia-smi", "--query-gpu=name,memory.free", "--format=csv,noheader"]
    found = await asyncio.to_thread(subprocess.run, asked, capture_output=True, text=True, timeout=CHECK_S)
    if found.returncode:
        return Finding("gpu", "wrong", found.stdout.strip() or found.stderr.strip(), "Check the driver's log.")
    names = "; ".join(found.stdout.strip().splitlines())
    if importlib.util.find_spec("sglang") is None:
        return Finding(
            "gpu",
            "note",
            f"{names}, but SGLang is not installed",
            "Install it: pip install 'batchweave-server[engine]'",
        )
    missing = compilers.put_on_path()
    if missing:
        todo = "SGLang compiles kernels at a worker's start: install them, or put them on PATH."
        return Finding("gpu", "wrong", f"{names}, but there is no {', '.join(missing)}", todo)
    assumed = assumed_gpu(settings)
    preset = preset_of(await asyncio.to_thread(machine_gpu) or "")
    if preset is None and settings.gpu == AUTO:
        todo = "Measure this GPU, which no preset describes: batchweave calibrate."
        return Finding("gpu", "note", f"{names}; plans assume {assumed}", todo)
    if preset is not None and assumed != preset and not assumed.endswith(".json"):
        todo = "Unset BATCHWEAVE_GPU, or name a calibration of this machine: batchweave calibrate."
        return Finding("gpu", "wrong", f"{names}; plans assume {assumed}", todo)
    todo = "" if assumed.endswith(".json") else "Measured costs improve plans: batchweave calibrate."
    return Finding("gpu", "ok", f"{names}; plans assume {assumed}", todo)


def _folder(part: str, folder: Path, what: str) -> Finding:
    """Check that a folder is writable, and report its free space."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    free = shutil.disk_usage(there).free
    try:
        with tempfile.TemporaryFile(dir=there):  # some file systems refuse what their permissions allow
            pass
    except OSError as error:
        what = f"{there} is not writable: {error.strerror or error}"
        return Finding(part, "wrong", what, "Choose another folder with BATCHWEAVE_DATA_DIR.")
    state = "ok" if free > 10 * 2**30 else "note"
    todo = "" if state == "ok" else "Results need about as much space as the inputs, and twice that while written."
    return Finding(part, state, f"{what}; {free / 2**30:,.0f} GiB free", todo)
