"""`batchweave calibrate`: measures the cost of engine steps on this machine."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from batchweave.terminal import JsonOption, fail, said
from engine_ext.errors import BatchweaveError
from service.cli.start import ModelOption, log_to, settings_of


def calibrate(
    model: ModelOption = None,
    output: Annotated[Path, typer.Option("--output", help="Calibration file to write.")] = Path("calibration.json"),
    steps: Annotated[
        Path | None, typer.Option("--steps", help="Fit steps recorded earlier with BATCHWEAVE_STEPS_FILE.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what engine steps cost with this model on this machine, and write a file for BATCHWEAVE_GPU and --gpu.

    Starts only the engine, with BATCHWEAVE_ENGINE_ARGS as a worker would, and runs synthetic prompts for a few minutes.
    Keeps the steps beside the output file, for `batchweave simulate --profile`. Then runs the same requests with each
    way of overlapping prefill and decode that works on this machine; workers that use the file choose the fastest one.
    Examples:

    - `batchweave calibrate --model Qwen/Qwen2.5-7B-Instruct --output h100.json`
    - `BATCHWEAVE_GPU=h100.json batchweave up --model Qwen/Qwen2.5-7B-Instruct`
    - `batchweave calibrate --model Qwen/Qwen2.5-7B-Instruct --steps worker-steps.jsonl`
    """
    from service.estimates.model_costs import read_shape
    from service.worker.calibration import calibrated, compare, measure
    from service.worker.engine import make_engine, overlap_to_measure, possible_overlaps

    settings = settings_of(model=model)
    log_to(sys.stderr, logging.WARNING)
    if settings.emulated_device is not None:
        fail("BATCHWEAVE_EMULATED_DEVICE is set, and an emulated device cannot be measured; unset it")
    measured_on, memory_bytes = "another machine", None
    is_measured_here = steps is None
    _check_calibration_files(output, steps)
    try:
        read_shape(settings.model_source)
        if steps is None:
            steps = output.with_suffix(".steps.jsonl")
            said.print("starting the engine")
            told = {"steps_file": steps, "overlap": overlap_to_measure(settings)}
            engine = make_engine(settings.model_copy(update=told))
            measured_on, memory_bytes = engine.machine, engine.memory_bytes
            try:
                measure(engine, steps, said.print)
            finally:
                engine.close()
        found = calibrated(settings, steps, output, measured_on, memory_bytes)
    except ModuleNotFoundError as error:
        fail(f"The engine is not installed ({error.name} is missing): pip install 'batchweave-server[engine]'")
    except (BatchweaveError, OSError) as error:
        fail(str(error))
    for name, misfit in found.errors.items():
        said.print(
            f"{name}: off by {misfit.mean:.1%} on average over {misfit.steps:,} steps, at most {misfit.largest:.0%}"
        )
    said.print(f"wrote {output}: {found.gemm_s:.3g} s per token, {found.read_s:.3g} s per KV token read")
    if is_measured_here and len(names := possible_overlaps(settings)) > 1:
        seconds = compare(settings, output, names, said.print)
        if seconds:
            said.print(f"fastest overlap: {min(seconds, key=lambda name: seconds[name])}, recorded in {output}")
    if as_json:
        print(output.read_text(), end="")


def _check_calibration_files(output: Path, steps: Path | None) -> None:
    if output.suffix != ".json":
        fail(f"{output}: the name must end in .json, so that BATCHWEAVE_GPU recognises a calibration")
    if output.is_dir() or not output.parent.is_dir():
        fail(f"{output}: cannot write a file there; choose a file in an existing folder")
    if steps is not None and steps.resolve() == output.resolve():
        fail(f"{output} is the steps file; choose another output file")
