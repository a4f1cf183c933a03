"""A short campaign of faults on a fleet; docs/reliability.md says how to run a long one."""

import subprocess
import sys

import pytest


@pytest.mark.timeout(1800)
@pytest.mark.slow
def test_no_line_is_lost_or_doubled_whatever_happens_to_a_fleet() -> None:
    """In a process of its own, because it has a cluster of its own, with short leases."""
    words = [sys.executable, "-m", "tests.fleet.campaign", "10", "--seed", "3"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=800)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-2000:]}"
    assert "none lost, none twice, no process left" in ran.stdout
