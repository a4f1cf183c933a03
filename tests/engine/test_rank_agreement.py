"""Ranks of one engine: two real processes in a gloo group."""

import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from engine_ext.errors import RanksDiverged
from engine_ext.plugin.scheduler.ranks import Ranks

WAIT_S = 120
Decision = tuple[int, list[str]]
SAME: list[Decision] = [(128, ["a", "b"]), (0, [])]
OTHERS: list[Decision] = [(128, ["b", "a"]), (256, ["a", "b"]), (128, ["a"])]


def _run_rank(rank: int, meeting: str, decisions: list[Decision], said: Any) -> None:
    distributed.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=WAIT_S)
    )
    ranks = Ranks(distributed.group.WORLD, is_first=rank == 0, clock=lambda: 1000.0 * (rank + 1))
    found: list[str] = []
    for budget, admitted in decisions:
        try:
            ranks.agree(budget, False, admitted)
            found.append(str(ranks.now))
        except RanksDiverged:
            found.append("diverged")
    said.put((rank, found))
    distributed.destroy_process_group()


def test_ranks_share_a_clock_and_run_no_step_about_which_they_differ(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")  # so that each need not import torch again
    said = context.Queue()
    told = ([*SAME, *([SAME[0]] * len(OTHERS))], [*SAME, *OTHERS])
    ranks = [
        context.Process(target=_run_rank, args=(rank, str(tmp_path / "meeting"), decisions, said))
        for rank, decisions in enumerate(told)
    ]

    for each in ranks:
        each.start()
    found = dict(said.get(timeout=WAIT_S) for _ in ranks)
    for each in ranks:
        each.join(WAIT_S)

    time_of_the_first = "1000.0"
    assert found[0] == found[1] == [time_of_the_first] * len(SAME) + ["diverged"] * len(OTHERS)


def test_an_engine_of_one_rank_reads_its_own_clock() -> None:
    ranks = Ranks(None, clock=lambda: 7.0)

    ranks.agree(1, False, ["a"])

    assert ranks.now == 7.0
