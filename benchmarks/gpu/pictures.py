"""Draw compute and KV reads over time, by workload and policy (BlendServe's Figure 10), and format the table."""

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SECONDS, PREDICTED, COMPUTE, READS = range(4)  # columns of a series


def draw(rows: list[dict[str, Any]], beside: Path) -> list[Path]:
    """Draw a picture per workload and attention backend: costs by the calibrated model, at the measured times."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[name_of(row)].append(row)
    paths: list[Path] = []
    for name, runs in found.items():
        figure = Figure(figsize=(9, 1.2 + 1.6 * len(runs)), layout="constrained")
        every = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
        for axes, run in zip(every, runs, strict=True):
            series = np.array(run["series"])
            series = series[series[:, SECONDS] > 0]
            ends = np.cumsum(series[:, SECONDS])
            for column, label in ((COMPUTE, "compute"), (READS, "KV reads")):
                axes.step(ends, series[:, column] / series[:, SECONDS], where="pre", label=label, linewidth=1)
            axes.set_title(f"{run['policy']}: {run['seconds']:.0f} s", fontsize=8, loc="left")
            axes.set_ylim(0, 1.6)
            axes.grid(alpha=0.3)
        every[0].legend(fontsize=7, ncols=2)
        every[-1].set_xlabel("seconds of steps")
        figure.suptitle(f"{name}: share of a step's time", fontsize=9)
        paths.append(beside.with_name(f"{beside.stem}-{name}.png"))
        FigureCanvasAgg(figure).print_figure(paths[-1], dpi=110)
    return paths


def name_of(row: dict[str, Any]) -> str:
    """Return the name of a row's comparison; rows of the same name may be compared."""
    more = json.dumps(row["engine_args"]) if row["engine_args"] else ""
    words = [row["mix"], Path(row["model"]).name, row["attention"], row["machine"], more]
    return re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(words)).strip("-")


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table; its last column compares with SGLang's fastest policy on the workload."""
    best: dict[str, float] = {}
    for row in rows:
        if row["complete"] and not row["policy"].startswith("batchweave"):
            best[name_of(row)] = max(best.get(name_of(row), 0.0), row["tokens_per_s"])
    lines = [
        "| workload | policy | seconds | tokens/s | output/s | of the bound | sharing | $/M tokens | over SGLang |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (name_of(row), -row["tokens_per_s"])):
        theirs, share, dollars = best.get(name_of(row)), row["share_of_practical"], row["dollars_per_million"]
        is_whole = row["complete"]
        lines.append(
            f"| {name_of(row)} | {row['policy']} | {row['seconds']:.1f}{'' if is_whole else ', not complete'} "
            f"| {row['tokens_per_s']:,.0f} | {row['output_tokens_per_s']:,.0f} "
            f"| {'' if share is None else f'{share:.3f}'} | {row['sharing']:.3f} "
            f"| {'' if dollars is None else f'{dollars:.4f}'} "
            f"| {'' if theirs is None or not is_whole else format(row['tokens_per_s'] / theirs, '.2f')} |"
        )
    return "\n".join(lines)
