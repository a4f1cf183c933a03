"""`batchweave up`: runs every part of the service as a child of one foreground process."""

import asyncio
import errno
import hashlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import structlog

from service.db.migrate import upgrade
from service.db.models import register_model
from service.db.private import keep_private
from service.db.sessions import Database
from service.demo.models import ensure_model
from service.errors import StartError
from service.objects.storage import Storage
from service.queue import keys
from service.settings import Settings, is_everywhere
from service.up.embedded_redis import server_command
from service.up.ends import Ends, clock
from service.up.engines import Engine, Engines
from service.up.folder_lock import FolderLock
from service.up.log_files import rotate
from service.up.part import Part

STOP_S = 8.0  # of one part; together less than the ten seconds that container runtimes give
BEGUN_S = 20.0
MAX_EXITS, MAX_ALIKE = 5, 3  # deaths without becoming ready after which `up` gives up; and of such that are alike
LONGEST_PAUSE_S = 60.0
FIRST_PAUSE_S = 0.5
ASK_S = 1.0
WATCH_S = 0.5
HELD_S = 5.0  # between two looks whether a worker is still drained
LOGS_S = 60.0
ROLES = ("api", "planner")
COMMAND = [sys.executable, "-m", "batchweave"]
log = structlog.get_logger()


@dataclass(slots=True)
class Supervisor:
    """Starts Redis, API, planner and workers, restarts any that dies, and stops the workers first and Redis last."""

    engines: Engines
    say: Callable[[str], None]
    _parts: list[Part] = field(default_factory=list[Part])
    _lock: FolderLock = field(init=False)
    _stopping: bool = False
    _look_at_logs_at: float = 0.0
    _ends: Ends = field(init=False)

    @property
    def settings(self) -> Settings:
        """The settings of the first model, which are also the service's."""
        return self.engines.models[0].settings

    def __post_init__(self) -> None:
        self._lock = FolderLock(self.settings.data_dir)
        self._ends = Ends(self.settings, self.say)

    def run(self) -> None:
        """Run until SIGINT or SIGTERM. Raises StartError."""
        try:
            keep_private(self.settings)
            self._lock.take()
        except OSError as error:
            raise StartError(
                f"--data-dir {self.settings.data_dir} cannot be used: {error.strerror or error}. Choose another folder."
            ) from error
        self._check_port()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)
        try:
            self._start()
            while not self._stopping:
                self._watch()
                self._rotate_logs()
                time.sleep(WATCH_S)
        finally:
            self._stop()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._stopping = True

    def _check_port(self) -> None:
        host, port = self.settings.host, self.settings.port
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                taken = "is taken by another program" if error.errno == errno.EADDRINUSE else f"cannot be used: {error}"
                raise StartError(f"{host} port {port} {taken}. Choose another --port or --host.") from error

    def _start(self) -> None:
        settings, folder = self.settings, self.settings.data_dir.resolve()
        logs = folder / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        for model in self.engines.models:
            ensure_model(model.settings)
        environment = self._environment(folder)
        self._check_storage()
        if settings.redis_url is None:
            command = server_command(settings.redis_socket, folder / "redis")
            self._parts.append(Part("redis", command, logs / "redis.log"))
            self._parts[0].start(environment)
        self._wait_for_redis()
        upgrade(settings.database)
        asyncio.run(self._register())
        roles = [Part(name, [*COMMAND, name], logs / f"{name}.log") for name in ROLES]
        if settings.metrics_port is not None:  # the first worker has the port itself
            roles[1].changes["BATCHWEAVE_METRICS_PORT"] = str(settings.metrics_port + 1)
        for part in (*roles, *(self._worker(each, logs) for each in self.engines.engines)):
            part.start(environment)
            self._parts.append(part)
        host = "127.0.0.1" if is_everywhere(settings.host) else settings.host
        url = f"http://[{host}]:{settings.port}" if ":" in host else f"http://{host}:{settings.port}"
        self._lock.tell(url)
        self.say(f"Dashboard  {url}/dashboard")
        self.say(f"API        {url}/v1   its reference: {url}/docs")
        for model in self.engines.models:
            self.say(f"Model      {model.settings.served_model}   from {model.settings.model_source}")
        for line in self._about_engines():
            self.say(f"Engine     {line}")
        self.say(f"Data       {folder}")
        self.say(f"Logs       {logs}")
        if settings.needs_keys:
            self.say(f"Keys       required; create one: BATCHWEAVE_DATA_DIR={folder} batchweave keys create --name …")
        self.say("The engine is starting; you can already submit batches. Press Ctrl-C to stop.")

    async def _register(self) -> None:
        """Write the models' rows, so that batches for each are accepted before its first engine has started."""
        database = Database(self.settings.database)
        try:
            for model in self.engines.models:
                await register_model(database, model.settings, None, knows_adapters=False)
        finally:
            await database.close()

    def _worker(self, engine: Engine, logs: Path) -> Part:
        """Return the part that runs one engine. The only one of a machine has no number."""
        number = "" if len(self.engines.engines) == 1 else f"-{engine.number}"
        part = Part(f"worker{number}", [*COMMAND, "worker"], logs / f"worker{number}.log", self.worker_name + number)
        assert part.worker is not None
        part.changes["BATCHWEAVE_WORKER_NAME"] = part.worker
        if engine.gpus is not None:
            # Numbers are nvidia-smi's, which go by the bus.
            part.changes |= {"CUDA_VISIBLE_DEVICES": ",".join(engine.gpus), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        if number and not engine.gpus and "OMP_NUM_THREADS" not in os.environ:  # engines on a CPU share its cores
            part.changes["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // len(self.engines.engines)))
        model = self.engines.models[engine.model]
        part.changes["BATCHWEAVE_MODEL"] = model.settings.own_model or model.settings.model_source
        part.changes["BATCHWEAVE_MODEL_NAME"] = model.settings.served_model
        part.changes["BATCHWEAVE_ENGINE_ARGS"] = json.dumps(model.engine_args)
        if engine.model:  # they are the first one's
            part.changes["BATCHWEAVE_ADAPTERS"] = "{}"
        if engine.number and self.settings.metrics_port is not None:  # the planner has the next one
            part.changes["BATCHWEAVE_METRICS_PORT"] = str(self.settings.metrics_port + 1 + engine.number)
        if engine.number and self.settings.online_port:
            part.changes["BATCHWEAVE_ONLINE_PORT"] = str(self.settings.online_port + engine.number)
        if engine.number and (steps := self.settings.steps_file) is not None:
            part.changes["BATCHWEAVE_STEPS_FILE"] = str(steps.with_name(f"{steps.stem}{number}{steps.suffix}"))
        return part

    def _about_engines(self) -> list[str]:
        if self.settings.engine == "scripted":
            return ["scripted: rules answer, no model runs"]
        engines = self.engines.engines
        if not engines[0].gpus:
            return [] if len(engines) == 1 else [f"{len(engines)} on this machine's CPU"]
        said = list(self.engines.said)
        for number, model in enumerate(self.engines.models):
            groups = [",".join(each.gpus or ()) for each in engines if each.model == number]
            each_one = f"{len(groups)}, one for each of GPU {', '.join(groups)}"
            where = f"on GPU {groups[0]}" if len(groups) == 1 else each_one
            said.append(where if len(self.engines.models) == 1 else f"{model.settings.served_model}: {where}")
        return said

    def _environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of the children: our settings, with every default spelled out."""
        settings = self.settings
        ours = {
            "DATA_DIR": str(folder),
            "DATABASE_URL": settings.database,
            "REDIS_URL": settings.redis,
            "STORAGE_URL": settings.storage,
            "HOST": settings.host,
            "PORT": str(settings.port),
            "MODEL": settings.own_model or settings.model_source,
            "MODEL_NAME": settings.served_model,
            "ENGINE": settings.engine,
            "NODES": "1",  # whatever srun or others say: each `up` is a service of its own
            "ONLINE_HOST": settings.online_host or "127.0.0.1",
        }
        if settings.script is not None:
            ours["SCRIPT"] = str(settings.script.resolve())
        return {**os.environ, **{f"BATCHWEAVE_{name}": value for name, value in ours.items()}}

    @property
    def worker_name(self) -> str:
        """A name that stays the same at the next start, so that the worker returns the slices that a dead one held."""
        if "worker_name" in self.settings.model_fields_set:
            return self.settings.worker_name
        folder = os.fsencode(self.settings.data_dir.resolve())
        return f"{socket.gethostname()}-{hashlib.sha256(folder).hexdigest()[:8]}"

    def _wait_for_redis(self) -> None:
        embedded = self._parts[0] if self._parts else None
        deadline = time.monotonic() + (60 if embedded else 10)
        try:
            client = redis.Redis.from_url(self.settings.redis, socket_connect_timeout=2, socket_timeout=5)
        except ValueError as error:
            raise StartError(f"BATCHWEAVE_REDIS_URL: {error}") from error
        while True:
            try:
                client.ping()
                return
            except (redis.RedisError, OSError) as error:
                if embedded and not embedded.running:
                    raise StartError(f"Redis did not start; see its log: {embedded.log_path}") from error
                if time.monotonic() > deadline:
                    raise StartError(f"Redis is not responding: {error}") from error
                time.sleep(0.05)

    def _check_storage(self) -> None:
        try:
            Storage.open(self.settings.storage)
        except Exception as error:  # obstore and the operating system raise many kinds
            raise StartError(f"BATCHWEAVE_STORAGE_URL cannot be opened: {error}") from error

    def _watch(self) -> None:
        now = time.monotonic()
        self._ends.write_down()
        for part in self._parts:
            if part.running:
                if not part.begun and self._has_begun(part):
                    part.begun = True
                    self._say_is_back(part)
                continue
            if part.restart_at == 0.0:
                assert part.process is not None
                part.begun = part.begun or self._has_begun(part, at_once=True)  # it may have died soon after
                self._ends.note(part, part.process.returncode)
                if (part.exits >= MAX_EXITS or part.alike >= MAX_ALIKE) and not self._others_run(part):
                    raise StartError(
                        f"{part.name} died {part.exits} times in a row without becoming ready, the last time: "
                        f"{part.ended}; its log: {part.log_path}. `batchweave doctor` checks what it was started with."
                    )
                part.restart_at = now + min(FIRST_PAUSE_S * 2 ** (part.exits - 1), LONGEST_PAUSE_S)
            elif now >= part.restart_at:
                if self._ends.is_held(part):
                    part.restart_at = now + HELD_S
                    continue
                try:
                    part.start(self._environment(self.settings.data_dir.resolve()))
                    part.restart_at, part.is_stopped = 0.0, False
                except OSError as error:  # too little memory or too many processes: may be transient
                    log.warning("not started again yet", part=part.name, error=repr(error))
                    part.restart_at = now + ASK_S

    def _say_is_back(self, part: Part) -> None:
        if part.died_at:
            # Of a worker it is known when it works again; the others do as soon as they run.
            until = time.time() if part.worker is not None else part.started_at
            self.say(f"{clock()} {part.name} is back after {until - part.died_at:.0f} s")
        part.died_at = 0.0

    def _rotate_logs(self) -> None:
        if time.monotonic() < self._look_at_logs_at:
            return
        self._look_at_logs_at = time.monotonic() + LOGS_S
        for part in self._parts:
            try:
                rotate(part.log_path)
            except OSError as error:  # the service continues
                log.warning("log not rotated", part=part.name, error=repr(error))

    def _others_run(self, part: Part) -> bool:
        """Return whether another engine of this machine works, so that the service continues without this one."""
        return part.worker is not None and any(
            each.worker is not None and each is not part and each.running and each.begun for each in self._parts
        )

    def _has_begun(self, part: Part, at_once: bool = False) -> bool:
        """Return whether a part has become ready.

        A worker is ready once its engine has started, which may fail after minutes; its heartbeat says so.
        """
        if part.worker is None:
            return not at_once and time.time() - part.started_at > BEGUN_S
        if not at_once and time.monotonic() < part.ask_at:
            return False
        part.ask_at = time.monotonic() + ASK_S
        try:
            with redis.Redis.from_url(self.settings.redis, socket_connect_timeout=1, socket_timeout=1) as client:
                asked: Any = client.mget(keys.worker(part.worker), keys.starting(part.worker))
        except (redis.RedisError, OSError):
            return False
        beat, starting = (json.loads(each) if each else {} for each in asked)
        assert part.process is not None
        begun = beat.get("pid") == part.process.pid
        stage = "is ready" if begun else starting.get("stage", "") if starting.get("pid") == part.process.pid else ""
        if stage and stage != part.stage:
            who = "The worker" if len(self.engines.engines) == 1 else part.name.capitalize()
            self.say(f"{who} {stage} ({time.time() - part.started_at:.0f} s)")
            part.stage = stage
        return begun

    def _stop(self) -> None:
        """Stop the workers first, so that their answers are written while everything else runs, and Redis last."""
        self._lock.tell("")
        if self._parts:
            self.say("Stopping. Unfinished batches continue at the next start.")
        workers = [part for part in self._parts if part.worker is not None]
        roles, servers = ([part for part in self._parts if part.name in names] for names in (ROLES, ("redis",)))
        for parts in (workers, roles, servers):
            for part in parts:
                part.ask_to_stop()
            until = time.monotonic() + STOP_S
            for part in parts:
                part.end(max(0.0, until - time.monotonic()))
        if self._parts:
            self.say("Stopped.")
