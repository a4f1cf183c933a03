"""`batchweave calibrate`: measure an engine's steps, fit the cost model to them, and write it to a file."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine_ext.costs.calibrate import Calibration
from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import MEASURED, Machine
from service.errors import CalibrationError
from service.estimates.model_costs import assumed_gpu, read_hardware, read_shape
from service.settings import Settings
from service.workloads.fitting import ASSUMED_INTERFERENCE, as_measured, fit

TOO_LONG = 3
TRIAL_S = 1800  # limit for the engine's start and its load together
SGLANG_CLOCK = "mixed"  # GEMM and attention run one after the other, so a step's time is their sum, whatever it mixes


def measure(engine: Any, steps: Path, say: Callable[[str], None]) -> None:
    """Run the load on a started EngineHost whose options name `steps`. Call it in the main thread."""

    async def main() -> None:
        await engine.start()
        async for part in engine.measure_steps(steps):
            say(part)

    asyncio.run(main())
    if not steps.exists():
        raise CalibrationError(f"the engine wrote no steps to {steps}; see its log above")


def compare(settings: Settings, calibration: Path, names: list[str], say: Callable[[str], None]) -> dict[str, float]:
    """Time the same requests with each way to overlap prefill and decodes, one engine after the other.

    Returns the seconds by name, without those that failed or took TOO_LONG times as long as the fastest. Each result is
    written into the calibration's file as soon as it is known.
    """
    seconds: dict[str, float] = {}
    for name in names:
        say(f"overlap {name}: starting the engine")
        command = [sys.executable, "-m", "service.worker.overlap_trial", name, "--model", settings.model]
        command += ["--gpu", str(calibration)]
        if seconds:
            command += ["--limit-s", str(TOO_LONG * min(seconds.values()))]
        try:
            ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TRIAL_S, check=True)
            found = json.loads(ended.stdout.splitlines()[-1])["seconds"]
        except subprocess.TimeoutExpired:
            say(f"overlap {name}: not finished after {TRIAL_S} s; left out")
            continue
        except (subprocess.CalledProcessError, ValueError, KeyError, IndexError) as error:
            say(f"overlap {name}: its engine failed, see above; left out ({error})")
            continue
        if found is None:
            say(f"overlap {name}: more than {TOO_LONG} times as long as the fastest; left out")
            continue
        seconds[name] = found
        say(f"overlap {name}: {found:.1f} s")
        keep_fastest(calibration, seconds)
    return seconds


def keep_fastest(calibration: Path, seconds: dict[str, float]) -> None:
    """Write the comparison into a calibration's file, for workers that plan with it."""
    fastest = min(seconds, key=lambda name: seconds[name])
    described = json.loads(calibration.read_text()) | {"overlap": {"fastest": fastest, "seconds": seconds}}
    calibration.write_text(json.dumps(described, indent=2, allow_nan=False) + "\n")


def describe(
    settings: Settings, steps: Path, calibration: Calibration, measured_on: str, memory_bytes: int | None
) -> dict[str, Any]:
    """Return the content of the calibration's .json file.

    It holds the hardware, with the rates that the engine reached as its peaks, and what was measured, when and on what.
    """
    gpu = assumed_gpu(settings)
    cost = CostModel(read_shape(settings.model_source), Machine(read_hardware(gpu), tp=settings.replica))
    hardware = as_measured(cost, calibration).machine.hardware
    return {
        "name": f"{read_hardware(gpu).name}, calibrated on {measured_on}",
        "flops": dict(hardware.flops),
        "bandwidth": hardware.bandwidth,
        "memory_bytes": memory_bytes or hardware.memory_bytes,
        **{field: getattr(hardware, field) for field in MEASURED if getattr(hardware, field) is not None},
        "calibration": {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": measured_on,
            "model": settings.model_source,
            "accelerators": Machine(hardware, tp=settings.replica).accelerators,
            "engine_args": settings.engine_args,
            "steps": str(steps),
            **{key: value for key, value in asdict(calibration).items() if key != "interference"},
        },
    }


def calibrated(
    settings: Settings, steps: Path, output: Path, measured_on: str, memory_bytes: int | None = None
) -> Calibration:
    """Fit the cost model and write the calibration's file. `memory_bytes` defaults to that of the settings' machine.

    Raises WorkloadError, CostsError, CalibrationError, OSError.
    """
    calibration = fit(steps, SGLANG_CLOCK, ASSUMED_INTERFERENCE)
    if calibration.gemm_s <= 0:
        raise CalibrationError("longer prompts took no more time, so the cost of a token is unknown; measure again")
    if calibration.read_s <= 0:
        raise CalibrationError("decodes with more KV cache took no more time, so its cost is unknown; measure again")
    described = describe(settings, steps, calibration, measured_on, memory_bytes)
    output.write_text(json.dumps(described, indent=2, allow_nan=False) + "\n")
    return calibration
