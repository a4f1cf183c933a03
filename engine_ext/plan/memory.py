"""Remembers how long answers were in earlier batches, and says how much a new request may rely on it."""

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Column, Floats
from engine_ext.errors import InputError
from engine_ext.plan.buckets import BUCKETS, EDGES, LONGEST
from engine_ext.plan.tuning import FEWEST_IN_PROFILE, MOST_DOUBT, MOST_LENT

NO_PROFILE = -1


BEGINNING, KIND = 0, 1  # columns of `Keys`
# int64 [prompts, 2], positive: what the beginning of a request's prompt is known by, and what requests of its kind are
# known by; zeros if nothing is to be remembered of it.
Keys = NDArray[np.int64]


class Profile(NamedTuple):
    """Counts answers by length bucket; float64 [BUCKETS].

    `ended`: answers that ended in the bucket. `reached`: the tokens beyond its beginning at these endings.
    """

    ended: Floats
    reached: Floats

    @classmethod
    def of(cls, tokens: Column) -> "Profile":
        """Count answers of these lengths; int64 [answers]."""
        tokens = np.clip(tokens, 1, LONGEST)
        last = np.searchsorted(EDGES, tokens - 1, side="right") - 1  # an edge ends its bucket
        ended = np.bincount(last, minlength=BUCKETS).astype(np.float64)
        beyond = np.bincount(last, weights=tokens - EDGES[last], minlength=BUCKETS)
        return cls(ended, beyond.astype(np.float64))

    @classmethod
    def parse(cls, text: str) -> "Profile":
        """Read what `text` wrote. Raises InputError."""
        found = cls(np.zeros(BUCKETS), np.zeros(BUCKETS))
        try:
            for bucket, ended, reached in json.loads(text):
                found.ended[bucket], found.reached[bucket] = ended, reached
        except (ValueError, TypeError, IndexError) as error:
            raise InputError(f"not a profile of lengths: {text[:40]!r}") from error
        counts = np.stack(found)
        if not (np.isfinite(counts).all() and (counts >= 0).all() and found.answers > 0):
            raise InputError(f"not a profile of lengths: {text[:40]!r}")
        return found

    @property
    def text(self) -> str:
        """Return it as JSON: a list of [bucket, ended, reached]."""
        buckets = np.flatnonzero(self.ended)
        rows = [
            [bucket, float(f"{self.ended[bucket]:.5g}"), float(f"{self.reached[bucket]:.5g}")]
            for bucket in buckets.tolist()
        ]
        return json.dumps(rows, separators=(",", ":"))

    @property
    def answers(self) -> float:
        return float(self.ended.sum())

    def plus(self, later: "Profile", most: float) -> "Profile":
        """Return both together; of this one, only as many answers as leave `most` in all."""
        keep = max(0.0, min(1.0, (most - later.answers) / self.answers))
        return Profile(keep * self.ended + later.ended, keep * self.reached + later.reached)


class Profiles(NamedTuple):
    """Profiles as rows of arrays; float64 [profiles, BUCKETS]."""

    ended: Floats
    reached: Floats


class Recall(NamedTuple):
    """What earlier batches say of the requests of a plan.

    `rows`: int64 [prompts], the row of `profiles` that speaks of requests like it, or NO_PROFILE.
    """

    rows: Column
    profiles: Profiles

    @classmethod
    def of(cls, profiles: Sequence[Profile | None]) -> "Recall | None":
        """Build it from the profile of each request; requests of one profile share the object."""
        known = {id(each): each for each in profiles if each is not None}
        if not known:
            return None
        places = {name: row for row, name in enumerate(known)}
        rows = np.array([places.get(id(each), NO_PROFILE) for each in profiles])
        return cls(rows, Profiles(*(np.stack(each) for each in zip(*known.values(), strict=True))))

    def loans(self, of: Column, doubt: Floats) -> "Loans":
        """Return how many answers of which profile each group borrows.

        A profile lends to the groups of its requests, in proportion to their number. `of`: int64 [prompts], the group
        of each request. `doubt`: float64 [profiles], how unlike each profile the new answers are; it divides the loan.
        """
        known = np.flatnonzero(self.rows >= 0)
        profiles = len(self.profiles.ended)
        pairs, counts = np.unique(of[known] * profiles + self.rows[known], return_counts=True)
        groups, rows = np.divmod(pairs, profiles)
        lends = np.where(doubt > MOST_DOUBT, 0.0, np.minimum(self.profiles.ended.sum(axis=1), MOST_LENT) / doubt)
        answers = lends[rows] * counts / np.bincount(self.rows[known], minlength=profiles)[rows]
        lenders = [Profile(self.profiles.ended[row], self.profiles.reached[row]) for row in rows.tolist()]
        each = zip(groups.tolist(), lenders, answers.tolist(), strict=True)
        return Loans([loan for loan in each if loan[2] > 0])


class Loans(NamedTuple):
    """What groups borrow of earlier batches: each loan is a group, a profile, and for how many answers it counts."""

    each: Sequence[tuple[int, Profile, float]]

    def by_group(self, groups: int) -> Floats:
        """Return how many answers each group borrows; float64 [groups]."""
        answers = np.zeros(groups)
        for group, _, count in self.each:
            answers[group] += count
        return answers


NO_LOANS = Loans(())


def learn(keys: Keys, tokens: Column, most: int) -> dict[int, Profile]:
    """Return the profiles of answers of these lengths, by key: the `most` that have the most answers.

    Answers to requests with the same beginning make a profile if there are enough; the others count for their kind.
    """
    known = keys[:, BEGINNING] != 0
    beginnings, rows, counts = np.unique(keys[known, BEGINNING], return_inverse=True, return_counts=True)
    key = np.where(counts[rows] >= FEWEST_IN_PROFILE, beginnings[rows], keys[known, KIND])
    found, rows, counts = np.unique(key, return_inverse=True, return_counts=True)
    answers = tokens[known][np.argsort(rows, kind="stable")]  # by key
    ends = np.cumsum(counts)
    chosen = np.argsort(-counts, kind="stable")[:most]
    return {int(found[each]): Profile.of(answers[ends[each] - counts[each] : ends[each]]) for each in chosen}


def recall(keys: Keys, remembered: Mapping[int, Profile]) -> Recall | None:
    """Return what these profiles say of the requests with these keys, or None if they say nothing."""
    if not remembered:
        return None
    numbers = np.sort(np.fromiter(remembered, np.int64, len(remembered)))
    rows = np.full(len(keys), NO_PROFILE)
    for column in (KIND, BEGINNING):  # the latter says more
        place = np.minimum(np.searchsorted(numbers, keys[:, column]), len(numbers) - 1)
        found = (numbers[place] == keys[:, column]) & (keys[:, BEGINNING] != 0)
        rows[found] = place[found]
    if not (rows >= 0).any():
        return None
    profiles = [remembered[int(number)] for number in numbers]
    return Recall(rows, Profiles(*(np.stack(each) for each in zip(*profiles, strict=True))))
