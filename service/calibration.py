"""`batchweave calibrate`: measure an engine's steps, fit the cost model to them, and keep it for who plans with it."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine_ext.plan.cost import CostModel
from engine_ext.plan.hardware import MEASURED, Machine
from service.model_costs import read_hardware, read_shape
from service.settings import Settings
from service.workloads.forecast import ASSUMED_INTERFERENCE, Calibration, as_measured, fit

BLEND_S = 15.0  # of compute, and of reads
TOO_LONG = 3
SGLANG_CLOCK = "mixed"  # GEMM and attention one after the other: so a step's time is the sum, whatever rides in it


class CalibrationError(Exception):
    """The steps that were measured do not tell the costs; the message says what to do."""


def measure(engine: Any, steps: Path, say: Callable[[str], None]) -> None:
    """Run the load on a started EngineHost whose options name `steps`. Call it in the main thread."""

    async def main() -> None:
        await engine.start()
        parts = 0
        async for part in engine.calibration_load():
            say(part)
            parts += 1
            if parts == 2:  # what came before was compiling and loading
                await engine.scheduler_states()
                steps.unlink(missing_ok=True)
        await engine.scheduler_states()  # which writes what is left to write

    asyncio.run(main())
    if not steps.exists():
        raise CalibrationError(f"the engine wrote no steps to {steps}; see its log above")


def compare(
    start: Callable[[Settings], Any], settings: Settings, names: list[str], cost: CostModel, say: Callable[[str], None]
) -> dict[str, float]:
    """Seconds of the same requests with each way to overlap prefill and decodes, an engine after the other.

    One that takes TOO_LONG times the fastest is stopped, and counts as that long. Call it in the main thread.
    """
    seconds: dict[str, float] = {}
    for name in names:
        say(f"overlap {name}: starting the engine")
        engine = start(settings.model_copy(update={"overlap": name}))
        limit = TOO_LONG * min(seconds.values()) if seconds else None

        async def timed(engine: Any = engine, limit: float | None = limit) -> float:
            await engine.start()
            try:
                async with asyncio.timeout(limit and 2 * limit):  # some of it runs twice, to warm up
                    return await engine.blended_load(cost, BLEND_S)
            except TimeoutError:
                assert limit is not None
                return limit

        try:
            seconds[name] = asyncio.run(timed())
        finally:
            engine.close()
        say(f"overlap {name}: {seconds[name]:.1f} s")
    return seconds


def keep_fastest(output: Path, seconds: dict[str, float]) -> str:
    """Add the comparison to a calibration's file; the fastest."""
    fastest = min(seconds, key=lambda name: seconds[name])
    described = json.loads(output.read_text()) | {"overlap": {"fastest": fastest, "seconds": seconds}}
    output.write_text(json.dumps(described, indent=2, allow_nan=False) + "\n")
    return fastest


def describe(settings: Settings, steps: Path, calibration: Calibration, measured_on: str) -> dict[str, Any]:
    """The .json file: hardware whose peaks are what the engine reached, and what was measured, when and on what."""
    cost = CostModel(read_shape(settings.model_source), Machine(read_hardware(settings.gpu), tp=settings.replica))
    hardware = as_measured(cost, calibration).machine.hardware
    return {
        "name": f"{read_hardware(settings.gpu).name}, calibrated on {measured_on}",
        "flops": dict(hardware.flops),
        "bandwidth": hardware.bandwidth,
        "memory_bytes": hardware.memory_bytes,
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


def calibrated(settings: Settings, steps: Path, output: Path, measured_on: str) -> Calibration:
    """Fit, and write the file. Raises WorkloadError, CostsError, CalibrationError, OSError."""
    calibration = fit(steps, SGLANG_CLOCK, ASSUMED_INTERFERENCE)
    if calibration.gemm_s <= 0:
        raise CalibrationError("longer prompts took no longer: nothing tells the cost of a token; measure again")
    if calibration.read_s <= 0:
        raise CalibrationError("decodes with more KV cache took no longer: nothing tells its cost; measure again")
    described = describe(settings, steps, calibration, measured_on)
    output.write_text(json.dumps(described, indent=2, allow_nan=False) + "\n")
    return calibration
