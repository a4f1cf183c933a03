"""Write workload files of BlendServe's mixes (Table 2) and others, from real traces.

python -m benchmarks.mixes DATA a100-1 --output mix.jsonl [--scale 0.1] [--seed 0]
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import traces
from benchmarks.traces import Row
from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.resources import Requests, node_loads
from engine_ext.plan.tree import build_tree

# Requests of the compute-heavy trace, of the memory-heavy one, and of MMLU. The first four are those of Table 2:
# (density 1.4, sharing 35%), (0.9, 35%), (1.4, 5%), (0.9, 5%) with Llama-3-8B on an A100.
TABLE_2 = {
    "a100-1": ("azure_code_2023", 39_720, "long", 280, 85_293),
    "a100-2": ("azure_code_2023", 39_540, "long", 460, 87_774),
    "a100-3": ("azure_code_2023", 39_740, "long", 260, 7_658),
    "a100-4": ("azure_code_2023", 39_580, "long", 420, 7_857),
    "a100-r1-1": ("azure_conv_2023", 34_141, "servegen_deepseek_r1", 5_859, 61_700),
    "a100-r1-2": ("azure_conv_2023", 28_023, "servegen_deepseek_r1", 11_977, 70_177),
    "a100-r1-3": ("azure_conv_2023", 34_881, "servegen_deepseek_r1", 5_119, 5_465),
    "a100-r1-4": ("azure_conv_2023", 29_493, "servegen_deepseek_r1", 10_507, 6_138),
    "h200-1": ("azure_conv_2023", 36_501, "servegen_deepseek_r1", 3_499, 58_430),
    "h200-2": ("azure_conv_2023", 32_592, "servegen_deepseek_r1", 7_408, 63_847),
    "h200-3": ("azure_conv_2023", 37_001, "servegen_deepseek_r1", 2_999, 5_201),
    "h200-4": ("azure_conv_2023", 33_502, "servegen_deepseek_r1", 6_498, 5_638),
}
# Other traces, none of them used during development: dense, light, and the wanted density and sharing as in Table 2.
OTHERS = {
    "sharegpt-long": ("sharegpt", "long", 1.4, 0.35),
    "lmsys-long": ("lmsys_chat", "long", 0.9, 0.35),
    "lmsys-r1": ("lmsys_chat", "servegen_deepseek_r1", 1.1, 0.2),
    "sharegpt-r1": ("sharegpt", "servegen_deepseek_r1", 0.9, 0.05),
    "m-mid-r1": ("servegen_m_mid", "servegen_deepseek_r1", 1.4, 0.05),
    "conv-long": ("azure_conv_2023", "long", 0.9, 0.2),
}
ALONE = ("azure_code_2023", "azure_conv_2023", "sharegpt", "lmsys_chat", "servegen_deepseek_r1", "servegen_m_mid")

Maker = Callable[[Path, float, int], list[Row]]


def make(data: Path, name: str, scale: float = 1.0, seed: int = 0) -> list[Row]:
    """Return the mix's rows in random order. Raises KeyError for a name that is not in MIXES."""
    rows = MIXES[name](data, scale, seed)
    return [rows[place] for place in np.random.default_rng(seed).permutation(len(rows))]


def write(rows: list[Row], path: Path) -> None:
    with path.open("w") as file:
        for number, row in enumerate(rows):
            line = {"id": str(number), "segments": row.segments, "output_tokens": row.output_tokens}
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


class NoSuchMix(ValueError):
    """No combination of the traces has the requested density and sharing."""


def of_shape(
    data: Path, dense: str, light: str, density: float, sharing: float, cost: CostModel, count: int, seed: int
) -> list[Row]:
    """Return `count` requests of two traces, and MMLU's beside them, with about this density and sharing on a machine.

    Raises NoSuchMix if no combination of the three has this shape.
    """
    probe = [_rows(data, dense, 4_000, seed), _rows(data, light, 4_000, seed), traces.mmlu(data, 14_042)]
    (c_d, m_d, _), (c_l, m_l, _), (c_m, m_m, v_m) = (_means(rows, cost) for rows in probe)
    # Unknown: the numbers of light and of MMLU requests, as fractions of `count`. The saved compute is `sharing` times
    # all compute, and the rest is `density` times the reads.
    left = np.array(
        [
            [sharing * (c_l - c_d), sharing * c_m - v_m],
            [(1 - sharing) * (c_l - c_d) - density * (m_l - m_d), (1 - sharing) * c_m - density * m_m],
        ]
    )
    right = np.array([-sharing * c_d, density * m_d - (1 - sharing) * c_d])
    lights, mmlus = np.linalg.solve(left, right)
    if not (0 < lights < 1 and mmlus >= 0):
        raise NoSuchMix(f"no mix of {dense}, {light} and MMLU has density {density} and sharing {sharing}")
    return [
        *_rows(data, dense, round(count * (1 - lights)), seed),
        *_rows(data, light, round(count * lights), seed),
        *traces.mmlu(data, round(count * mmlus)),
    ]


def _rows(data: Path, name: str, count: int, seed: int) -> list[Row]:
    return traces.long_outputs(count, seed) if name == "long" else traces.csv_trace(data, name, count, seed)


def _means(rows: list[Row], cost: CostModel) -> tuple[float, float, float]:
    """Return the mean seconds per request of compute, of reads, and of compute that sharing saves."""
    prompts = Prompts.of_segments(row.segments for row in rows)
    output = np.array([row.output_tokens for row in rows])
    load = node_loads(build_tree(prompts), Requests.exact(prompts.lengths, output), cost).of(0)
    return load.compute_s / len(rows), load.memory_s / len(rows), load.saved_s / len(rows)


def _of_shape(name: str) -> Maker:
    dense, light, density, sharing = OTHERS[name]
    cost = CostModel(preset("llama-3-8b"), Machine(hardware("a100-80gb")))
    return lambda data, scale, seed: of_shape(data, dense, light, density, sharing, cost, round(40_000 * scale), seed)


def _table_2(name: str) -> Maker:
    dense, dense_count, light, light_count, mmlu_count = TABLE_2[name]

    def maker(data: Path, scale: float, seed: int) -> list[Row]:
        return [
            *_rows(data, dense, round(dense_count * scale), seed),
            *_rows(data, light, round(light_count * scale), seed),
            *traces.mmlu(data, round(mmlu_count * scale)),
        ]

    return maker


def _alone(name: str) -> Maker:
    return lambda data, scale, seed: traces.csv_trace(data, name, round(20_000 * scale), seed)


def _documents(data: Path, scale: float, seed: int) -> list[Row]:
    return [
        *traces.documents(round(3_000 * scale), 6, 5_000, seed),
        *traces.long_outputs(round(90 * scale), seed),
    ]


def _mooncake(data: Path, scale: float, seed: int) -> list[Row]:
    """Return Mooncake's trace and long answers; beyond 3,993 requests the trace repeats, as other users' prompts."""
    return [*traces.mooncake(data, round(3_993 * scale)), *traces.long_outputs(round(120 * scale), seed)]


def _long_prompts(most: int) -> Maker:
    """Return SYNTHETIC prompts of 20,000 to 80,000 tokens that share nothing, and answers of 10 to `most`."""

    def rows(data: Path, scale: float, seed: int) -> list[Row]:
        generator, count = np.random.default_rng(seed), round(600 * scale)
        sizes, answers = generator.integers(20_000, 80_000, count), generator.integers(10, most, count)
        return [Row([(str(number), int(sizes[number]))], int(answers[number]), "prompts") for number in range(count)]

    return rows


MIXES: dict[str, Maker] = {
    **{name: _table_2(name) for name in TABLE_2},
    **{name: _of_shape(name) for name in OTHERS},
    **{name: _alone(name) for name in ALONE},
    "mmlu": lambda data, scale, seed: traces.mmlu(data, round(14_042 * scale)),
    "documents": _documents,
    "mooncake": _mooncake,
    **{f"prompts-{most}": _long_prompts(most) for most in (800, 1800, 3000)},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/, text/ and tokenizers/")
    parser.add_argument("mix", choices=list(MIXES))
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the mix's requests (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rows = make(given.data, given.mix, given.scale, given.seed)
    write(rows, given.output)
    print(f"{len(rows):,} requests in {given.output}")


if __name__ == "__main__":
    main()
