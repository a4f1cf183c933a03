"""A plan made while its requests run: what waits is parted anew, with all that was learned; what runs goes on."""

from dataclasses import dataclass

import numpy as np

from engine_ext.arrays import Bools, Column
from engine_ext.compiled import compiled
from engine_ext.costs.cost import CostModel
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import UNKNOWN, estimate, group_caps, look_ahead, see
from engine_ext.plan.order import KEEP_SHARING
from engine_ext.plan.resources import Requests
from engine_ext.plan.sample import SHARE, choose_sample
from engine_ext.plan.tree import PrefixTree
from engine_ext.scan.books import begin, resume
from engine_ext.scan.ends import two_ends
from engine_ext.scan.state import Backlog, State, StepCosts, new_state
from engine_ext.scan.sweep import has_drifted, waiting

FEWEST = 32  # requests that come or end before a plan is made again
PATIENCE = 32  # steps that a plan is kept, and that fewer may wait for the next
MORE = 3.0  # times the answers that a plan knew, as news that make another one worth its time


@dataclass(frozen=True, slots=True)
class Progress:
    """How far requests are, by request; int64 and bool [prompts].

    `caps`: max_tokens; `known`: output tokens or UNKNOWN; `sampled`: known because they were asked before, so that they
    tell of others. `tokens`: output so far. Those that are neither `ended` nor `runs` wait. `prefilled`: prompts of
    running ones that are computed; `fresh` and `side`: as they were let in. `owed`: prompt tokens saved up.
    """

    caps: Column
    known: Column
    sampled: Bools
    tokens: Column
    runs: Bools
    prefilled: Bools
    ended: Bools
    fresh: Column
    side: Column
    owed: float = 0.0

    @classmethod
    def at_first(cls, caps: Column, known: Column, sampled: Bools) -> "Progress":
        """Everything waits."""
        columns, bools = np.zeros((3, len(caps)), dtype=np.int64), np.zeros((3, len(caps)), dtype=np.bool_)
        return cls(caps, known, sampled, columns[0], bools[0], bools[1], bools[2], columns[1], columns[2])

    @property
    def learned(self) -> int:
        """Answers that have told something."""
        return int(np.count_nonzero(self.sampled | self.ended & (self.known == UNKNOWN)))


def answers_before_next(learned: int) -> int:
    """How many answers are to end before a plan that knew so many is made again."""
    return max(FEWEST, int(MORE * learned))


@compiled
def is_outdated(state: State, steps: int, answers: int) -> bool:
    """Whether enough was learned for another plan: so many steps ago it was made, so many answers are still to end."""
    return waiting(state) >= FEWEST and (answers <= 0 or (steps >= PATIENCE and has_drifted(state)))


def plan_backlog(
    tree: PrefixTree,
    groups: Groups,
    progress: Progress,
    cost: CostModel,
    costs: StepCosts,
    generator: np.random.Generator,
    share: float = SHARE,
    keep: float = KEEP_SHARING,
) -> State:
    """The scan's state from here on. `share` of the requests with unknown lengths, those that ran included, come first.

    `keep`: the share of the possible sharing that splits must keep.
    """
    tokens, ended, runs, known = progress.tokens, progress.ended, progress.runs, progress.known
    lengths = np.empty(len(tokens), dtype=np.int64)
    lengths[tree.order] = tree.end[tree.leaves]
    told = np.flatnonzero(progress.sampled | (known == UNKNOWN) & (ended | (tokens > 0)))
    so_far = np.where(progress.sampled, known, tokens)
    seen = see(groups, told, so_far[told], (progress.sampled | ended)[told])
    outlook = look_ahead(seen, groups, group_caps(groups, progress.caps))
    estimates = estimate(groups, outlook, progress.caps, np.where(ended, tokens, known))
    waits = ~runs & ~ended
    begun = np.flatnonzero(waits & (tokens > 0))
    asked = np.where(waits & (tokens == 0) | (known >= 0), known, tokens)
    ran = np.bincount(groups.of[told], minlength=len(groups))
    sample = choose_sample(groups, outlook, lengths.astype(np.float64), asked, generator, share, ran)
    ends = two_ends(
        tree,
        Requests(lengths.astype(np.float64), estimates.mean, estimates.squares),
        cost,
        np.concatenate([begun, sample]),
        waits,
        keep,
    )
    state = new_state(
        Backlog(
            prompt=lengths,
            fresh=np.where(runs, progress.fresh, ends.fresh),
            known=known,
            caps=progress.caps,
            left=ends.left,
            right=ends.right,
            first=ends.first,
            groups=groups,
            seen=seen,
            counted=tokens,
        ),
        costs,
    )
    begin(state)
    state.totals.owed = progress.owed
    running = np.flatnonzero(runs)
    resume(state, running, progress.side[running], progress.prefilled[running])
    return state
