"""The command line of a comparison."""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gpu.plan import ROWS, ROWS_OF_A_FILE, RUNS, plan_of
from benchmarks.gpu.records import Asked
from benchmarks.gpu.shapes import SHAPES
from benchmarks.mixes import MIXES
from engine_ext.plugin.platform_entry import gpu_is_present, machine_name

SECONDS = 40.0
NEED_A_GPU = ("batchweave-nano", "batchweave-pdmux")  # streams, which an emulated device does not have


def parser(description: str | None) -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument(
        "data", type=Path, nargs="?", help="folder with lengths/, text/ and tokenizers/, or work/ of a pack"
    )
    found.add_argument("--file", type=Path, help="your own requests instead: JSONL as for a batch")
    found.add_argument(
        "--model", default="llama-3-8b", help=f"{' or '.join(SHAPES)} with dummy weights; with --file, your model"
    )
    found.add_argument("--price", type=float, help="dollars for an hour of this machine, to print dollars per token")
    found.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder; its ended stages stay")
    found.add_argument("--minutes", type=float, default=120.0, help="after which everything ends (default 120)")
    found.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of each run at the bound (default {SECONDS:.0f})"
    )
    found.add_argument("--mixes", help=f"instead of the plan's: {', '.join(MIXES)}")
    found.add_argument("--policies", help=f"instead of the plan's: {', '.join(RUNS)}")
    found.add_argument("--stages", default="", help="only these, by their names in stages.jsonl, separated by commas")
    found.add_argument("--gpu", default="", help="GPU whose datasheet is used before calibration (default: by name)")
    found.add_argument("--attention", default="", help="SGLang's attention backend (default: its own choice)")
    found.add_argument("--engine-args", type=json.loads, default={}, help="more server arguments for SGLang, as JSON")
    found.add_argument(
        "--emulated", type=float, default=0.0, metavar="N", help="rehearse without a GPU: an H100, N times slower"
    )
    found.add_argument("--follow", action="store_true", help="print what another process does in --output; run nothing")
    found.add_argument("--for", type=float, dest="follow_s", default=1e6, help="seconds after which --follow ends")
    found.add_argument("--copy-to", type=Path, help="where --follow puts the files, each below 16 MiB, when it ends")
    return found


def read(given_to: argparse.ArgumentParser, given: argparse.Namespace) -> Asked:
    """Return what was asked for; ends the process with a clear error if it makes no sense."""
    for problem in _problems(given):
        given_to.error(problem)
    rows: dict[str, Sequence[str]] = dict(ROWS_OF_A_FILE if given.file else ROWS)
    mixes = _names(given_to, "mixes", given.mixes, MIXES)
    policies = _names(given_to, "policies", given.policies, RUNS)
    if given.emulated and (missing := [name for name in policies if name in NEED_A_GPU]):
        given_to.error(f"--policies: {missing[0]!r} needs a GPU, and --emulated has none")
    rows = {mix: policies or rows.get(mix, rows["file" if given.file else "h200-1"]) for mix in mixes or rows}
    if given.emulated:
        rows = {mix: [name for name in names if name not in NEED_A_GPU] for mix, names in rows.items()}
    asked = Asked(
        data=str(given.data.resolve()) if given.data else "",
        model=given.model,
        gpu="h100" if given.emulated else given.gpu or ("h100" if "H100" in machine_name() else "h200"),
        slower=given.emulated,
        rows=[(mix, list(names)) for mix, names in rows.items()],
        has_online=not (given.file or mixes or policies),
        seconds=given.seconds,
        attention=given.attention,
        file=str(given.file.resolve()) if given.file else None,
        price=given.price,
        only=[name.strip() for name in given.stages.split(",") if name.strip()],
        engine_args=given.engine_args,
    )
    known = [stage.name for stage in plan_of(replace(asked, only=[]))]
    for name in asked.only:
        if name not in known:
            given_to.error(f"--stages: unknown {name!r}; must be one of {', '.join(known)}")
    return asked


def _problems(given: argparse.Namespace) -> Iterator[str]:
    if (given.data is None) == (given.file is None):
        yield "give a folder with data, or --file with requests of your own"
    if given.data is not None and not given.data.is_dir():
        yield f"{given.data} is not a folder; docs/gpu.md says what it must contain"
    if given.file is not None and not given.file.is_file():
        yield f"{given.file} is not a file"
    if given.file is not None and given.model in SHAPES:
        yield "--file needs --model: the folder or the hub id of the model that answers"
    if given.file is None and given.model not in SHAPES:
        yield f"--model must be {' or '.join(SHAPES)} unless --file has requests for it"
    if not isinstance(given.engine_args, dict):
        yield "--engine-args must be a JSON object"
    for name in ("seconds", "minutes"):
        if not getattr(given, name) > 0:
            yield f"--{name} must be above 0"
    if not gpu_is_present() and not given.emulated and given.model == "llama-3-8b":
        yield "there is no GPU here; --emulated 3 rehearses on an emulated one, --model tiny on this CPU"


def _names(given_to: argparse.ArgumentParser, option: str, given: str | None, known: Mapping[str, object]) -> list[str]:
    names = [name.strip() for name in (given or "").split(",") if name.strip()]
    for name in names:
        if name not in known:
            given_to.error(f"--{option}: unknown {name!r}; must be one of {', '.join(known)}")
    return names
