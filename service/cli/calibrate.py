"""`batchweave calibrate`: what steps cost on this machine."""

import logging
import sys
from pathlib import Path
from typing import Annotated

import typer

from service.cli.start import ModelOption, log_to, settings_of
from service.estimates.model_costs import CostsError
from service.terminal import JsonOption, fail, said


def calibrate(
    model: ModelOption = None,
    output: Annotated[Path, typer.Option("--output", help="File to write.")] = Path("calibration.json"),
    steps: Annotated[
        Path | None, typer.Option("--steps", help="Steps measured before, by BATCHWEAVE_STEPS_FILE: fit to these.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure what steps cost on this machine with this model, and write it as hardware for BATCHWEAVE_GPU and --gpu.

    Starts the engine alone, with BATCHWEAVE_ENGINE_ARGS as a worker would, and runs synthetic prompts for some minutes;
    the steps are kept beside the output, for `batchweave simulate --profile`. Then runs the same requests with each way
    to overlap prefill and decodes that works here; workers that plan with the file use the fastest. Examples:

    - `batchweave calibrate --model Qwen/Qwen2.5-7B-Instruct --output h100.json`
    - `BATCHWEAVE_GPU=h100.json batchweave up --model Qwen/Qwen2.5-7B-Instruct`
    - `batchweave calibrate --model Qwen/Qwen2.5-7B-Instruct --steps worker-steps.jsonl`
    """
    from service.estimates.model_costs import read_shape
    from service.worker.calibration import CalibrationError, calibrated, compare, measure
    from service.worker.loop import make_engine, possible_overlaps
    from service.workloads.workload import WorkloadError

    settings = settings_of(model=model)
    log_to(sys.stderr, logging.WARNING)
    if settings.emulated_device is not None:
        fail("BATCHWEAVE_EMULATED_DEVICE is set: nothing can be measured on an emulated device; unset it")
    measured_on, memory_bytes = "another machine", None
    is_measured_here = steps is None
    _check_calibration_files(output, steps)
    try:
        read_shape(settings.model_source)
        if steps is None:
            steps = output.with_suffix(".steps.jsonl")
            said.print("starting the engine")
            engine = make_engine(settings.model_copy(update={"steps_file": steps, "overlap": "none"}))
            measured_on, memory_bytes = engine.machine, engine.memory_bytes
            try:
                measure(engine, steps, said.print)
            finally:
                engine.close()
        found = calibrated(settings, steps, output, measured_on, memory_bytes)
    except ModuleNotFoundError as error:
        fail(f"The engine is not installed ({error.name} is missing): pip install 'batchweave[engine]'")
    except (CalibrationError, WorkloadError, CostsError, OSError, ValueError, RuntimeError) as error:
        fail(str(error))
    for name, misfit in found.errors.items():
        said.print(f"{name}: off by {misfit.mean:.1%} on average over {misfit.steps:,}, at most {misfit.largest:.0%}")
    said.print(f"wrote {output}: {found.gemm_s:.3g} s a token, {found.read_s:.3g} s a KV token read")
    if is_measured_here and len(names := possible_overlaps(settings)) > 1:
        seconds = compare(settings, output, names, said.print)
        if seconds:
            said.print(f"the fastest overlap: {min(seconds, key=lambda name: seconds[name])}, noted in {output}")
    if as_json:
        print(output.read_text(), end="")


def _check_calibration_files(output: Path, steps: Path | None) -> None:
    if output.suffix != ".json":
        fail(f"{output}: its name must end in .json, for BATCHWEAVE_GPU to know it as a calibration")
    if output.is_dir() or not output.parent.is_dir():
        fail(f"{output}: no file can be written there; name one in a folder that exists")
    if steps is not None and steps.resolve() == output.resolve():
        fail(f"{output}: is the file of the steps; name another one to write")
