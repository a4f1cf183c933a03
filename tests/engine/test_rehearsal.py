"""The comparison for a lent GPU, rehearsed in short: unpacked, killed in the middle, cut by its time, continued."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import mixes
from benchmarks.gpu.pack import ROOT, write_sums
from benchmarks.traces import Row

STAGES = ("h200-1 fcfs", "h200-1 batchweave-mixed")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_comparison_survives_a_kill_and_keeps_its_time(tmp_path: Path) -> None:
    generator, pack = np.random.default_rng(0), tmp_path / "pack"
    (pack / "work").mkdir(parents=True)
    # SYNTHETIC: lengths as of chats, half of them behind one of four prompts
    rows = [
        Row([(f"p{k % 8}", 400), (f"q{k}", int(generator.integers(50, 300)))], int(generator.integers(5, 200)), "made")
        for k in range(400)
    ]
    mixes.write(rows, pack / "work" / "h200-1.mix.jsonl")
    write_sums(pack)
    command = [sys.executable, "-m", "benchmarks.gpu.rehearse", str(pack), "--stages", ",".join(STAGES)]
    found = subprocess.run(
        [*command, "--killed-in", STAGES[0], "--late", "90"], cwd=ROOT, capture_output=True, text=True, timeout=800
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "rehearsed" in found.stdout
    assert "another engine" in found.stdout
