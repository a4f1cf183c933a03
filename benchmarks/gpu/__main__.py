"""Compare SGLang's own policies with batchweave's ways to overlap prefill and decodes, on this machine's GPU.

python -m benchmarks.gpu DATA [--mixes h200-1,documents] [--policies fcfs,batchweave-mixed] [--attention triton,fa3]
python -m benchmarks.gpu DATA --prepare build/gpu    # for a machine without the traces; there: benchmarks.gpu build/gpu

The model has Llama-3-8B's shape and dummy weights; prefixes and lengths come from real traces. The benchmark first
measures steps and takes the bound from them. Then it runs every policy on the same engine, and those of PD-multiplexing
on another. Rows go to results/gpu.jsonl, and a run that has a row is not run again; pictures of compute and reads over
time are beside it. `--model tiny` only checks that everything runs on a machine without a GPU; its figures mean
nothing.
"""

import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

from benchmarks.gpu import options, pictures, workloads
from benchmarks.gpu.shapes import model_folder
from engine_ext import warm_up
from engine_ext.plugin.options import Overlap
from engine_ext.plugin.platform_entry import gpu_is_present
from engine_ext.plugin.worker.overlap import against


def run_engine(what: str, given: Namespace, attention: str) -> bool:
    """Run an engine in its own process and return whether it succeeded; a failure leaves others' rows alone."""
    started = time.time()
    command = [sys.executable, "-m", "benchmarks.gpu.engine", *sys.argv[1:]]
    command += ["--attention", attention, "--until", str(given.until), what]
    code = subprocess.run(command, check=False).returncode
    print(
        f"{what} ({attention}): {'done' if code == 0 else f'failed with {code}'}, {time.time() - started:.0f} s",
        flush=True,
    )
    return code == 0


def main() -> None:
    parser = options.parser(__doc__)
    parser.add_argument(
        "--prepare", type=Path, metavar="FOLDER", help="write the workload files to FOLDER, and run nothing"
    )
    given = options.read(parser)
    if given.prepare:
        workloads.write(given.data, given.mixes, given.scale, given.prepare)
        print(f"wrote {len(given.mixes)} workloads to {given.prepare}; then: python -m benchmarks.gpu {given.prepare}")
        return
    if not gpu_is_present() and given.model != "tiny":
        parser.error("there is no GPU here; --model tiny --scale 0.0005 checks that everything runs")
    if gpu_is_present() and given.model == "tiny":
        print("--model tiny: its figures mean nothing", flush=True)

    warm_up.ensure()
    went_well = True
    for attention in given.attention.split(","):
        if not options.calibration_path(given, attention).exists() and not run_engine("calibrate", given, attention):
            went_well = False
            print("not calibrated: the scan and the bounds take the datasheet's costs, and rows say so", flush=True)
        for overlap in (Overlap.MIXED, Overlap.NANO, Overlap.PDMUX):
            if not any(options.RUNS[policy].overlap is overlap for _, policy in options.missing(given, attention)):
                continue
            reason = against(overlap, str(model_folder(given.model, given.output.parent)), given.engine_args)
            if reason is not None:
                print(f"skipped the policies that need {overlap.value}: {reason}", flush=True)
            elif time.time() < given.until:
                went_well &= run_engine(overlap, given, attention)
        left = len(options.missing(given, attention))
        print(f"{attention}: {left} runs have no row; the same command continues with them", flush=True)
    rows = pictures.read(given.output)
    print(pictures.table(rows), *pictures.draw(rows, given.output), sep="\n")
    sys.exit(0 if went_well else 1)


if __name__ == "__main__":
    main()
