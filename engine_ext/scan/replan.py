"""Plans again while requests run: splits the waiting requests between the two ends with all that was learned.

Running requests continue.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Bools, Column
from engine_ext.compiled import compiled
from engine_ext.costs.cost import CostModel
from engine_ext.plan.families import find_families
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import UNKNOWN, borrow, estimate, group_caps, look_ahead, see
from engine_ext.plan.memory import Recall
from engine_ext.plan.resources import Requests
from engine_ext.plan.sample import choose_sample
from engine_ext.plan.tree import PrefixTree
from engine_ext.plan.tuning import KEEP_SHARING, SAMPLE
from engine_ext.scan.books import begin
from engine_ext.scan.ends import two_ends
from engine_ext.scan.state import Backlog, State, StepCosts, new_state
from engine_ext.scan.tiers import Urgency
from engine_ext.scan.tuning import FEWEST_CHANGES, MORE_ANSWERS, PATIENCE


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of all requests, as columns by request; int64 and bool [prompts].

    `caps`: max_tokens. `known`: output tokens or UNKNOWN. `sampled`: whether a length is known because the request ran
    as a sample, so that it informs the estimates of other requests. `tokens`: output tokens so far. A request waits if
    it neither `runs` nor has `ended`. `prefilled`: whether the prompt of a running request is computed. `fresh`,
    `side`: as they were at admission. `urgency`: None for none. `recall`: what earlier batches say of the lengths.
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
    urgency: Urgency | None = None
    recall: Recall | None = None

    @classmethod
    def at_first(cls, caps: Column, known: Column, sampled: Bools) -> "Progress":
        """Create the initial progress: every request waits."""
        columns, bools = np.zeros((3, len(caps)), dtype=np.int64), np.zeros((3, len(caps)), dtype=np.bool_)
        return cls(caps, known, sampled, columns[0], bools[0], bools[1], bools[2], columns[1], columns[2])

    @property
    def learned(self) -> int:
        """The number of answers from which lengths were learned."""
        return int(np.count_nonzero(self.sampled | self.ended & (self.known == UNKNOWN)))


class Replanned(NamedTuple):
    """The scan's state from here on, and the seconds after which deadlines ask for another look."""

    state: State
    look_again_s: float


def answers_before_next(learned: int) -> int:
    """Return how many answers must end before a plan that had learned from `learned` answers is replaced."""
    return max(FEWEST_CHANGES, int(MORE_ANSWERS * learned))


@compiled
def is_outdated(waiting: int, has_drifted: bool, steps: int, answers: int) -> bool:
    """Return whether enough was learned for another plan.

    `waiting`, `has_drifted`: see sweep.py. `steps`: steps since the plan was made. `answers`: answers that must still
    end before the next plan.
    """
    return waiting >= FEWEST_CHANGES and (answers <= 0 or (steps >= PATIENCE and has_drifted))


def plan_backlog(
    tree: PrefixTree,
    groups: Groups,
    progress: Progress,
    cost: CostModel,
    costs: StepCosts,
    generator: np.random.Generator,
    share: float = SAMPLE,
    keep: float = KEEP_SHARING,
) -> Replanned:
    """Plan the waiting requests, and return the scan's state from here on.

    `share`: share of the requests with unknown lengths, including those that already ran, to run first as a sample.
    `keep`: share of the possible prefix sharing that splits must keep.
    """
    tokens, ended, runs, known = progress.tokens, progress.ended, progress.runs, progress.known
    lengths = tree.lengths
    told = np.flatnonzero(progress.sampled | (known == UNKNOWN) & (ended | (tokens > 0)))
    so_far = np.where(progress.sampled, known, tokens)
    # Answers that have not ended count as lower bounds on their lengths (docs/planner.md).
    answers = told, so_far[told], (progress.sampled | ended)[told]
    loans = borrow(progress.recall, groups, *answers)
    seen = see(groups, *answers, loans)
    outlook = look_ahead(seen, groups, group_caps(groups, progress.caps))
    estimates = estimate(groups, outlook, progress.caps, np.where(ended, tokens, known))
    waits = ~runs & ~ended
    begun = np.flatnonzero(waits & (tokens > 0))
    asked = np.where(waits & (tokens == 0) | (known >= 0), known, tokens)
    # What earlier batches taught need not be asked again.
    ran = np.bincount(groups.of[told], minlength=len(groups)) + loans.by_group(len(groups)).astype(np.int64)
    # BlendServe 5.1: the sample costs nothing extra, because its answers are part of the output.
    family = find_families(tree)
    sample = choose_sample(groups, outlook, lengths.astype(np.float64), asked, generator, family, share, ran)
    ends = two_ends(
        tree,
        Requests(lengths.astype(np.float64), estimates.mean, estimates.squares),
        cost,
        np.concatenate([begun, sample]),  # retracted requests come before even the sample
        waits,
        keep,
        progress.urgency,
    )
    is_first = np.zeros(len(tokens), dtype=np.bool_)
    is_first[begun], is_first[sample] = True, True
    state = new_state(
        Backlog(
            prompt=lengths,
            fresh=np.where(runs, progress.fresh, ends.fresh),
            known=known,
            caps=progress.caps,
            left=ends.left,
            right=ends.right,
            first=is_first,
            tier=ends.tier,
            groups=groups,
            seen=seen,
            counted=tokens,
        ),
        costs,
    )
    running = np.flatnonzero(runs)
    begin(state, running, progress.side[running], progress.prefilled[running])
    return Replanned(state, progress.urgency.look_again_s(ends.total_s, waits) if progress.urgency else np.inf)
