"""Builds the cost model of a model on a machine from their names or files."""

import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import structlog
from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache

from engine_ext.costs import hardware, model_shape
from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Hardware, Machine
from engine_ext.costs.model_shape import ModelShape
from engine_ext.errors import ConfigError, HardwareError
from service.db.models import STAND_IN
from service.errors import CostsError
from service.estimates.gpus import ASK_S, machine_gpus
from service.settings import AUTO, Settings

OVERLAPS = ("none", "mixed", "nano", "pdmux")  # those of engine_ext.plugin.options, which need not be installed
FALLBACK, FALLBACK_GPU = "llama-3-8b", "h200"
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
log = structlog.get_logger()


@lru_cache(maxsize=1)  # planners ask at each plan
def machine_gpu() -> str | None:
    """Return how the driver names the first GPU that this process may use; None without one."""
    return next((each.product for each in machine_gpus()), None)


def assumed_gpu(settings: Settings) -> str:
    """Return the GPU that plans assume, as a preset or a calibration's .json file: by default that of this machine.

    Where it has none, or one that no preset describes, it is FALLBACK_GPU.
    """
    return _described_gpu(settings) or FALLBACK_GPU


def _described_gpu(settings: Settings) -> str | None:
    """Return the GPU that the settings name, or the preset of this machine's; None if none describes it."""
    if settings.gpu != AUTO:
        return settings.gpu
    name = machine_gpu()
    return hardware.preset_of(name) if name else None


def told_machine(settings: Settings) -> dict[str, Any]:
    """Return what a planner on another machine must know to plan for this worker's machine. Raises CostsError.

    STAND_IN says that no cost model describes the machine, such as a CPU: its plans are good, their seconds are not.
    """
    described_gpu = _described_gpu(settings)
    gpu: Any = described_gpu or FALLBACK_GPU
    if gpu.endswith(".json"):
        described = _json(Path(gpu))
        fields = ("name", "flops", "bandwidth", "memory_bytes", *hardware.MEASURED)
        gpu = {field: described[field] for field in fields if field in described}
    is_real = settings.engine == "sglang" and (settings.emulated_device is not None or described_gpu is not None)
    return {"gpu": gpu, "tp": settings.replica, **({} if is_real else {STAND_IN: True})}


def read_hardware(name: str | dict[str, Any]) -> Hardware:
    """Read the hardware from a preset, a calibration's .json file or what is in one. Raises CostsError."""
    try:
        if isinstance(name, dict):
            return hardware.hardware_of(name)
        if name.endswith(".json"):
            return hardware.hardware_of(_json(Path(name)))
        return hardware.hardware(name)
    except (HardwareError, hardware.UnknownHardware) as error:
        where = f"{name}: " if isinstance(name, str) and name.endswith(".json") else ""
        hint = "" if where else ", or a calibration's .json file"
        raise CostsError(f"{where}{error}{hint}") from error


def measured_overlap(gpu: str, source: str | None = None) -> str | None:
    """Return the fastest way to overlap prefill and decodes if `gpu` is a calibration that compared them, else None.

    Returns None also if the calibration used a model other than `source`, for which another way may be the fastest.
    """
    if not gpu.endswith(".json"):
        return None
    described = _json(Path(gpu))
    compared, calibration = described.get("overlap"), described.get("calibration")
    if compared is None:
        return None
    measured_with = calibration.get("model") if isinstance(calibration, dict) else None
    if source is not None and measured_with != source:
        log.warning("ignoring an overlap comparison made with another model", measured_with=measured_with, model=source)
        return None
    fastest = compared.get("fastest") if isinstance(compared, dict) else None
    if fastest not in OVERLAPS:
        raise CostsError(f"{gpu}: 'overlap.fastest' must be one of {', '.join(OVERLAPS)}, not {fastest!r:.40}")
    return fastest


def read_shape(source: str) -> ModelShape:
    """Read a model's shape from a preset, a config.json, a model's folder or a hub id. Raises CostsError."""
    if source in model_shape.PRESETS:
        return model_shape.PRESETS[source]
    path = Path(source)
    if not source or not path.exists():
        if source.startswith((".", "/")):
            raise CostsError(f"{source}: no such file or folder")
        if "/" not in source:
            raise CostsError(f"no model {source!r}: use {', '.join(model_shape.PRESETS)}, a folder, or a hub id")
        try:
            path = Path(snapshot_download(source, allow_patterns=["config.json"]))
        except Exception as error:  # the hub client raises its own errors and those of its HTTP library
            raise CostsError(f"cannot fetch the config of {source!r} from the hub: {error}") from error
    config = path / "config.json" if path.is_dir() else path
    try:
        return model_shape.shape_of(_json(config), name=path.name if Path(source).exists() else source)
    except ConfigError as error:
        raise CostsError(f"{config}: {error}") from error


def context_length_of(settings: Settings) -> int | None:
    """Return the context length from the engine's arguments or the model's config, in tokens; None if unknown.

    It covers a prompt and its answer together. What a worker's engine reports later takes precedence.
    """
    given = settings.engine_args.get("context_length")
    if isinstance(given, int):
        return given
    folder = Path(settings.model_source)
    try:
        config = _json(folder / "config.json") if folder.is_dir() else {}
    except CostsError:
        return None
    config = config.get("text_config", config)
    scaling = config.get("rope_scaling") or {}
    # As SGLang does: some models state the length with the scaling already applied.
    is_scaled = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    factor = 1.0 if is_scaled else float(scaling.get("factor", 1.0))
    found = next((config[name] for name in LENGTHS if isinstance(config.get(name), int)), None)
    return int(found * factor) if found is not None else None


def check_model(settings: Settings) -> None:
    """Check that the model can be found. Raises CostsError, which says what was looked for and where."""
    if settings.own_model is not None:
        return
    given, folder = settings.model, Path(settings.model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise CostsError(f"--model {given}: {folder.resolve()} has no config.json, so it is not a model folder")
        return
    if folder.exists():
        raise CostsError(f"--model {given}: this is a file; name the model's folder instead")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", given):
        raise CostsError(f"--model {given}: there is no folder {folder.absolute()}, and this is not a hub id either")
    if isinstance(try_to_load_from_cache(given, "config.json"), str):
        return
    try:
        files = HfApi().model_info(given, timeout=ASK_S).siblings or []  # once: a download would try for a minute
        if all(each.rfilename != "config.json" for each in files):
            raise FileNotFoundError("config.json")
    except Exception as error:  # the hub client raises its own errors and those of its HTTP library
        where = f"there is no folder {folder.absolute()}, and config.json of {given!r} cannot be fetched from the hub"
        raise CostsError(f"--model {given}: {where}: {type(error).__name__}") from error


def planning_costs(source: str, gpu: str | dict[str, Any], tp: int) -> CostModel:
    """Return a model's costs for planning. A model whose config is unusable is planned with the costs of FALLBACK."""
    try:
        shape = read_shape(source)
    except CostsError as error:
        log.warning("model planned with the costs of another", model=source, planned_as=FALLBACK, reason=str(error))
        shape = model_shape.PRESETS[FALLBACK]
    try:
        return CostModel(shape, Machine(read_hardware(gpu), tp=tp))
    except ValueError as error:
        raise CostsError(f"{gpu}: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CostsError(f"{path}: {error}") from error
