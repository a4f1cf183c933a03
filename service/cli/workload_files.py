"""What the commands share that read workload files: their options, the files, and the cost model."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import PRESETS as GPUS
from engine_ext.costs.hardware import Machine
from engine_ext.costs.model_shape import PRESETS as MODELS
from service.errors import WorkloadError
from service.estimates.model_costs import read_hardware, read_shape
from service.requests.tokens import PromptTokens
from service.workloads.workload import Workload, read_lengths, read_workload

console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
SMALL = 0.1  # of the whole time; with a longer longest answer, a file is too small to tell anything
PICTURES = (".png", ".svg", ".pdf")

ModelOption = Annotated[
    str, typer.Option("--model", help=f"{', '.join(MODELS)}, a config.json, a model's folder, or a hub id.")
]
GpuOption = Annotated[str, typer.Option("--gpu", help=f"{', '.join(GPUS)}, or a calibration's .json file.")]
TpOption = Annotated[int, typer.Option("--tp", min=1, max=1024, help="GPUs that share one copy of the model.")]
LengthsOption = Annotated[
    Path | None,
    typer.Option(
        "--lengths", help="File of true output lengths: lines with id and output_tokens, or a batch's output file."
    ),
]
SharedCacheOption = Annotated[
    bool, typer.Option("--shared-cache", help="Let tenants find each other's prefixes, as BATCHWEAVE_SHARED_CACHE.")
]
DtypeOption = Annotated[str, typer.Option("--dtype", help="Type of the weights: fp16, bf16, fp8.")]


def cost_model(model: str, gpu: str, tp: int, dtype: str, kv_dtype: str) -> CostModel:
    """Return the cost model of a model on a machine. Raises CostsError, InputError."""
    cost = CostModel(read_shape(model), Machine(read_hardware(gpu), tp=tp), dtype, kv_dtype)
    cost.kv_capacity_tokens()
    return cost


def check_paths(inputs: Sequence[Path | None], outputs: Sequence[Path | None], plot: Path | None) -> None:
    """Refuse to write to an input file or to a folder that does not exist. Raises WorkloadError."""
    if plot is not None and plot.suffix not in PICTURES:
        raise WorkloadError(f"{plot}: the picture's name must end in one of {', '.join(PICTURES)}")
    read = {each.resolve() for each in inputs if each is not None}
    for path in (*outputs, plot):
        if path is not None and path.resolve() in read:
            raise WorkloadError(f"{path} is an input file; choose another file to write")
        if path is not None and not path.resolve().parent.is_dir():
            raise WorkloadError(f"{path.parent}: no such folder")


def read_file(file: Path, model: str, lengths: Path | None, shared_cache: bool) -> Workload:
    tokenizer = None
    if model not in MODELS and (Path(model).is_dir() or not Path(model).exists()):
        try:
            tokenizer = PromptTokens.load(model)
        except ValueError as error:
            raise WorkloadError(f"--model {model}: its tokenizer or chat template cannot be read: {error}") from error
    known = read_lengths(lengths) if lengths is not None else {}
    if sys.stderr.isatty():
        console.print(f"reading {file} …", style="dim")
    return read_workload(file, tokenizer, known, shared_cache)


def out() -> Console:
    """Return a console on standard output, wide enough for a table when it is not a terminal."""
    return Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else 120)


def small_by(longest_s: float, whole_s: float) -> float | None:
    """Return how many times as many requests a file needs for its figures to be trusted; None if it has enough."""
    return None if longest_s < SMALL * whole_s else longest_s / max(whole_s, 1e-9) / SMALL


def not_full(longest_s: float) -> str:
    alone = f"the longest answer takes {as_time(longest_s / 3600)} alone, over a tenth of the whole time"
    return f"{alone}, so the engine is not full for much of it"


def as_time(hours: float) -> str:
    """Format a time in the unit that people read, down to milliseconds."""
    if hours >= 1:
        return f"{hours:,.2f} h"
    if hours >= 1 / 60:
        return f"{hours * 60:.1f} min"
    return f"{hours * 3600:.2f} s" if hours >= 1 / 3600 else f"{hours * 3.6e6:.3g} ms"
