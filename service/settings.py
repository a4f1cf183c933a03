"""Reads the settings; nothing else in the service reads the environment."""

import hashlib
import ipaddress
import os
import socket
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as PydanticSettingsError

from service.endpoints import ADAPTER, ModelName
from service.errors import SettingsError

DEMO_MODEL, TINY_MODEL = "demo", "tiny"  # the two that the project itself makes
AUTO = "auto"
DEMO_NAME = "batchweave-demo"  # that requests use for them
AdapterName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
# Variables of the command line, and one that a worker passes to its engine.
NOT_SETTINGS = {"BATCHWEAVE_URL", "BATCHWEAVE_API_KEY", "BATCHWEAVE_SCHEDULER"}


class Settings(BaseSettings):
    """Holds the settings, frozen. Each comes from the variable BATCHWEAVE_<NAME> unless it names another one."""

    model_config = SettingsConfigDict(env_prefix="BATCHWEAVE_", frozen=True, extra="ignore", protected_namespaces=())

    data_dir: Path = Field(
        Path("batchweave-data"),
        description="folder for the embedded database, Redis and objects, and for the demo's model",
    )
    database_url: str | None = Field(None, description="postgresql://… or sqlite:///…; default: SQLite in data_dir")
    database_timeout_s: float = Field(
        30.0, gt=0, description="seconds of silence before the database counts as unavailable"
    )
    database_connections: int = Field(
        4, ge=1, description="most connections of one process to the database; PostgreSQL's default is 100 for all"
    )
    keep_days: int = Field(
        90,
        ge=1,
        description="days after which rows of deleted files, and of ended batches without files, are deleted",
    )
    redis_url: str | None = Field(None, description="redis://… or unix://…; default: the embedded server's socket")
    storage_url: str | None = Field(None, description="file:///…, s3://…, gs://…, az://…; default: data_dir/objects")

    host: str = Field("127.0.0.1", description="address that the API listens on")
    port: int = Field(8080, ge=0, le=65535, description="port of the API; 0 takes a free one")
    connections_per_address: int = Field(
        256,
        ge=0,
        description="most connections of one address on which no known key has called; 0 (any number) only behind "
        "a proxy that has a limit",
    )
    access_log: bool = Field(True, description="whether the API logs each HTTP request: caller, call and outcome")
    auth: Literal["keys", "none"] | None = Field(
        None, description="whether the API requires keys; default: keys, but none if it listens only on loopback"
    )

    model: str = Field(
        DEMO_MODEL, description="'demo' (SmolLM2-135M), 'tiny' (random weights, for tests), a local path, or a hub id"
    )
    model_name: str | None = Field(
        None, description="name that requests use, without a colon; default: the hub id or folder name"
    )
    adapters: dict[AdapterName, Annotated[str, StringConstraints(min_length=1)]] = Field(
        default_factory=dict,
        description='LoRA adapters of the model, as JSON: {"name": "folder or hub id"}; requests use "model:name"',
    )
    engine: Literal["sglang", "scripted"] = Field(
        "sglang", description="what answers: SGLang, or rules without a model, for tests of what uses this service"
    )
    script: Path | None = Field(None, description="JSON file with a scripted engine's rules; default: it echoes")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="SGLang server arguments, as JSON")
    tool_parser: str = Field(
        "auto",
        min_length=1,
        description="what finds tool calls in answers: one of SGLang's tool-call parsers, 'auto' (by the model's chat "
        "template) or 'none' (calls stay text)",
    )
    reasoning_parser: str = Field(
        "auto",
        min_length=1,
        description="what finds the reasoning in answers: one of SGLang's reasoning parsers, 'auto' (by the model's "
        "chat template) or 'none' (reasoning stays in the text)",
    )
    gpu: str = Field(
        AUTO, description="GPU that plans assume: a preset, a calibration's .json file, or 'auto': that of this machine"
    )
    scheduling: Literal["dual-scan", "sglang"] = Field(
        "dual-scan", description="what admits requests to the engine: batchweave's dual scan or SGLang's policy"
    )
    overlap: Literal["none", "mixed", "nano", "pdmux"] | None = Field(
        None, description="how prefill and decode share the GPU; default: as calibrated, or mixed chunks on a GPU"
    )
    slo_file: Path | None = Field(
        None,
        description="what online requests must get beside batches, and the limits of steps: written by profile-slo",
    )
    emulated_device: Literal["no answer is real"] | None = Field(
        None, description="load tests only: no model runs; BATCHWEAVE_GPU's cost model sets how long steps take"
    )
    worker_name: str = Field(
        default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}",
        description="name of this worker in lists and logs; default: host and process id",
    )

    notice_command: str | None = Field(
        None,
        description="command that a worker runs every 5 s; once it exits with 0, this machine is about to be taken "
        "away, and the worker stops as by SIGTERM",
    )
    # LeaderWorkerSet, Slurm's srun (one task a machine) and SkyPilot set variables of their own, which count where ours
    # are not set.
    nodes: int = Field(
        1,
        ge=1,
        le=256,
        validation_alias=AliasChoices(
            "BATCHWEAVE_NODES", "LWS_GROUP_SIZE", "SLURM_STEP_NUM_NODES", "SKYPILOT_NUM_NODES"
        ),
        description="machines that run one engine together; default: what LeaderWorkerSet, srun or SkyPilot says, else "
        "1; set 1 to give each machine an engine of its own",
    )
    node_rank: int = Field(
        0,
        ge=0,
        validation_alias=AliasChoices("BATCHWEAVE_NODE_RANK", "LWS_WORKER_INDEX", "SLURM_NODEID", "SKYPILOT_NODE_RANK"),
        description="number of this machine among `nodes`, from 0; machine 0 leads",
    )
    leader: str | None = Field(
        None,
        validation_alias=AliasChoices(
            "BATCHWEAVE_LEADER", "LWS_LEADER_ADDRESS", "SLURM_STEP_NODELIST", "SKYPILOT_NODE_IPS"
        ),
        description="address of machine 0 as the others reach it, host or host:port (default port 20000), or a list "
        "that begins with it",
    )

    online_host: str | None = Field(
        None,
        description="a worker's own address, on which it takes online requests and which the API must reach; "
        "default: it takes none (`up`: loopback)",
    )
    online_port: int = Field(0, ge=0, le=65535, description="a worker's port for online requests; 0 takes a free one")
    metrics_host: str = Field("127.0.0.1", description="address on which planner and worker serve /metrics")
    metrics_port: Annotated[int, Field(ge=1, le=65534)] | None = Field(
        None,
        description="port on which planner and worker serve /metrics (`up`: planner on the next one); default: none",
    )
    steps_file: Path | None = Field(None, description="file in which the engine records each step, for a calibration")

    worker_hour_price: float | None = Field(
        None,
        ge=0,
        description="price of one worker with all its GPUs per hour, in your currency; for the cost of batches",
    )
    otlp_endpoint: str | None = Field(
        None,
        validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT",
        description="OpenTelemetry collector that receives traces over HTTP; default: no traces",
    )

    secret_key: str | None = Field(
        None,
        min_length=16,
        description="encrypts webhook secrets, and shows workers that an online request is the API's; the same for all "
        "roles. Default with SQLite: a file",
    )
    newest_backup: Path | None = Field(
        None,
        description="file that your backup of the database touches when it begins: the planner keeps what batches "
        "that ended since have in object storage, and a day's at least",
    )
    webhook_private: bool = Field(False, description="allow webhooks to private addresses and without TLS")

    shared_cache: bool = Field(
        False,
        description="whether projects find each other's prefixes in the KV cache, for projects that trust each other; "
        "the same for all roles",
    )
    unserved: Literal["wait", "refuse"] = Field(
        "wait",
        description="whether the planner lets a batch wait or refuses it if no worker serves its model or starts to",
    )
    max_batches: int = Field(1000, ge=1, description="most unfinished batches of a project without its own quota")
    max_files: int = Field(100_000, ge=1, description="files of a project, results too, above which it uploads no more")
    allow_patterns: bool = Field(
        False,
        description="allow requests to use stop_regex, regex and ebnf, with which one can stall the engine for all",
    )
    step_limit_s: float = Field(
        60.0, gt=0, description="seconds without a finished step before a busy engine counts as hung and is restarted"
    )
    lease_s: float = Field(
        30.0, gt=0, le=3600, description="seconds after which a silent worker's slices go to other workers"
    )
    sglang: str | None = Field(
        None, description="version of SGLang that the engine may be started with although it was not tested"
    )
    slice_requests: int = Field(
        256,
        ge=1,
        le=100_000,
        description="most requests of a slice; the planner cuts smaller ones where several workers share a window",
    )
    window_requests: int = Field(100_000, ge=1, description="most requests that are planned together")
    window_wait_s: float = Field(
        30.0, ge=0, description="most seconds that requests wait to be planned with others while engines have work"
    )
    window_tokens: int = Field(100_000_000, ge=1, description="most prompt tokens that are planned together")
    request_attempts: int = Field(3, ge=1, le=20, description="attempts at a request on which the engine fails")
    poll_s: float = Field(0.25, gt=0, description="seconds between two looks for work while Redis is unavailable")
    flush_s: float = Field(0.5, gt=0, description="seconds between two writes of a slice's answers")

    max_file_bytes: int = Field(200 * 1024 * 1024, ge=1, description="largest input file, unpacked")
    max_lines: int = Field(50_000, ge=1, description="most requests in an input file")
    max_line_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="longest line of an input file")

    @cached_property
    def database(self) -> str:
        """The SQLAlchemy URL with the asynchronous driver."""
        url = self.database_url or f"sqlite:///{self.data_dir.resolve() / 'batchweave.db'}"
        for plain, driver in (
            ("sqlite://", "sqlite+aiosqlite://"),
            ("postgresql://", "postgresql+asyncpg://"),
            ("postgres://", "postgresql+asyncpg://"),
        ):
            if url.startswith(plain):
                url = url.replace(plain, driver, 1)
        # libpq's name for what asyncpg calls ssl
        return url.replace("?sslmode=", "?ssl=").replace("&sslmode=", "&ssl=") if "+asyncpg" in url else url

    @cached_property
    def needs_keys(self) -> bool:
        """Whether the API requires keys."""
        return self.auth == "keys" or not is_loopback(self.host)

    @cached_property
    def storage(self) -> str:
        return self.storage_url or (self.data_dir / "objects").resolve().as_uri()

    @cached_property
    def redis_socket(self) -> Path:
        """The embedded server's socket, moved if data_dir is deep: a Unix socket's path holds about 100 bytes."""
        beside = self.data_dir.resolve() / "redis" / "redis.sock"
        if len(os.fsencode(beside)) <= 100:
            return beside
        digest = hashlib.sha256(os.fsencode(beside)).hexdigest()[:16]
        # Short on purpose; server_command makes it private or refuses a folder that is another user's.
        return Path(f"/tmp/batchweave-{os.getuid()}-{digest}") / "redis.sock"  # noqa: S108

    @cached_property
    def redis(self) -> str:
        return self.redis_url or f"unix://{self.redis_socket}"

    @cached_property
    def own_model(self) -> str | None:
        """Which of the project's own models it is, if any. Scripted answers need a tokenizer, and no weights."""
        if self.model == DEMO_MODEL and self.engine == "scripted":
            return TINY_MODEL
        return self.model if self.model in (DEMO_MODEL, TINY_MODEL) else None

    @cached_property
    def served_model(self) -> str:
        """The name that requests use for the model."""
        if self.model_name:
            return self.model_name
        if self.own_model is not None:
            return DEMO_NAME
        return Path(self.model).resolve().name if Path(self.model).exists() else self.model

    @cached_property
    def folder_digest(self) -> str:
        """What tells the API of this data folder from others, and says nothing else."""
        return hashlib.sha256(os.fsencode(self.data_dir.resolve())).hexdigest()[:16]

    @cached_property
    def replica(self) -> int:
        """The number of accelerators of one replica of the model."""
        return int(self.engine_args.get("tp_size", 1)) * int(self.engine_args.get("pp_size", 1))

    @cached_property
    def model_source(self) -> str:
        """The local path or hub id of the model's files."""
        if self.own_model is not None:
            return str((self.data_dir / f"{self.own_model}-model").resolve())
        return source_of(self.model)

    @cached_property
    def served_models(self) -> list[str]:
        """The names that requests use for the model and for each of its adapters."""
        return [str(ModelName(self.served_model, each)) for each in (None, *self.adapters)]


def source_of(given: str) -> str:
    """Return a folder's whole path, and a hub id as it is."""
    return str(Path(given).resolve()) if Path(given).exists() else given


def variable(field: str) -> str:
    """Return the environment variable of a setting; a name that is not a setting is returned as it is."""
    about = Settings.model_fields.get(field)
    alias = about.validation_alias if about else field
    return alias if isinstance(alias, str) else f"BATCHWEAVE_{field.upper()}"


def visible_gpus() -> str | None:
    """Return CUDA's list of the GPUs that this process may use; None if nobody set one."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_everywhere(host: str) -> bool:
    """Return whether a host means all addresses of the machine, by which nobody else can reach it."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return not host


def check_names() -> None:
    """Check the BATCHWEAVE_ variables. Raises SettingsError for an unknown one, and suggests the nearest name."""
    known = {variable(name) for name in Settings.model_fields} | NOT_SETTINGS
    for name in sorted(os.environ):
        if name.startswith("BATCHWEAVE_") and name not in known:
            nearest = get_close_matches(name, known, 1)
            raise SettingsError(f"{name} is not a setting" + (f": did you mean {nearest[0]}?" if nearest else "."))


# Arguments of SGLang's that have settings.
OWN_ARGUMENTS = {
    "lora_paths": "BATCHWEAVE_ADAPTERS",
    "reasoning_parser": "BATCHWEAVE_REASONING_PARSER",
    "tool_call_parser": "BATCHWEAVE_TOOL_PARSER",
}
# SGLang's caches and their stores that know pages by their tokens alone.
CACHES = ("hicache_storage_backend", "enable_lmcache", "enable_flexkv", "radix_cache_backend")


def _check_model(settings: Settings) -> None:
    """Check how requests name the model and its adapters. Raises SettingsError."""
    if ADAPTER in settings.served_model:
        message = f"requests cannot name a model {settings.served_model!r}: what follows a colon names an adapter"
        raise SettingsError(f"BATCHWEAVE_MODEL_NAME: {message}. Give the model another name.")
    if settings.script is not None and settings.engine != "scripted":
        raise SettingsError(
            "BATCHWEAVE_SCRIPT is for a scripted engine: set BATCHWEAVE_ENGINE=scripted (--engine scripted) too."
        )
    if settings.engine == "scripted" and (settings.nodes > 1 or settings.emulated_device is not None):
        raise SettingsError(
            "BATCHWEAVE_ENGINE: a scripted engine has one machine and no device; unset BATCHWEAVE_NODES and "
            "BATCHWEAVE_EMULATED_DEVICE."
        )
    for name, instead in OWN_ARGUMENTS.items():
        if name in settings.engine_args:
            raise SettingsError(f"BATCHWEAVE_ENGINE_ARGS: {name} is not for here; set {instead} instead.")
    others = [name for name in CACHES if settings.engine_args.get(name)]
    if others and (settings.adapters or not settings.shared_cache):
        raise SettingsError(
            f"BATCHWEAVE_ENGINE_ARGS: the cache of {others[0]} tells neither projects nor adapters apart. Unset it, or "
            "set BATCHWEAVE_SHARED_CACHE=true and no adapters."
        )


def load_settings(**overrides: Any) -> Settings:
    """Read the settings; arguments that are not None override the environment. Raises SettingsError."""
    check_names()
    try:
        given = {key: value for key, value in overrides.items() if value is not None}
        # Of objects, pydantic adds what the environment says to what is given.
        settings = Settings(**given).model_copy(update={k: v for k, v in given.items() if isinstance(v, dict)})
        if settings.auth == "none" and not is_loopback(settings.host):
            message = (
                f"BATCHWEAVE_AUTH: 'none' is only for loopback; anyone who reaches {settings.host} could use the API"
            )
            raise SettingsError(f"{message}. Unset it, and create a key: batchweave keys create")
        if settings.online_host is not None and is_everywhere(settings.online_host):
            raise SettingsError("BATCHWEAVE_ONLINE_HOST: name the one address by which the API reaches this worker")
        _check_model(settings)
        return settings
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        got = "" if name == "secret_key" else f" (got {first.get('input')!r})"  # the message goes into logs
        raise SettingsError(f"{variable(name)}: {first['msg']}{got}") from error
    except PydanticSettingsError as error:  # its message names the field in quotes
        name = str(error).split('"')[1].upper()
        raise SettingsError(f"BATCHWEAVE_{name} is not valid JSON") from error
