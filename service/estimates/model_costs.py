"""The cost model of a model on a machine, from names and files."""

import re
from pathlib import Path
from typing import Any

import msgspec
import structlog
from huggingface_hub import hf_hub_download, snapshot_download

from engine_ext.costs import hardware, model_shape
from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Hardware, HardwareError, Machine
from engine_ext.costs.model_shape import ConfigError, ModelShape
from service.settings import DEMO_MODEL, Settings

OVERLAPS = ("none", "mixed", "pdmux")  # those of engine_ext.plugin.options, which need not be installed
FALLBACK = "llama-3-8b"
LENGTHS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
log = structlog.get_logger()


class CostsError(Exception):
    """The model or the hardware is not known; the message says what there is."""


def read_hardware(name: str) -> Hardware:
    """A preset, or a JSON file of a calibration. Raises CostsError."""
    try:
        if name.endswith(".json"):
            return hardware.hardware_of(_json(Path(name)))
        return hardware.hardware(name)
    except (HardwareError, hardware.UnknownHardware) as error:
        where = f"{name}: " if name.endswith(".json") else ""
        hint = "" if where else ", or a calibration's .json file"
        raise CostsError(f"{where}{error}{hint}") from error


def measured_overlap(gpu: str, source: str | None = None) -> str | None:
    """The fastest way to overlap prefill and decodes, where `gpu` is a calibration that compared them.

    With another model than `source` another may be, so that nothing is said.
    """
    if not gpu.endswith(".json"):
        return None
    described = _json(Path(gpu))
    compared, calibration = described.get("overlap"), described.get("calibration")
    if compared is None:
        return None
    measured_with = calibration.get("model") if isinstance(calibration, dict) else None
    if source is not None and measured_with != source:
        log.warning("the calibration compared overlaps with another model", measured_with=measured_with, model=source)
        return None
    fastest = compared.get("fastest") if isinstance(compared, dict) else None
    if fastest not in OVERLAPS:
        raise CostsError(f"{gpu}: 'overlap.fastest' must be one of {', '.join(OVERLAPS)}, not {fastest!r:.40}")
    return fastest


def read_shape(source: str) -> ModelShape:
    """A preset, a config.json, a model's folder, or a hub id. Raises CostsError."""
    if source in model_shape.PRESETS:
        return model_shape.PRESETS[source]
    path = Path(source)
    if not source or not path.exists():
        if source.startswith((".", "/")):
            raise CostsError(f"{source}: no such file or folder")
        if "/" not in source:
            raise CostsError(f"no model {source!r}: give {', '.join(model_shape.PRESETS)}, a folder, or a hub id")
        try:
            path = Path(snapshot_download(source, allow_patterns=["config.json"]))
        except Exception as error:  # the hub client raises of its own and of its HTTP library
            raise CostsError(f"the config of {source!r} could not be fetched: {error}") from error
    config = path / "config.json" if path.is_dir() else path
    try:
        return model_shape.shape_of(_json(config), name=path.name if Path(source).exists() else source)
    except ConfigError as error:
        raise CostsError(f"{config}: {error}") from error


def context_length_of(settings: Settings) -> int | None:
    """Tokens of a prompt and its answer together, by the engine's arguments or the model's config; None if unknown.

    What a worker's engine says later counts more.
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
    # As SGLang reads it: some models state the length with their scaling already in it.
    is_scaled = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    factor = 1.0 if is_scaled else float(scaling.get("factor", 1.0))
    found = next((config[name] for name in LENGTHS if isinstance(config.get(name), int)), None)
    return int(found * factor) if found is not None else None


def check_model(settings: Settings) -> None:
    """Raises CostsError where nobody could load the model: what was looked for, and where."""
    if settings.model == DEMO_MODEL:
        return
    given, folder = settings.model, Path(settings.model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise CostsError(f"--model {given}: {folder.resolve()} has no config.json, so it is no model's folder")
        return
    if folder.exists():
        raise CostsError(f"--model {given}: a file; name the folder of the model")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", given):
        raise CostsError(f"--model {given}: there is no folder {folder.absolute()}, and it is no id of a hub either")
    try:
        hf_hub_download(given, "config.json")
    except Exception as error:  # the hub client raises of its own and of its HTTP library
        where = f"there is no folder {folder.absolute()}, and config.json of the hub's {given!r} cannot be fetched"
        raise CostsError(f"--model {given}: {where}: {type(error).__name__}") from error


def planning_costs(source: str, gpu: str, tp: int) -> CostModel:
    """Costs for the service, which plans any model: one whose config says too little is planned as another."""
    try:
        shape = read_shape(source)
    except CostsError as error:
        log.warning("model planned as another", model=source, planned_as=FALLBACK, reason=str(error))
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
