"""Makes online requests and a batch beside them from real lengths and arrival times, for the simulator."""

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from benchmarks import traces
from benchmarks.simulate.pair import Pair
from benchmarks.traces import Row
from engine_ext.arrays import Column, Floats
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.prompts import Prompts, Segment
from engine_ext.simulate.arrivals import Arrivals
from engine_ext.simulate.traffic import Traffic

BATCHES = {
    "code": 12_000,
    "r1": 6_000,
    "mmlu": 60_000,
    "documents": 6_000,
    "chat": 30_000,
    "uniform": 30_000,
    "ooc": 30_000,
}
FILES = {"code": "azure_code_2023", "r1": "servegen_deepseek_r1", "chat": "servegen_m_mid"}
OOC_ONLINE, OOC_BATCH = (1892, 1062), (1200, 671)  # mean prompt and output tokens (OOCO table 5)
SPREAD = 0.8  # standard deviation of the logarithm of lengths that only their means are known of: an assumption
UNIFORM = (512, 1024), (32, 128)  # prompt and output tokens of BROS's batches (BROS table II)


@dataclass(frozen=True, slots=True)
class Online:
    """Holds the requests of a trace in order of arrival: `arrives_s` counts from its beginning.

    `segments`: the prompt of each; a copy of the trace gets prompts of its own.
    """

    arrives_s: Floats
    segments: Sequence[Sequence[Segment]]
    output: Column

    def at(self, arrivals: Arrivals) -> tuple[Prompts, Column]:
        """Return prompts and output tokens of the requests that arrive."""
        return Prompts.of_segments(self.named(arrivals)), self.output[arrivals.number]

    def named(self, arrivals: Arrivals) -> list[list[Segment]]:
        numbers = zip(arrivals.copy.tolist(), arrivals.number.tolist(), strict=True)
        return [[(f"online/{copy}/{name}", size) for name, size in self.segments[number]] for copy, number in numbers]


def conversations(data: Path, longest: int) -> Online:
    """Return Azure's conversations of up to `longest` tokens, at their real times."""
    rows: list[tuple[float, int, int]] = []
    with (data / "lengths" / "azure_conv_2023.csv").open() as file:
        for line in csv.DictReader(file):
            prompt, output = int(line["ContextTokens"]), int(line["GeneratedTokens"])
            if prompt >= 1 and output >= 1 and prompt + output < longest:
                rows.append((datetime.fromisoformat(line["TIMESTAMP"][:26]).timestamp(), prompt, output))
    return _unlike(sorted(rows))


def poisson(data: Path, name: str, longest: int, rate: float, duration_s: float, seed: int) -> Online:
    """Return requests with a file's lengths that come at random times, `rate` a second on average."""
    generator = np.random.default_rng(seed)
    times = np.cumsum(generator.exponential(1.0 / rate, int(2 * rate * duration_s) + 100))
    times = times[times < duration_s]
    rows = traces.csv_trace(data, name, 4 * len(times), seed)
    fits = [row for row in rows if length(row) < longest][: len(times)]
    return _unlike(
        [
            (float(time), length(row) - row.output_tokens, row.output_tokens)
            for time, row in zip(times, fits, strict=True)
        ]
    )


def mooncake(data: Path, longest: int) -> Online:
    """Return Mooncake's synthetic trace with its times and shared prefixes; prompts go up to 100,000 tokens."""
    with (data / "lengths" / "mooncake_synthetic.jsonl").open() as file:
        times = [json.loads(line)["timestamp"] / 1000.0 for line in file]
    rows = sorted(zip(times, traces.mooncake(data, len(times)), strict=True), key=lambda each: each[0])
    rows = [(time, row) for time, row in rows if length(row) < longest]
    arrives = np.array([time for time, _ in rows])
    output = np.array([row.output_tokens for _, row in rows], dtype=np.int64)
    return Online(arrives - arrives[0], [row.segments for _, row in rows], output)


def _unlike(rows: list[tuple[float, int, int]]) -> Online:
    """Return requests of these times, prompt and output tokens that have nothing in common."""
    arrives, prompt, output = (np.array(each) for each in zip(*rows, strict=True))
    segments = [[(number, int(tokens))] for number, tokens in enumerate(prompt)]
    return Online(arrives - arrives[0], segments, output.astype(np.int64))


def lognormal(arrives_s: Floats, longest: int, means: tuple[int, int], seed: int) -> Online:
    """Return SYNTHETIC requests at these times: lognormal prompt and output tokens of these means, cut at `longest`."""
    prompt, output = lognormal_lengths(len(arrives_s), longest, means, seed)
    return _unlike(list(zip(arrives_s.tolist(), prompt.tolist(), output.tolist(), strict=True)))


def lognormal_lengths(count: int, longest: int, means: tuple[int, int], seed: int) -> tuple[Column, Column]:
    """Return SYNTHETIC prompt and output tokens, lognormal with these means, each at most half of `longest`."""
    generator = np.random.default_rng(seed)
    prompt, output = (
        np.clip(generator.lognormal(np.log(mean) - SPREAD**2 / 2, SPREAD, count), 1, longest // 2 - 1) for mean in means
    )
    return prompt.astype(np.int64), output.astype(np.int64)


def batch_rows(data: Path, name: str, seed: int, longest: int, requests: int | None = None) -> list[Row]:
    """Return the rows of a batch in random order, without those that no engine here can hold."""
    count = requests or BATCHES[name]
    if name == "mmlu":
        rows = traces.mmlu(data, count)
    elif name == "documents":
        rows = traces.documents(count // 6, 6, 5_000, seed)
    elif name == "uniform":
        generator, (prompt, output) = np.random.default_rng(seed), UNIFORM
        rows = _plain(name, generator.integers(*prompt, count), generator.integers(*output, count))
    elif name == "ooc":
        rows = _plain(name, *lognormal_lengths(count, longest, OOC_BATCH, seed))
    else:
        rows = traces.csv_trace(data, FILES[name], count, seed)
    fits = [row for row in rows if length(row) < longest]
    return [fits[place] for place in np.random.default_rng(seed).permutation(len(fits))]


def _plain(name: str, prompt: Column, output: Column) -> list[Row]:
    """Return rows of these lengths that have nothing in common."""
    sizes = enumerate(zip(prompt.tolist(), output.tolist(), strict=True))
    return [Row([(f"{name}/{number}", size)], tokens, name) for number, (size, tokens) in sizes]


def length(row: Row) -> int:
    """Return the row's prompt and output tokens."""
    return sum(size for _, size in row.segments) + row.output_tokens


def beside(rows: list[Row], online: Online, arrivals: Arrivals, group: int = 0) -> Traffic:
    """Return the rows as a batch beside the online requests that arrive; `group`: see `Traffic`."""
    prompts, output, caps = together(rows, online, arrivals)
    return Traffic.of(prompts, output, caps, arrivals, group)


def pair_beside(rows: list[Row], online: Online, arrivals: Arrivals) -> Pair:
    """Return the same for two engines."""
    return Pair.of(*together(rows, online, arrivals), arrivals)


def together(rows: list[Row], online: Online, arrivals: Arrivals) -> tuple[Prompts, Column, Column]:
    """Return prompts and true outputs of the batch and then of the arrivals, and the batch's max_tokens."""
    outputs = np.array([row.output_tokens for row in rows], dtype=np.int64)
    prompts = Prompts.of_segments([*(row.segments for row in rows), *online.named(arrivals)])
    return prompts, np.concatenate([outputs, online.output[arrivals.number]]), np.full(len(rows), LONGEST)
