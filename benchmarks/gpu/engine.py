"""Run one engine of the comparison in its own process, and add a row for each run to a file.

`benchmarks.gpu` starts it; on its own, with the same options:
python -m benchmarks.gpu.engine calibrate|mixed|nano|pdmux …
"""

import asyncio
import json
import sys
import time
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import options, pictures, workloads
from benchmarks.gpu.shapes import CONTEXT, model_folder
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine
from engine_ext.plugin.options import Overlap
from engine_ext.plugin.platform_entry import accelerator_memory, gpu_is_present, machine_name
from engine_ext.plugin.tuning import Tuning
from engine_ext.plugin.worker.bench_engine import BenchEngine
from engine_ext.plugin.worker.host import CPU_DEFAULTS
from engine_ext.plugin.worker.overlap import choose
from service.estimates.model_costs import read_hardware, read_shape
from service.settings import load_settings
from service.worker.calibration import calibrated

WARM_UP = 256  # requests, and tokens of their answers
CPU_TOKENS = 1 << 15


def arguments(given: Namespace) -> dict[str, Any]:
    """Return the server arguments for SGLang, except those of the overlap."""
    found: dict[str, Any] = {
        "load_format": "dummy",
        "context_length": CONTEXT,
        "schedule_policy": "fcfs",
        "sampling_backend": "pytorch",
        "random_seed": 0,
    }
    if gpu_is_present():
        found |= {"attention_backend": given.attention, "cuda_graph_max_bs_decode": 512}
    else:
        found |= {**CPU_DEFAULTS, "max_total_tokens": CPU_TOKENS, "context_length": CPU_TOKENS}
    return found | given.engine_args


def calibrate(given: Namespace, model: Path) -> None:
    """Measure what steps cost on this machine, for the bounds and for the scan."""
    output = options.calibration_path(given, given.attention)
    steps = output.with_suffix(".steps.jsonl")
    cost = CostModel(read_shape(str(model)), Machine(read_hardware(given.gpu)))
    wanted = choose(None, str(model), arguments(given))  # mixed chunks on a GPU, so that there are mixed steps
    engine = BenchEngine.real(str(model), cost, wanted, arguments(given), str(steps))

    async def main() -> None:
        async for part in engine.measure_steps(steps):
            print(f"calibration: {part}", flush=True)

    asyncio.get_event_loop().run_until_complete(main())
    engine.close()
    settings = load_settings(model=str(model), gpu=given.gpu, engine_args=given.engine_args)
    found = calibrated(settings, steps, output, machine_name(), accelerator_memory())
    for name, misfit in found.errors.items():
        print(f"calibration: {name} off by {misfit.mean:.1%} on average over {misfit.steps} steps", flush=True)


def compare(given: Namespace, model: Path, overlap: Overlap) -> None:
    """Do all runs of this engine that have no row yet, until the time is up."""
    calibration = options.calibration_path(given, given.attention)
    known = str(calibration) if calibration.exists() else given.gpu
    cost = CostModel(read_shape(str(model)), Machine(read_hardware(known)))
    missing = [
        (mix, policy)
        for mix, policy in options.missing(given, given.attention)
        if options.RUNS[policy].overlap is overlap
    ]
    if not missing:
        return
    engine = BenchEngine.real(str(model), cost, overlap, arguments(given))
    loaded: dict[str, workloads.Workload] = {}
    warm = set[Tuning]()
    for mix, policy in missing:
        if mix not in loaded:
            loaded = {mix: workloads.read(given.data, mix, given.scale, cost)}
        if time.time() > given.until:
            break
        workload, run = loaded[mix], options.RUNS[policy]
        if run.tuning not in warm:  # compiling and loading must not count in any run
            warm.add(run.tuning)
            few = range(min(WARM_UP, len(workload.prompts)))
            warm_up = engine.run(
                run.tuning, [workload.prompts[k] for k in few], [min(workload.outputs[k], WARM_UP) for k in few]
            )
            asyncio.get_event_loop().run_until_complete(warm_up)
        order = workload.sorted_order if run.is_sorted else range(len(workload.prompts))
        found = asyncio.get_event_loop().run_until_complete(
            engine.run(run.tuning, [workload.prompts[k] for k in order], [workload.outputs[k] for k in order])
        )
        if found["overlap"] != (overlap if overlap is Overlap.PDMUX or run.tuning.mixed else Overlap.NONE):
            sys.exit(f"{policy} ran with overlap {found['overlap']}")
        bound = workload.work.practical_s(EngineModel.of_steps(cost, Clock.OVERLAPPED))
        add(
            given.output,
            {
                "mix": mix,
                "policy": policy,
                **options.identity(given, given.attention),
                "calibrated": calibration.exists(),
                "date": datetime.now(UTC).isoformat(timespec="seconds"),
                "requests": len(workload.prompts),
                "seconds": found["wall_s"],
                "tokens_per_s": workload.tokens / found["wall_s"],
                "practical_s": bound,
                "share_of_practical": bound / found["wall_s"],
                "sharing": found["cached_tokens"] / sum(map(len, workload.prompts)),
                "retractions": found["retractions"],
                **{
                    name: found.get(name)
                    for name in ("kv_capacity", "engine_steps", "step_s", "predicted_step_s", "plans")
                },
                "deciding_ms": 1e3 * found.get("deciding_s", 0.0) / max(1, found.get("decisions", 1)),
                "series": found["series"],
            },
        )
    engine.close()


def add(path: Path, row: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [*pictures.read(path), row]
    part = path.with_suffix(".part")
    part.write_text("".join(json.dumps(each) + "\n" for each in rows))
    part.replace(path)
    print(
        f"{row['mix']} {row['policy']} ({row['attention']}): {row['seconds']:.1f} s, "
        f"{row['tokens_per_s']:,.0f} tokens/s, "
        f"{row['share_of_practical']:.3f} of the bound, sharing {row['sharing']:.3f}, {row['retractions']} retracted",
        flush=True,
    )


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument("what", choices=["calibrate", Overlap.MIXED, Overlap.NANO, Overlap.PDMUX])
    given = options.read(parser)
    model = model_folder(given.model, given.output.parent)
    if given.what == "calibrate":
        calibrate(given, model)
    else:
        compare(given, model, Overlap(given.what))


if __name__ == "__main__":
    main()
