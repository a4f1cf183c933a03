"""Reads fleet.yaml: which models a fleet may serve, on how many GPUs, and when it starts and ends engines."""

import hashlib
import json
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from service.endpoints import ADAPTER
from service.errors import StartError
from service.estimates.engine_arguments import argument_fault
from service.settings import NOT_SETTINGS, OWN_ARGUMENTS, AdapterName, Settings, variable

MOST_BYTES = 1 << 20
MOST_MODELS = 64
MOST_ENGINES = 512
MOST_ARGS = 1 << 16  # characters of an entry's engine_args
# What the fleet itself tells each worker, and what must be the same for all.
OURS = frozenset(
    f"BATCHWEAVE_{name}"
    for name in (
        *("MODEL", "MODEL_NAME", "ADAPTERS", "ENGINE_ARGS", "WORKER_NAME"),
        *("NODES", "NODE_RANK", "LEADER", "ONLINE_HOST"),
        *("DATABASE_URL", "REDIS_URL", "STORAGE_URL", "DATA_DIR"),
    )
)
_SHAPE = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), allow_inf_nan=False)
Text = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\x00-\x1f\x7f]+$")]
Seconds = Annotated[float, Field(ge=0, le=30 * 24 * 3600)]


class ModelSpec(BaseModel):
    """Describes a model, and the engines that may serve it."""

    model_config = _SHAPE

    name: Annotated[Text, Field(description="name that requests use")]
    model: Text | None = Field(None, description="hub id, or a path on every machine; default: the name")
    gpus: int = Field(1, ge=1, le=64, strict=True, description="GPUs of an engine on each of its machines")
    nodes: int = Field(1, ge=1, le=256, strict=True, description="machines that run one engine together")
    min: int = Field(0, ge=0, le=MOST_ENGINES, strict=True, description="engines that are kept without work")
    max: int = Field(1, ge=1, le=MOST_ENGINES, strict=True, description="most engines")
    adapters: dict[AdapterName, Text] = Field(
        default_factory=dict, description="LoRA adapters by name: folders on every machine, or hub ids"
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict, description="SGLang's server arguments; default tp_size: all GPUs of the engine"
    )
    settings: dict[Text, Text] = Field(default_factory=dict, description="variables of this model's workers")
    start_s: float = Field(120.0, gt=0, le=7200, description="seconds that an engine takes to start, until measured")

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if ADAPTER in self.name:
            raise ValueError("name: must have no colon; what follows one names an adapter")
        if "lora_paths" in self.engine_args:
            raise ValueError("engine_args.lora_paths: list the adapters under adapters")
        if others := sorted(OWN_ARGUMENTS.keys() & self.engine_args.keys()):
            raise ValueError(f"engine_args.{others[0]}: set {OWN_ARGUMENTS[others[0]]} under settings")
        if wrong := argument_fault(self.engine_args):
            raise ValueError(f"engine_args: {wrong}")
        return self

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) is more than max ({self.max})")
        known = {variable(each) for each in Settings.model_fields} | NOT_SETTINGS
        for name in self.settings:
            if name in OURS:
                raise ValueError(f"settings.{name}: the fleet sets it itself, or it must be the same for all workers")
            if name.startswith("BATCHWEAVE_") and name not in known:
                raise ValueError(f"settings.{name}: there is no such setting")
        args = self.all_args
        # With attention in data-parallel ranks these are a part of the tensor-parallel ones.
        ranks = 1 if args.get("enable_dp_attention") else args.get("dp_size", 1)
        told = args.get("tp_size", 1) * args.get("pp_size", 1) * ranks
        if told != self.all_gpus:
            raise ValueError(
                f"engine_args: tp_size x pp_size x dp_size is {told}, but the engine has {self.all_gpus} GPUs (gpus x "
                "nodes)"
            )
        try:
            text = json.dumps(args)
        except (TypeError, ValueError) as error:
            raise ValueError(f"engine_args: {error}") from error
        if len(text) > MOST_ARGS:
            raise ValueError(f"engine_args: longer than {MOST_ARGS} characters as JSON")
        return self

    @property
    def all_gpus(self) -> int:
        """The GPUs of one engine on all its machines."""
        return self.gpus * self.nodes

    @property
    def all_args(self) -> dict[str, Any]:
        """The engine's arguments, with those that follow from its GPUs."""
        if self.all_gpus == 1 or "tp_size" in self.engine_args:
            return self.engine_args
        ranks = 1 if self.engine_args.get("enable_dp_attention") else self.engine_args.get("dp_size", 1)
        rest = self.all_gpus // (self.engine_args.get("pp_size", 1) * ranks)
        return {"tp_size": max(1, rest), **self.engine_args}

    @cached_property
    def slug(self) -> str:
        """What workers' names begin with: the name, shortened, with only letters, digits, dots and dashes."""
        return re.sub(r"[^A-Za-z0-9.]+", "-", self.name).strip("-")[:200] or "model"

    @property
    def variables(self) -> dict[str, str]:
        """The variables of each worker of this model, apart from those that tell its engines and machines apart."""
        return {
            **self.settings,
            "BATCHWEAVE_MODEL": self.model or self.name,
            "BATCHWEAVE_MODEL_NAME": self.name,
            **({"BATCHWEAVE_ADAPTERS": json.dumps(self.adapters)} if self.adapters else {}),
            "BATCHWEAVE_ENGINE_ARGS": json.dumps(self.all_args),
        }


class FleetSpec(BaseModel):
    """Holds a whole fleet.yaml."""

    model_config = _SHAPE

    models: list[ModelSpec] = Field(min_length=1, max_length=MOST_MODELS)
    seconds_per_engine: float = Field(
        3600.0,
        ge=1e-6,
        le=30 * 24 * 3600,
        description="seconds of one engine's work for which one more engine is started",
    )
    idle_s: Seconds = Field(120.0, description="seconds without work after which an engine ends")
    switch_s: Seconds = Field(
        1800.0, description="seconds that a busy engine keeps its GPUs, whatever another model needs"
    )
    drain_s: Seconds = Field(
        60.0, description="seconds that an engine has to finish what it runs before the rest is given back"
    )
    online: bool = Field(False, description="whether the workers answer online requests too, each on its own address")

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [each.name for each in self.models]
        twice = next((each for each in names if names.count(each) > 1), None)
        if twice is not None:
            raise ValueError(f"models: two have the name {twice!r}")
        return self

    def digest(self, model: ModelSpec) -> str:
        """Return what changes with all that decides how the model's engines start."""
        about = [model.gpus, model.nodes, model.variables, self.online]
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]

    @property
    def by_name(self) -> dict[str, ModelSpec]:
        return {each.name: each for each in self.models}


class _Loader(yaml.SafeLoader):
    """Reads YAML without aliases, which could stand for more than memory holds."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not supported", problem_mark=self.peek_event().start_mark)
        return super().compose_node(parent, index)


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
        found = yaml.load(data, _Loader)  # noqa: S506 - it is a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
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
