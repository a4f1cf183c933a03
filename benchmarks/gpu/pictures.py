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
    words = [row["mix"], f"x{row['scale']:g}", row["model"], row["attention"], row["machine"], more]
    return re.sub(r"[^A-Za-z0-9.]+", "-", " ".join(words)).strip("-")


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table; its last column compares with SGLang's fastest policy on the workload."""
    best: dict[str, float] = {}
    for row in rows:
        if not row["policy"].startswith("batchweave"):
            best[name_of(row)] = min(best.get(name_of(row), row["seconds"]), row["seconds"])
    lines = [
        "| workload | policy | seconds | tokens/s | of the bound | sharing | retracted | over SGLang's best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (name_of(row), row["seconds"])):
        theirs = best.get(name_of(row))
        gain = "" if theirs is None else f"{theirs / row['seconds']:.2f}"
        lines.append(
            f"| {name_of(row)} | {row['policy']} | {row['seconds']:.1f} "
            f"| {row['tokens_per_s']:,.0f} | {row['share_of_practical']:.3f} | {row['sharing']:.3f} "
            f"| {row['retractions']} | {gain} |"
        )
    return "\n".join(lines)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the rows, without a last one that was cut off; its run is repeated."""
    rows: list[dict[str, Any]] = []
    lines = path.read_text().splitlines() if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise SystemExit(f"{path}, line {number}: not valid JSON; delete the line") from None
    return rows
