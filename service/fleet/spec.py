"""Reads fleet.yaml: which models a fleet may serve, on how many GPUs, and when it starts and ends engines."""

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from service.errors import StartError
from service.settings import NOT_SETTINGS, Settings, variable

MOST_BYTES = 1 << 20
MOST_MODELS = 64
MOST_ENGINES = 512
# What the fleet itself tells each worker.
OURS = frozenset(
    f"BATCHWEAVE_{name}"
    for name in ("MODEL", "MODEL_NAME", "ENGINE_ARGS", "WORKER_NAME", "NODES", "NODE_RANK", "LEADER", "ONLINE_HOST")
)
_SHAPE = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class ModelSpec(BaseModel):
    """A model, and the engines that may serve it."""

    model_config = _SHAPE

    name: Annotated[str, Field(min_length=1, max_length=512, description="name that requests use")]
    model: str | None = Field(None, min_length=1, description="hub id, or a path on every machine; default: the name")
    gpus: int = Field(1, ge=1, le=64, description="GPUs of an engine on each of its machines")
    nodes: int = Field(1, ge=1, le=256, description="machines that run one engine together")
    min: int = Field(0, ge=0, le=MOST_ENGINES, description="engines that are kept without work")
    max: int = Field(1, ge=1, le=MOST_ENGINES, description="most engines")
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="SGLang's server arguments; default tp_size: all GPUs of the engine"
    )
    settings: dict[str, str] = Field(default_factory=dict, description="variables of this model's workers")
    start_s: float = Field(120.0, gt=0, le=7200, description="seconds that an engine takes to start, until measured")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        for name in self.settings:
            known = {variable(each) for each in Settings.model_fields} | NOT_SETTINGS
            if name in OURS:
                raise ValueError(f"settings.{name}: the fleet sets it itself")
            if name.startswith("BATCHWEAVE_") and name not in known:
                raise ValueError(f"settings.{name}: there is no such setting")
        sizes = ("tp_size", "pp_size", "dp_size")
        told = [self.engine_args.get(each, 1) for each in sizes]
        for size, given in zip(sizes, told, strict=True):
            if not isinstance(given, int) or given < 1:
                raise ValueError(f"engine_args.{size}: must be a whole number, 1 or more, not {given!r:.40}")
        if "tp_size" in self.engine_args and told[0] * told[1] * told[2] != self.all_gpus:
            raise ValueError(
                f"engine_args: tp_size x pp_size x dp_size is {told[0] * told[1] * told[2]}, but the engine has "
                f"{self.all_gpus} GPUs (gpus x nodes)"
            )
        return self

    @property
    def all_gpus(self) -> int:
        """The GPUs of one engine on all its machines."""
        return self.gpus * self.nodes

    @cached_property
    def slug(self) -> str:
        """The name with only letters, digits, dots and dashes."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-") or "model"

    @cached_property
    def digest(self) -> str:
        """Changes with all that an engine's start depends on."""
        text = self.model_dump_json(exclude={"min", "max", "start_s"})
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def variables(self) -> dict[str, str]:
        """The variables of each worker of this model, apart from those that tell its engines and machines apart."""
        args = {"tp_size": self.all_gpus, **self.engine_args} if self.all_gpus > 1 else self.engine_args
        return {
            **self.settings,
            "BATCHWEAVE_MODEL": self.model or self.name,
            "BATCHWEAVE_MODEL_NAME": self.name,
            "BATCHWEAVE_ENGINE_ARGS": json.dumps(args),
        }


class FleetSpec(BaseModel):
    """A whole fleet.yaml."""

    model_config = _SHAPE

    models: list[ModelSpec] = Field(min_length=1, max_length=MOST_MODELS)
    seconds_per_engine: float = Field(
        3600.0, gt=0, description="seconds of one engine's work for which one more engine is started"
    )
    idle_s: float = Field(120.0, ge=0, description="seconds without work after which an engine ends")
    switch_s: float = Field(
        600.0, ge=0, description="seconds that a busy engine keeps its GPUs, whatever another model needs"
    )
    drain_s: float = Field(
        60.0, ge=0, description="seconds that an engine has to finish what it runs before the rest is given back"
    )
    online: bool = Field(False, description="whether the workers answer online requests too, each on its own address")

    @model_validator(mode="after")
    def _check(self) -> Self:
        for what, values in (
            ("name", [each.name for each in self.models]),
            ("name without special characters", [each.slug for each in self.models]),
        ):
            twice = next((each for each in values if values.count(each) > 1), None)
            if twice is not None:
                raise ValueError(f"models: two have the {what} {twice!r}")
        return self

    @property
    def by_name(self) -> dict[str, ModelSpec]:
        return {each.name: each for each in self.models}


def read_fleet(path: Path) -> FleetSpec:
    """Read a fleet.yaml. Raises StartError, which names the line or field."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise StartError(f"{path}: {error.strerror}") from error
    if len(data) > MOST_BYTES:
        raise StartError(f"{path} is larger than {MOST_BYTES >> 20} MiB, so it cannot be a fleet's file.")
    try:
        found = yaml.safe_load(data)
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}" if where is not None else ""
        raise StartError(f"{path}{line}: {getattr(error, 'problem', None) or 'not YAML'}") from error
    if not isinstance(found, dict):
        raise StartError(f"{path}: the file must have `models:`, a list; docs/fleet.md has an example.")
    try:
        return FleetSpec.model_validate(found)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(each) for each in first["loc"])
        raise StartError(
            f"{path}: {where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}"
        ) from error
