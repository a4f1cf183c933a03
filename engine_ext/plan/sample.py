"""Chooses which requests to run first, so that their answers predict the lengths of the others (5.1)."""

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.errors import InputError
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import NOT_ASKED, UNKNOWN, Outlook, Seen, look_ahead, see
from engine_ext.plan.tuning import SAMPLE, SAMPLE_FEW, SAMPLE_MOST


def choose_sample(
    groups: Groups,
    outlook: Outlook,
    prompt_tokens: Floats,
    known: Column,
    generator: np.random.Generator,
    family: Column,
    share: float = SAMPLE,
    ran: Column | None = None,
) -> Column:
    """Choose about `share` of the requests with unknown lengths, in the order in which to run them; int64.

    Up to half of them go to groups of which nothing is known, one to each, the highest groups first. The rest goes
    where it tells most (Neyman): to each group in proportion to its requests and to the spread of memory work that its
    outlook leaves open, but no group's sample may become most of its work. Call again with a better outlook to place a
    second half better than the first. `known` is int64 [prompts], output tokens, UNKNOWN or NOT_ASKED. `ran` is int64
    [groups], requests that have begun, or whose like is known, and count as sampled. `family` is int64 [prompts]
    (families.py): its members are chosen and run together, because those that come later would have to compute its
    prefix again.
    """
    if not 0 < share <= 1:
        raise InputError(f"the share to sample must be above 0 and at most 1, not {share}")
    open_requests = np.flatnonzero(known == UNKNOWN)
    of = groups.of[open_requests]
    waiting = np.bincount(of, minlength=len(groups))
    if len(open_requests) == 0:
        return open_requests
    ran = np.zeros_like(waiting) if ran is None else ran
    size = waiting + ran
    prompts = np.bincount(of, weights=prompt_tokens[open_requests], minlength=len(groups)) / np.maximum(waiting, 1)
    mean, squares = outlook.rest[:, 0], outlook.rest_squared[:, 0]
    # Mem(r) = p d + d^2 / 2 grows by p + d with each output token (section 4.1).
    spread = (prompts + mean) * np.sqrt(np.maximum(squares - mean**2, 0.0))
    most = np.minimum(size, np.maximum(SAMPLE_FEW, np.ceil(SAMPLE_MOST * share * size).astype(np.int64)))
    total = int(np.ceil(share * size.sum()))
    asked = np.bincount(groups.of[known >= 0], minlength=len(groups)) > 0
    new = np.flatnonzero((waiting > 0) & ~asked)
    # One request for each of hundreds of groups would leave nothing for the uncertain ones (docs/simulator.md).
    new = new[np.lexsort((-size[new], groups.levels[new]))][: (total + 1) // 2]
    counts = np.maximum(_shared_out(total, most, size * spread, new) - ran, 0)
    # Take the first of each group in a random order of families; the first of each new group goes to the front.
    shuffled = _shuffled(family[open_requests], generator)
    by_group = shuffled[np.argsort(of[shuffled], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(waiting)])
    place = np.arange(len(by_group)) - starts[of[by_group]]
    chosen = by_group[place < counts[of[by_group]]]
    alone = np.full(len(groups), len(groups))
    alone[new] = np.arange(len(new))
    first_of = np.where(place[place < counts[of[by_group]]] == 0, alone[of[chosen]], len(groups))
    chosen = chosen[_together(family[open_requests[chosen]], first_of)]
    return open_requests[chosen[: max(0, total - int(ran.sum()))]]


def ask_sample(
    groups: Groups,
    caps: Column,
    prompt_tokens: Floats,
    truth: Column,
    generator: np.random.Generator,
    family: Column,
    share: float,
) -> tuple[Column, Seen]:
    """Choose a sample in two halves, the second guided by the first's answers; return it and what was seen.

    `caps` is int64 [groups]. `truth` is int64 [prompts], the output of each request, below zero where it is not known.
    `family`: see `choose_sample`.
    """
    if not 0 < share <= 1:
        raise InputError(f"the share to sample must be above 0 and at most 1, not {share}")
    settled, seen, chosen = np.where(truth < 0, NOT_ASKED, UNKNOWN), Seen.nothing(len(groups)), np.empty(0, np.int64)
    total = int(np.ceil(share * np.count_nonzero(settled == UNKNOWN)))
    for wanted in (total // 2, total):
        outlook, left = look_ahead(seen, groups, caps), np.count_nonzero(settled == UNKNOWN)
        if wanted == len(chosen) or left == 0:
            continue
        part = (wanted - len(chosen)) / left
        half = choose_sample(groups, outlook, prompt_tokens, settled, generator, family, part)
        settled[half] = truth[half]
        chosen = np.sort(np.concatenate([chosen, half]))
        seen = see(groups, chosen, truth[chosen], np.ones(len(chosen), dtype=np.bool_))
    return chosen, seen


def _shuffled(family: Column, generator: np.random.Generator) -> Column:
    """Return requests in a random order in which each family stands together; int64 [requests].

    A family comes first with the same chance as any other, however large it is: else large ones would fill the sample.
    """
    _, number = np.unique(family, return_inverse=True)
    by_family = generator.permutation(int(number.max(initial=-1)) + 1)[number]
    return np.lexsort((generator.permutation(len(family)), by_family))


def _together(family: Column, rank: Column) -> Column:
    """Return the order of these requests by rank, in which each family follows its first member; int64 [requests]."""
    _, number = np.unique(family, return_inverse=True)
    order = np.argsort(rank, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    first = np.full(len(order), len(order))
    np.minimum.at(first, number, place)
    return np.lexsort((place, first[number]))


def _shared_out(total: int, size: Column, weight: Floats, new: Column) -> Column:
    """Divide `total` among groups in proportion to `weight`, up to each group's `size`, in whole numbers.

    Each group in `new` gets at least 1.
    """
    counts = np.zeros_like(size)
    counts[new] = 1
    left = total - len(new)
    weight = np.where(counts < size, weight, 0.0)
    while left > 0 and weight.sum() > 0:
        extra = np.minimum(np.floor(left * weight / weight.sum()).astype(np.int64), size - counts)
        if extra.sum() == 0:
            best = np.argsort(-weight, kind="stable")[:left]
            extra[best] = np.minimum(1, size - counts)[best]
        if extra.sum() == 0:
            break
        counts = counts + extra
        left -= int(extra.sum())
        weight = np.where(counts < size, weight, 0.0)
    return counts
