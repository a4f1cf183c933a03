"""The one place that reads the environment."""

import hashlib
import ipaddress
import os
import socket
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict
from pydantic_settings import SettingsError as PydanticSettingsError

DEMO_MODEL = "demo"
# Of the command line, and of what a worker hands to its engine.
NOT_SETTINGS = {"BATCHWEAVE_URL", "BATCHWEAVE_API_KEY", "BATCHWEAVE_SCHEDULER"}


class SettingsError(Exception):
    """A setting has a value that the service cannot start with; the message names it."""


class Settings(BaseSettings):
    """Frozen settings, each from the variable BATCHWEAVE_<NAME> if it names no other."""

    model_config = SettingsConfigDict(env_prefix="BATCHWEAVE_", frozen=True, extra="ignore", protected_namespaces=())

    data_dir: Path = Field(Path("batchweave-data"), description="folder of everything embedded, and of the demo model")
    database_url: str | None = Field(None, description="postgresql://… or sqlite:///…; default: SQLite in data_dir")
    database_timeout_s: float = Field(30.0, gt=0, description="after which a database that is silent counts as away")
    redis_url: str | None = Field(None, description="redis://… or unix://…; default: the embedded server's socket")
    storage_url: str | None = Field(None, description="file:///…, s3://…, gs://…, az://…; default: data_dir/objects")

    host: str = Field("127.0.0.1", description="address that the API listens on")
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    connections_per_address: int = Field(
        256, ge=0, description="to the API at once from one address; 0 behind a proxy, which must have a bound itself"
    )
    access_log: bool = Field(True, description="whether the API logs each request: who, what, how it ended")
    auth: Literal["keys", "none"] | None = Field(
        None, description="whether the API asks for keys; default: keys, but none where it listens on loopback alone"
    )

    model: str = Field(DEMO_MODEL, description="'demo', a local path, or a hub id")
    model_name: str | None = Field(None, description="name that requests use; default: the hub id or folder name")
    engine_args: dict[str, Any] = Field(default_factory=dict, description="SGLang server arguments, as JSON")
    gpu: str = Field("h200", description="what the planner plans for: a preset or a calibration's .json file")
    scheduling: Literal["dual-scan", "sglang"] = Field(
        "dual-scan", description="who admits requests to the engine: batchweave's scan, or SGLang's own policy"
    )
    overlap: Literal["none", "mixed", "pdmux"] | None = Field(
        None, description="how prefill and decodes share the GPU; default: as calibrated, or mixed chunks on a GPU"
    )
    emulated_device: Literal["no answer is real"] | None = Field(
        None, description="load tests only: BATCHWEAVE_GPU's costs take the place of the model, at its speed"
    )
    worker_name: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}")

    metrics_host: str = Field("127.0.0.1", description="address of /metrics of planner and worker")
    metrics_port: Annotated[int, Field(ge=1, le=65534)] | None = Field(
        None,
        description="port of /metrics of planner and worker (`up`: the worker; the planner one above); default: none",
    )
    steps_file: Path | None = Field(None, description="where the engine writes what each step did, for a calibration")

    worker_hour_price: float | None = Field(
        None, ge=0, description="what an hour of one worker, all its GPUs, costs in your currency; prices batches"
    )
    otlp_endpoint: str | None = Field(
        None,
        validation_alias="OTEL_EXPORTER_OTLP_ENDPOINT",
        description="OpenTelemetry collector that traces go to, by HTTP; default: none are made",
    )

    secret_key: str | None = Field(
        None, min_length=16, description="seals webhook secrets; the same everywhere. Default with SQLite: a file"
    )
    webhook_private: bool = Field(False, description="let webhooks go to private addresses, and without TLS")

    max_batches: int = Field(1000, ge=1, description="that a project may have at once, unless its quota says otherwise")
    allow_patterns: bool = Field(
        False, description="let requests bring stop_regex, regex and ebnf, by which one line can stop an engine for all"
    )
    step_limit_s: float = Field(
        60.0, gt=0, description="an engine with requests that ends no step for so long hangs, and is started again"
    )
    lease_s: Annotated[float, Field(gt=0, le=3600)] = 30.0
    slice_requests: Annotated[int, Field(ge=1, le=100_000)] = 256
    window_requests: Annotated[int, Field(ge=1)] = 100_000
    window_tokens: Annotated[int, Field(ge=1)] = 100_000_000
    request_attempts: Annotated[int, Field(ge=1, le=20)] = 3
    poll_s: Annotated[float, Field(gt=0)] = 0.25
    flush_s: Annotated[float, Field(gt=0)] = 0.5

    max_file_bytes: Annotated[int, Field(ge=1)] = 200 * 1024 * 1024
    max_lines: Annotated[int, Field(ge=1)] = 50_000
    max_line_bytes: Annotated[int, Field(ge=1024)] = 8 * 1024 * 1024

    @cached_property
    def database(self) -> str:
        """SQLAlchemy URL with the asynchronous driver."""
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
        """Whether callers of the API must show a key."""
        return self.auth == "keys" or not is_loopback(self.host)

    @cached_property
    def storage(self) -> str:
        return self.storage_url or (self.data_dir / "objects").resolve().as_uri()

    @cached_property
    def redis_socket(self) -> Path:
        """Socket of the embedded server; a Unix socket's path holds about 100 bytes, so a deep data_dir moves it."""
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
    def served_model(self) -> str:
        """The name under which requests ask for the model."""
        if self.model_name:
            return self.model_name
        if self.model == DEMO_MODEL:
            return "batchweave-demo"
        return Path(self.model).resolve().name if Path(self.model).exists() else self.model

    @cached_property
    def replica(self) -> int:
        """Accelerators of one replica of the model."""
        return int(self.engine_args.get("tp_size", 1)) * int(self.engine_args.get("pp_size", 1))

    @cached_property
    def model_source(self) -> str:
        """Local path or hub id of the model's files."""
        if self.model == DEMO_MODEL:
            return str((self.data_dir / "demo-model").resolve())
        return str(Path(self.model).resolve()) if Path(self.model).exists() else self.model


def variable(field: str) -> str:
    """The environment's name of a field, or of what stands for one elsewhere."""
    about = Settings.model_fields.get(field)
    alias = about.validation_alias if about else field
    return alias if isinstance(alias, str) else f"BATCHWEAVE_{field.upper()}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def check_names() -> None:
    """Raises SettingsError for a BATCHWEAVE_ variable that does not exist, with the nearest that does."""
    known = {variable(name) for name in Settings.model_fields} | NOT_SETTINGS
    for name in sorted(os.environ):
        if name.startswith("BATCHWEAVE_") and name not in known:
            nearest = get_close_matches(name, known, 1)
            raise SettingsError(f"{name} is no setting" + (f": do you mean {nearest[0]}?" if nearest else "."))


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment; arguments that are not None win. Raises SettingsError that names the variable."""
    check_names()
    try:
        settings = Settings(**{key: value for key, value in overrides.items() if value is not None})
        if settings.auth == "none" and not is_loopback(settings.host):
            message = f"BATCHWEAVE_AUTH: 'none' is for loopback; anyone who reaches {settings.host} could use the API"
            raise SettingsError(f"{message}. Leave it out, and make a key: batchweave keys create")
        return settings
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise SettingsError(f"{variable(str(first['loc'][0]))}: {first['msg']} (got {first.get('input')!r})") from error
    except PydanticSettingsError as error:  # its message names the field in quotes
        name = str(error).split('"')[1].upper()
        raise SettingsError(f"BATCHWEAVE_{name}: is not valid JSON") from error
