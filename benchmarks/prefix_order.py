"""Show what the order of requests that share prefixes is worth, without a radix cache and with one (HyGen, Figure 6).

python -m benchmarks.prefix_order DATA

First it counts the prompt tokens that have to be computed if a prompt shares only with the one before it, which is what
HyGen assumes. Then it simulates each policy on an engine with SGLang's radix cache and mixed chunks, with
the settings that suit it best. The documents are SYNTHETIC.
"""

import argparse
from pathlib import Path

import numpy as np

from benchmarks import mixes
from benchmarks.evaluation import Case, run
from engine_ext.plan.order import shared_by_order
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.tree import build_tree

POLICIES = ("fcfs", "lpm", "dfs", "blendserve", "batchweave")
CASES = (
    ("mmlu", "llama-2-7b", "a100-40gb"),
    ("documents", "llama-2-7b", "a100-40gb"),
    ("documents", "llama-3-8b", "a100-80gb"),
)


def computed_between_neighbours(data: Path, mix: str) -> tuple[int, int]:
    """Return the prompt tokens to compute if only neighbours share, in random order and in that of the prefix tree."""
    prompts = Prompts.of_segments(row.segments for row in mixes.make(data, mix))
    tree, count = build_tree(prompts), len(prompts.lengths)
    total = int(prompts.lengths.sum())
    shuffled = np.random.default_rng(0).permutation(count)
    return total - int(shared_by_order(tree, shuffled).sum()), total - int(shared_by_order(tree, tree.order).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/")
    given = parser.parse_args()
    for mix in dict.fromkeys(mix for mix, _, _ in CASES):
        shuffled, in_tree = computed_between_neighbours(given.data, mix)
        print(f"{mix}, only neighbours share: {shuffled:,} tokens shuffled, {in_tree:,} in the tree's order,", end=" ")
        print(f"{shuffled / in_tree:.1f} times as many")
    print("| batch | machine | " + " | ".join(POLICIES) + " | ours over the best other |")
    print("|---|---|" + "---|" * (len(POLICIES) + 1))
    for mix, model, gpu in CASES:
        case = Case("prefix-order", mix, POLICIES, model=model, gpu=gpu, clock="mixed")
        seconds = {row["policy"]: row["seconds"] for row in run(given.data, case)}
        ahead = min(seconds[policy] for policy in POLICIES[:-1]) / seconds["batchweave"]
        cells = " | ".join(f"{seconds[policy]:,.1f} s" for policy in POLICIES)
        print(f"| {mix} | {gpu}, {model} | {cells} | {ahead:.2f} |", flush=True)


if __name__ == "__main__":
    main()
