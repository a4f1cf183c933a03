"""Draw the results of `benchmarks.evaluation`, and print them as tables.

python -m benchmarks.pictures docs/evaluation
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.simulate.race import draw_shares

Row = dict[str, Any]
COLOURS = {
    "fcfs": "#c9c9c9",
    "lpm": "#a8a8a8",
    "dfs-weight": "#878787",
    "dfs": "#5b7fa6",
    "random": "#d8a24a",
    "lof": "#7f6a93",
    "blendserve": "#6a9a5b",
    "batchweave": "#c0504d",
}
BARS = ("table2", "small", "known", "hard", "prompts", "varied", "h200", "others", "machines", "clocks")
GRIDS = ("grid", "grid-sharegpt", "grid-conv", "grid-m-mid")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder with the suites' .jsonl files; pictures go beside them")
    folder = parser.parse_args().folder
    for path in sorted(folder.glob("*.jsonl")):
        if path.name.startswith("colocate"):  # rows of another benchmark
            continue
        rows = [json.loads(line) for line in path.open()]
        for row in rows:
            row["workload"] = _name(row)
        picture = path.with_suffix(".png")
        if path.stem in BARS:
            _bars(rows, picture, path.stem)
        elif path.stem in GRIDS:
            _grid(rows, picture, path.stem)
        elif path.stem == "replicas":
            _replicas(rows, picture)
        elif path.stem == "sensitivity":
            _sensitivity(rows, picture)
        if path.stem == "table2":
            _shares(rows, folder / "table2-shares.png")
        _print(rows, path.stem)


def _name(row: Row) -> str:
    name = row["mix"] if row["scale"] == 1 else f"{row['mix']} x{row['scale']:g}"
    if row["suite"] == "machines":
        name = f"{row['model']} on {row['tp']} x {row['gpu']}, {row['shape'][1]:.0%} shared"
    if row["suite"] == "clocks":
        name = f"{row['mix']}, {row['clock']}"
    return f"{name} #{row['seed']}" if row["seed"] else name


def _bars(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw the share of the practical bound and the sharing kept, by workload and policy (Figures 7, 9 and 12)."""
    workloads, policies = _unique(rows, "workload"), [name for name in COLOURS if name in _unique(rows, "policy")]
    figure = _figure(2.5 + 0.9 * len(workloads), 6)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, value in ((upper, "share_of_practical"), (lower, "sharing_kept")):
        for number, policy in enumerate(policies):
            found = {row["workload"]: row[value] for row in rows if row["policy"] == policy}
            places = np.arange(len(workloads)) + (number - (len(policies) - 1) / 2) * 0.8 / len(policies)
            heights = [max(0.0, found.get(name, 0.0)) for name in workloads]
            axes.bar(places, heights, 0.8 / len(policies), color=COLOURS[policy], label=policy)
        axes.set_ylim(0, 1.05)
        axes.grid(axis="y", alpha=0.3)
    upper.set_title(f"{title}: share of the practical bound")
    lower.set_title("share of the possible prefix sharing that was kept")
    upper.legend(ncols=4, fontsize=7, loc="lower right")
    lower.set_xticks(range(len(workloads)), workloads, rotation=20, ha="right", fontsize=8)
    figure.savefig(path, dpi=110)


def _grid(rows: Sequence[Row], path: Path, title: str) -> None:
    """Draw the gain over depth-first order at its best settings and over the best baseline, by density and sharing."""
    by_shape: dict[tuple[float, float], dict[str, float]] = {}
    for row in rows:
        by_shape.setdefault(tuple(row["shape"]), {})[row["policy"]] = row["tokens_per_s"]
    densities, sharings = sorted({shape[0] for shape in by_shape}), sorted({shape[1] for shape in by_shape})
    figure = _figure(11, 7)
    figure.suptitle(f"{title}: gain of batchweave")
    for axes, (name, against) in zip(
        figure.subplots(2, 1), (("dfs", ("dfs",)), ("the best baseline", ("dfs", "random", "blendserve"))), strict=True
    ):
        gains = np.full((len(sharings), len(densities)), np.nan)
        for (density, sharing), found in by_shape.items():
            gain = found["batchweave"] / max(found[policy] for policy in against)
            gains[sharings.index(sharing), densities.index(density)] = gain
        image = axes.imshow(gains, origin="lower", aspect="auto", cmap="RdYlGn", vmin=0.8, vmax=1.8)
        for (y, x), gain in np.ndenumerate(gains):
            if np.isfinite(gain):
                axes.text(x, y, f"{gain:.2f}", ha="center", va="center", fontsize=7)
        axes.set_xticks(range(len(densities)), [f"{density:.2f}" for density in densities])
        axes.set_yticks(range(len(sharings)), [f"{sharing:.0%}" for sharing in sharings])
        axes.set_xlabel("density")
        axes.set_ylabel("sharing")
        axes.set_title(f"over {name}: mean {np.nanmean(gains):.2f}, least {np.nanmin(gains):.2f}")
        figure.colorbar(image, ax=axes)
    figure.savefig(path, dpi=110)


def _shares(rows: Sequence[Row], path: Path) -> None:
    """Draw compute and memory reads as shares of the time (Figure 10)."""
    workloads, policies = _unique(rows, "workload"), ("dfs", "random", "blendserve", "batchweave")
    figure = _figure(4 * len(workloads), 9)
    panels = figure.subplots(len(policies), len(workloads), squeeze=False)
    for row in rows:
        if row["policy"] in policies and row["series"]:
            axes = panels[policies.index(row["policy"]), workloads.index(row["workload"])]
            draw_shares(axes, np.array(row["series"]))
            axes.set_title(f"{row['workload']}, {row['policy']}: {row['seconds'] / 3600:.2f} h", fontsize=8)
    figure.savefig(path, dpi=90)


def _replicas(rows: Sequence[Row], path: Path) -> None:
    figure = _figure(7, 4.5)
    axes = figure.subplots()
    for name in _unique(rows, "workload"):
        found = sorted((row["replicas"], row["tokens_per_s"]) for row in rows if row["workload"] == name)
        counts, speeds = [count for count, _ in found], [speed / found[0][1] for _, speed in found]
        axes.plot(counts, speeds, marker="o", label=name)
    axes.plot([1, 8], [1, 8], color="grey", linewidth=0.8, linestyle="--", label="proportional")
    axes.set_xlabel("replicas")
    axes.set_ylabel("tokens/s, relative to one replica")
    axes.legend()
    figure.savefig(path, dpi=110)


SENSITIVITIES = {  # the field that was changed, and its value in the other runs
    "sample": (0.01, "share of the requests sampled", "log"),
    "interference": (0.1, "interference", "linear"),
    "length_error": (0.0, "error of given lengths, standard deviation of the logarithm", "linear"),
    "chunk": (0, "chunk, prompt tokens of a step", "log"),
    "keep": (0.99, "sharing that splits must keep", "linear"),
    "windows": (1, "windows that the requests are cut into", "log"),
}


def _sensitivity(rows: Sequence[Row], path: Path) -> None:
    figure = _figure(15, 8)
    for axes, (field, (usual, title, scale)) in zip(
        np.ravel(figure.subplots(2, 3)), SENSITIVITIES.items(), strict=True
    ):
        changed = [row for row in rows if row[field] != usual or _is_usual(row, field)]
        for name in sorted({(row["mix"], row["policy"]) for row in changed}):
            points: dict[float, list[float]] = {}
            for row in changed:
                if (row["mix"], row["policy"]) == name:
                    points.setdefault(row[field], []).append(row["share_of_practical"])
            at = sorted(points)
            axes.plot(at, [np.mean(points[x]) for x in at], marker="o", label=", ".join(name))
        axes.set_xscale(scale)
        axes.set_xlabel(title)
        axes.set_ylabel("share of the practical bound")
        axes.set_ylim(0, 1.02)
        axes.legend(fontsize=6)
    figure.savefig(path, dpi=100)


def _is_usual(row: Row, field: str) -> bool:
    """Return whether a row with nothing changed belongs to this field: large runs to `windows`, others to `sample`."""
    usual = all(row[name] == value for name, (value, _, _) in SENSITIVITIES.items())
    return usual and field == ("sample" if row["scale"] == 1 else "windows")


def _print(rows: Sequence[Row], title: str) -> None:
    """Print a Markdown table of shares of the practical bound, and of gains."""
    policies = [name for name in COLOURS if name in _unique(rows, "policy")]
    if title in (*GRIDS, "sensitivity", "replicas"):
        return
    if policies == ["batchweave"]:
        print(f"\n{title}\n\n| workload | batchweave |\n|---|---|")
        for row in rows:
            print(f"| {row['workload']} | {row['share_of_practical']:.3f} |")
        return
    print(f"\n{title}\n\n| workload | requests | {' | '.join(policies)} | over dfs | over the best | kept |")
    print("|---|---|" + "---|" * (len(policies) + 3))
    gains: list[tuple[float, float]] = []
    for name in _unique(rows, "workload"):
        found = {row["policy"]: row for row in rows if row["workload"] == name}
        speed = {policy: row["tokens_per_s"] for policy, row in found.items()}
        ours, others = speed["batchweave"], [each for policy, each in speed.items() if policy != "batchweave"]
        gains.append((ours / speed["dfs"], ours / max(others)))
        shares = " | ".join(f"{found[policy]['share_of_practical']:.3f}" for policy in policies if policy in found)
        requests, kept = found["batchweave"]["requests"], found["batchweave"]["sharing_kept"]
        print(f"| {name} | {requests:,} | {shares} | {gains[-1][0]:.2f} | {gains[-1][1]:.2f} | {kept:.3f} |")
    mean = np.mean([row["share_of_practical"] for row in rows if row["policy"] == "batchweave"])
    over_dfs, over_best = np.mean(gains, axis=0)
    print(f"\nmean share {mean:.3f}, over dfs {over_dfs:.2f}, over the best {over_best:.2f}")


def _unique(rows: Sequence[Row], key: str) -> list[str]:
    return sorted({row[key] for row in rows})


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


if __name__ == "__main__":
    main()
