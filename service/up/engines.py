"""Divides the GPUs of a machine among the engines that `up` runs on it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from service.errors import StartError
from service.estimates.gpus import ASK_S, GPU_NAME, Gpu, machine_gpus, split_names
from service.settings import Settings

MOST_ENGINES = 64
NO_GPUS = "none"
# Of a GPU's memory: what is left is for the KV cache, activations and CUDA itself.
WEIGHTS_SHARE = 0.75
GB = 1e9
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine to run. `gpus`: those that it sees; None leaves to it what it finds. `model`: its place in `models`."""

    number: int
    gpus: tuple[str, ...] | None = None
    model: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A model to serve, as its settings name it. `changes`: of SGLang's arguments, so that its engines have room."""

    settings: Settings
    changes: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def engine_args(self) -> dict[str, Any]:
        return self.settings.engine_args | self.changes

    @property
    def replica(self) -> int:
        """The number of GPUs of an engine."""
        return int(self.engine_args.get("tp_size", 1)) * int(self.engine_args.get("pp_size", 1))


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines of a machine, by model. `said`: lines for the person."""

    models: tuple[Model, ...]
    engines: tuple[Engine, ...] = (Engine(0),)
    said: tuple[str, ...] = ()


def weight_bytes(source: str) -> int | None:
    """Return the size of a model's weights on disk or on the hub; None if nothing says it."""
    folder = Path(source)
    if not folder.is_dir():
        from huggingface_hub import HfApi, snapshot_download

        try:
            folder = Path(snapshot_download(source, local_files_only=True, allow_patterns=["*.json"]))
        except Exception:  # it is not there yet; the client raises errors of its own and of its HTTP library
            try:
                files = HfApi().model_info(source, files_metadata=True, timeout=ASK_S).siblings or []
            except Exception as error:
                log.warning("the hub does not say how large the model is", model=source, error=repr(error))
                return None
            return sum(each.size or 0 for each in files if each.rfilename.endswith(".safetensors")) or None
    index = folder / "model.safetensors.index.json"
    try:
        if index.exists():
            return int(json.loads(index.read_bytes())["metadata"]["total_size"]) or None
        return sum(each.stat().st_size for each in folder.glob("*.safetensors")) or None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("the size of the weights cannot be read", model=source, error=repr(error))
        return None


def engines_of(
    models: Sequence[Settings],
    gpus: str | None = None,
    engines: int | None = None,
    there: Callable[[], list[Gpu]] = machine_gpus,
    weights: Callable[[str], int | None] = weight_bytes,
) -> Engines:
    """Return one engine for each GPU, or group of GPUs that holds its model. Raises StartError.

    Several models take turns. `gpus`: those to use, "0,1" or "none"; None for all. `engines`: how many to run of each
    model; None for as many as fit.
    """
    first = models[0]
    plain = tuple(Model(each) for each in models)
    if engines is not None and not 1 <= engines <= MOST_ENGINES // len(models):
        raise StartError(f"--engines {engines}: give a number from 1 to {MOST_ENGINES // len(models)}.")
    without = first.engine != "sglang" or first.emulated_device is not None or gpus == NO_GPUS
    usable = [] if without else _chosen(gpus, there())
    if not usable:
        hidden = () if gpus == NO_GPUS else None
        places = (model for model in range(len(models)) for _ in range(engines or 1))
        return Engines(plain, tuple(Engine(number, hidden, model) for number, model in enumerate(places)))
    args = first.engine_args
    if "base_gpu_id" in args or int(args.get("dp_size", 1)) > 1:  # who sets these says which GPUs SGLang takes
        if (engines or 1) * len(models) > 1:
            raise StartError("base_gpu_id and dp_size in BATCHWEAVE_ENGINE_ARGS are for one engine of one model alone.")
        return Engines(plain, (Engine(0, tuple(each.name for each in usable)),))
    sized, said = list[Model](), list[str]()
    for settings in models:
        size, why = 1, ""
        if not {"tp_size", "pp_size"} & args.keys() and len(usable) > 1:
            size, why = _fewest(settings, usable, weights)
        sized.append(Model(settings, {"tp_size": size} if size > 1 else {}))
        said += [why] if size > 1 else []
    counts = _dealt([each.replica for each in sized], len(usable), engines)
    names = [each.name for each in usable]
    # The largest first: then each lies where a power of two begins, as links between neighbours do.
    groups: dict[int, list[tuple[str, ...]]] = {}
    taken = 0
    for model in sorted(range(len(sized)), key=lambda model: -sized[model].replica):
        size = sized[model].replica
        begins = range(taken, taken + counts[model] * size, size)
        groups[model] = [tuple(names[begin : begin + size]) for begin in begins]
        taken += counts[model] * size
    if taken < len(names):
        said.append(f"GPUs {', '.join(names[taken:])} stay free")
    places = ((model, group) for model in range(len(sized)) for group in groups[model])
    found = tuple(Engine(number, group, model) for number, (model, group) in enumerate(places))
    return Engines(tuple(sized), found, tuple(said))


def _dealt(sizes: Sequence[int], there: int, engines: int | None) -> list[int]:
    """Return how many engines each model gets, of so many GPUs each; they take turns. Raises StartError."""
    if len(sizes) == 1 and sizes[0] > there:
        raise StartError(f"An engine takes {sizes[0]} GPUs (tp_size x pp_size), and there are {there}.")
    least = (engines or 1) * sum(sizes)
    if least > there:
        asked = f"--engines {engines}" if engines is not None else f"{len(sizes)} models"
        less = "Run fewer" if engines is not None else "Serve fewer, smaller or quantized ones"
        raise StartError(f"{asked}: they take {least} GPUs, and there are {there}. {less}, or use more machines.")
    counts = [engines or 1] * len(sizes)
    left, fits = there - least, engines is None
    while fits:
        fits = False
        for model, size in enumerate(sizes):
            if size <= left:
                counts[model], left, fits = counts[model] + 1, left - size, True
    return counts


def _chosen(gpus: str | None, there: list[Gpu]) -> list[Gpu]:
    if gpus is None:
        return there
    names = split_names(gpus)
    wrong = next((each for each in names if not GPU_NAME.fullmatch(each)), None)
    if wrong is not None or not names:
        raise StartError(f"--gpus {gpus}: give numbers such as 0,1,2,3, or 'none'.")
    if len(set(names)) < len(names):
        raise StartError(f"--gpus {gpus}: a GPU is named twice.")
    by_name = {each.name: each for each in there}
    for name in names:
        if name.isdigit() and name not in by_name:
            known = ", ".join(by_name) or "no GPU that nvidia-smi sees"
            raise StartError(f"--gpus {gpus}: there is no GPU {name}; this machine has {known}.")
    return [by_name.get(name, Gpu(name)) for name in names]


def _fewest(settings: Settings, usable: Sequence[Gpu], weights: Callable[[str], int | None]) -> tuple[int, str]:
    """Return how many GPUs hold the model, a power of two, and the arithmetic in words."""
    memory = min((each.memory_bytes for each in usable if each.memory_bytes), default=None)
    size = None if memory is None or settings.own_model is not None else weights(settings.model_source)
    if memory is None or size is None:
        return 1, ""
    parts = 1
    while size / parts > WEIGHTS_SHARE * memory:
        parts *= 2
    has = f"{settings.served_model} has {size / GB:.0f} GB of weights, and a GPU {memory / GB:.0f} GB"
    if parts > len(usable):
        larger = max(each.memory_bytes or 0 for each in usable) > memory
        has += " (the smallest; --gpus names the larger ones)" if larger else ""
        raise StartError(
            f"{has}: it takes {parts} GPUs, and there are {len(usable)}. Choose a smaller or quantized model, several "
            "machines (docs/operate.md), or set tp_size in BATCHWEAVE_ENGINE_ARGS."
        )
    return parts, f"{has}: each engine takes {parts} GPUs (tp_size {parts})"
