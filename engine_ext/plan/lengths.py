"""Estimates output lengths from what is known of a group's answers, as hazards of ending (5.1 and beyond).

A length bucket has a hazard, the chance that an answer which enters it ends in it: endings over entries. A request that
is still running inside the bucket counts as the part of an entry that it has covered. So it counts as a lower bound: it
is neither ignored nor taken for an ending. A group's hazards lean on its parent's as long as it has seen few answers
itself.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.plan.buckets import BUCKETS, EDGES, LONGEST, bucket_of
from engine_ext.plan.groups import Groups
from engine_ext.plan.memory import NO_LOANS, Loans, Recall
from engine_ext.plan.tuning import PRIOR_MEAN

UNKNOWN, NOT_ASKED = -1, -2  # in place of a length: still to be learned, or never to be known


class Seen(NamedTuple):
    """Counts answers by group and length bucket, a group with all groups below it; float64 [groups, BUCKETS].

    `entered` counts entries, in part while an answer is still running in the bucket; `ended` counts endings; `reached`
    adds up the tokens beyond the bucket's beginning at these endings.
    """

    entered: Floats
    ended: Floats
    reached: Floats

    @classmethod
    def nothing(cls, groups: int) -> "Seen":
        return cls(np.zeros((groups, BUCKETS)), np.zeros((groups, BUCKETS)), np.zeros((groups, BUCKETS)))

    def copy(self) -> "Seen":
        return Seen(self.entered.copy(), self.ended.copy(), self.reached.copy())


class Outlook(NamedTuple):
    """Says what to expect of an answer that has reached the beginning of a bucket.

    `hazard` is the chance of ending in the bucket, `ends_at` the mean tokens beyond its beginning in that case; float64
    [groups, BUCKETS]. `stays` is the chance of reaching a bucket at all, `rest` and `rest_squared` the means of the
    tokens still to come and of their square; float64 [groups, BUCKETS + 1].
    """

    hazard: Floats
    ends_at: Floats
    stays: Floats
    rest: Floats
    rest_squared: Floats

    @classmethod
    def blank(cls, groups: int) -> "Outlook":
        return cls(
            np.empty((groups, BUCKETS)),
            np.empty((groups, BUCKETS)),
            np.ones((groups, BUCKETS + 1)),
            np.zeros((groups, BUCKETS + 1)),
            np.zeros((groups, BUCKETS + 1)),
        )


class GroupTree(NamedTuple):
    """Holds what compiled functions need of `Groups`, and `caps`: int64 [groups], tokens that no answer exceeds."""

    parent: Column
    leaning: Floats
    caps: Column

    @classmethod
    def of(cls, groups: Groups, caps: Column) -> "GroupTree":
        """Build the tree from groups and from `caps`, the max_tokens of each request."""
        return cls(groups.parent.copy(), groups.leaning.copy(), group_caps(groups, caps))


@dataclass(frozen=True, slots=True)
class Estimates:
    """Holds the mean, mean square and a high quantile of each request's output in tokens; float64 [prompts]."""

    mean: Floats
    squares: Floats
    high: Floats


def see(groups: Groups, requests: Column, tokens: Column, finished: NDArray[np.bool_], loans: Loans = NO_LOANS) -> Seen:
    """Count answers: the `tokens` that each of `requests` has generated so far, and whether it has finished there.

    In the groups above its own, an answer weighs more the less often its group was sampled: lengths are sampled where
    they are uncertain, so their plain mean would not be the mean of all requests. `loans`: answers of earlier batches.
    """
    seen, of = Seen.nothing(len(groups)), groups.of[requests]
    asked = np.bincount(of, minlength=len(groups)) + loans.by_group(len(groups))
    size = np.bincount(groups.of, minlength=len(groups))
    # Without these weights, means of small windows were three times too high.
    lent = size / np.where(asked > 0, asked, 1.0) * (asked.sum() / max(1, size[asked > 0].sum()))
    for group, count, done in zip(of.tolist(), tokens.tolist(), finished.tolist(), strict=True):
        record(seen, groups.parent, group, 0, count, done, lent[group])
    for group, profile, answers in loans.each:
        _lend(seen, groups.parent, group, profile.ended, profile.reached, answers, lent[group])
    return seen


def borrow(
    recall: Recall | None, groups: Groups, requests: Column, tokens: Column, finished: NDArray[np.bool_]
) -> Loans:
    """Return what the groups borrow of earlier batches, as far as answers so far do not contradict it; see `see`."""
    return recall.loans(groups.of, _doubt(recall, requests, tokens, finished)) if recall else NO_LOANS


def _doubt(recall: Recall, requests: Column, tokens: Column, finished: NDArray[np.bool_]) -> Floats:
    """Return how unlike its memory the answers to each profile's requests are; float64 [profiles], at least 1."""
    ended = recall.profiles.ended
    so_far, rows = Seen.nothing(len(ended)), recall.rows[requests]
    alone = np.full(len(ended), -1)
    known = rows >= 0
    for row, count, done in zip(rows[known].tolist(), tokens[known].tolist(), finished[known].tolist(), strict=True):
        record(so_far, alone, row, 0, count, done, 0.0)
    entered = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]
    # Beyond its longest answer a profile says nothing, so that endings there must not make up for those it missed.
    says = entered > 0
    hazard = ended / np.where(says, entered, 1.0)
    compared = zip(so_far.entered * says, so_far.ended * says, hazard, strict=True)
    return np.array([max(1.0, _unlikeness(*each)) for each in compared])


def look_ahead(seen: Seen, groups: Groups, caps: Column) -> Outlook:
    """Return the outlook of every group; `caps` is int64 [groups], tokens that no answer of the group exceeds."""
    outlook, tree = Outlook.blank(len(groups)), GroupTree(groups.parent, groups.leaning, caps)
    for group in range(len(groups)):  # parents come first
        refresh(group, tree, seen, outlook)
    return outlook


def group_caps(groups: Groups, caps: Column) -> Column:
    """Return the largest max_tokens of the requests in each group and below; int64 [groups]."""
    most = np.zeros(len(groups), dtype=np.int64)
    np.maximum.at(most, groups.of, np.minimum(caps, LONGEST))
    for group in range(len(groups) - 1, 0, -1):
        most[groups.parent[group]] = max(most[groups.parent[group]], most[group])
    return np.maximum(most, 1)


def estimate(groups: Groups, outlook: Outlook, caps: Column, known: Column, quantile: float = 0.9) -> Estimates:
    """Return the mean, mean square and a high quantile of each output.

    `caps` and `known` are int64 [prompts]; `known` is below zero where the length is not known.
    """
    high = np.array(
        [quantile_of(outlook.hazard[group], outlook.ends_at[group], quantile) for group in range(len(groups))]
    )
    of, top = groups.of, np.minimum(caps, LONGEST).astype(np.float64)
    is_known, exact = known >= 0, known.astype(np.float64)
    mean = np.minimum(outlook.rest[of, 0], top)
    squares = np.minimum(outlook.rest_squared[of, 0], top * np.maximum(mean, 1))
    return Estimates(
        np.where(is_known, exact, mean),
        np.where(is_known, exact**2, np.maximum(squares, mean**2)),
        np.where(is_known, exact, np.minimum(high[of], top)),
    )


@compiled
def record(seen: Seen, parent: Column, group: int, before: int, now: int, finished: bool, lent: float) -> None:
    """Count an answer that grew from `before` to `now` tokens, and may have finished, for its group and those above.

    `lent` is the number of answers that it counts for in the groups above.
    """
    first, last = bucket_of(before), bucket_of(max(now - 1, 0))  # a bucket's end belongs to it
    weight = 1.0
    while group >= 0:
        for bucket in range(first, last + 1):
            low, high = max(before, EDGES[bucket]), min(now, EDGES[bucket + 1])
            seen.entered[group, bucket] += weight * (high - low) / (EDGES[bucket + 1] - EDGES[bucket])
        if finished:
            seen.entered[group, last] += weight * (EDGES[last + 1] - now) / (EDGES[last + 1] - EDGES[last])
            seen.ended[group, last] += weight
            seen.reached[group, last] += weight * (now - EDGES[last])
        group, weight = parent[group], lent


@compiled
def _lend(seen: Seen, parent: Column, group: int, ended: Floats, reached: Floats, answers: float, lent: float) -> None:
    """Count a profile's answers as if they were `answers` of a group, and `lent` times as many of those above it."""
    weight = answers / ended.sum()
    while group >= 0:
        entered = 0.0
        for bucket in range(BUCKETS - 1, -1, -1):
            entered += weight * ended[bucket]
            seen.entered[group, bucket] += entered
            seen.ended[group, bucket] += weight * ended[bucket]
            seen.reached[group, bucket] += weight * reached[bucket]
        group, weight = parent[group], answers * lent / ended.sum()


@compiled
def refresh(group: int, tree: GroupTree, seen: Seen, outlook: Outlook) -> None:
    """Compute one group's hazards and outlook from what was seen; its parent's must be computed already."""
    above, leaning, cap = tree.parent[group], tree.leaning[group], tree.caps[group]
    entered, ended, reached = seen.entered[group], seen.ended[group], seen.reached[group]
    hazard, ends_at = outlook.hazard, outlook.ends_at
    stays, rest, rest_squared = outlook.stays[group], outlook.rest[group], outlook.rest_squared[group]
    if above >= 0:
        # A group unlike its parent is not held to it: a few long answers tell more than many short ones above.
        leaning /= max(1.0, _unlikeness(entered, ended, hazard[above]))
    for bucket in range(BUCKETS):
        width = EDGES[bucket + 1] - EDGES[bucket]
        if above >= 0:
            parents, parents_end = hazard[above, bucket], ends_at[above, bucket]
        else:
            # Without any answers: Lomax of shape 3, by which a long answer is likely to grow by another half.
            survives = (EDGES[bucket] + 2 * PRIOR_MEAN) / (EDGES[bucket + 1] + 2 * PRIOR_MEAN)
            parents, parents_end = 1 - survives**3, 0.5 * width
        # Section 5.1 takes a sibling's mean if nothing was sampled; here siblings lend through the parent, by weight.
        hazard[group, bucket] = (ended[bucket] + leaning * parents) / (entered[bucket] + leaning)
        ends_at[group, bucket] = (reached[bucket] + leaning * parents_end) / (ended[bucket] + leaning)
        goes_on = 1 - hazard[group, bucket] if EDGES[bucket + 1] < cap else 0.0
        stays[bucket + 1] = stays[bucket] * goes_on
    rest[BUCKETS] = 0.0
    rest_squared[BUCKETS] = 0.0
    for bucket in range(BUCKETS - 1, -1, -1):
        width = float(min(EDGES[bucket + 1], cap) - EDGES[bucket])
        if width <= 0:
            continue
        ends, at = hazard[group, bucket], min(ends_at[group, bucket], width)
        later = rest[bucket + 1]
        rest[bucket] = ends * at + (1 - ends) * (width + later)
        # Mem(r) grows with d^2 (section 4.1), which the square of a mean would underestimate.
        rest_squared[bucket] = ends * at * at + (1 - ends) * (
            width * width + 2 * width * later + rest_squared[bucket + 1]
        )


@compiled
def _unlikeness(entered: Floats, ended: Floats, hazard: Floats) -> float:
    """Return how far a group's endings are from what these hazards predict for it: the log-rank test's chi-square."""
    missed, variance = 0.0, 1.0
    for bucket in range(BUCKETS):
        expected = entered[bucket] * hazard[bucket]
        missed += ended[bucket] - expected
        variance += expected * (1 - hazard[bucket])
    return missed * missed / variance


@compiled
def quantile_of(hazard: Floats, ends_at: Floats, quantile: float) -> float:
    """Return the tokens that an answer of the group exceeds with a chance of only 1 - quantile."""
    stays = 1.0
    for bucket in range(BUCKETS):
        if stays * (1 - hazard[bucket]) <= 1 - quantile:
            return min(EDGES[bucket] + 2 * ends_at[bucket], float(EDGES[bucket + 1]))
        stays *= 1 - hazard[bucket]
    return float(LONGEST)


@compiled
def longest_of(stays: Floats, answers: float) -> float:
    """Return the tokens to expect of the longest of so many answers: at most one should get beyond them."""
    bucket = 0
    while bucket < BUCKETS - 1 and stays[bucket + 1] * answers > 1:
        bucket += 1
    return float(EDGES[bucket + 1])
