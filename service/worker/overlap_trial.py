"""Time one way to overlap prefill and decodes, in a separate process, so that a failing engine harms nothing else.

`batchweave calibrate` starts it with the environment of a worker. The last line that it prints is JSON.
"""

import argparse
import asyncio
import json

from service.estimates.model_costs import OVERLAPS, assumed_gpu, planning_costs
from service.settings import load_settings
from service.worker.engine import make_engine

BLEND_S = 15.0  # of compute, and as much of reads


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overlap", choices=OVERLAPS)
    parser.add_argument("--model", required=True)
    parser.add_argument("--gpu", required=True, help="the calibration file whose costs determine how much to run")
    parser.add_argument("--limit-s", type=float, help="stop after this many seconds")
    given = parser.parse_args()
    settings = load_settings(model=given.model, gpu=given.gpu, overlap=given.overlap)
    settings = settings.model_copy(update={"steps_file": None, "metrics_port": None})
    cost = planning_costs(settings.model_source, assumed_gpu(settings), settings.replica)
    engine = make_engine(settings)

    async def run() -> float | None:
        await engine.start()
        try:
            return await engine.blended_load(cost, BLEND_S, given.limit_s)
        except TimeoutError:
            return None

    try:
        seconds = asyncio.run(run())
    finally:
        engine.close()
    print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
