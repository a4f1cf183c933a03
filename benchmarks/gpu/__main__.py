"""Compare SGLang's fcfs, SGLang at settings for batches and batchweave, side by side on this machine's GPU.

python -m benchmarks.gpu DATA                     # real lengths and prefixes, dummy weights of Llama-3-8B's shape
python -m benchmarks.gpu --file requests.jsonl --model /models/llama --price 2.5       # your requests and your model
python -m benchmarks.gpu DATA --mixes lmsys-r1 --policies lpm,batchweave-mixed         # other runs
python -m benchmarks.gpu DATA --emulated 3 --seconds 4                                 # a rehearsal without a GPU
python -m benchmarks.gpu --follow --output results/gpu                                 # watch one that runs already

The stages say what the machine can do, check answers, measure what steps cost, run each policy, and send online
requests beside a batch. Each has a limit, and one that fails stops no other. Lines of stages.jsonl and rows of
gpu.jsonl are written as they come; the same command continues where the last one stopped.
"""

import sys
import time

from benchmarks.gpu import follow, given, lease
from benchmarks.gpu.plan import plan_of
from benchmarks.gpu.records import Folder
from engine_ext import warm_up


def main() -> None:
    parser = given.parser(__doc__)
    options = parser.parse_args()
    folder = Folder(options.output)
    if options.follow:
        follow.follow(folder, options.follow_s, options.copy_to)
        return
    asked = given.read(parser, options)
    before = folder.asked
    if before is not None and before != asked:
        parser.error(f"{options.output} has another comparison; name another folder with --output")
    if follow.is_taken(folder):
        parser.error(f"a process works in {options.output}; watch it with --follow")
    folder.keep(asked)
    follow.mark(folder)
    plan = plan_of(asked)
    warm_up.begin()  # it compiles while the first stages run; an engine waits for it
    ends = time.monotonic() + 60 * options.minutes
    lease.run(plan, folder, ends)
    ended = folder.ended
    for stage in plan:
        print(follow.described(ended[stage.name]) if stage.name in ended else f"{stage.name}: not run", flush=True)
    print(follow.summary(folder, draws=time.monotonic() < ends), flush=True)
    sys.exit(0 if all("failed" not in ended.get(stage.name, {"failed": ""}) for stage in plan) else 1)


if __name__ == "__main__":
    main()
