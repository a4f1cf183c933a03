"""Which requests to run first, so that their answers tell the lengths of the others (5.1)."""

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.errors import InputError
from engine_ext.plan.groups import Groups
from engine_ext.plan.lengths import NOT_ASKED, UNKNOWN, Outlook, Seen, look_ahead, see

SHARE = 0.01
FEW = 8  # requests of a group that may always be sampled
MOST = 16  # times the share, of one group


def choose_sample(
    groups: Groups,
    outlook: Outlook,
    prompt_tokens: Floats,
    known: Column,
    generator: np.random.Generator,
    share: float = SHARE,
    ran: Column | None = None,
) -> Column:
    """About `share` of the requests whose length is not known, in the order in which to run them; int64.

    Up to half of them go to groups of which nothing is known, one to each, the highest first. The rest goes where it
    tells most (Neyman): to a group in proportion to its requests and to the spread of the memory work that its outlook
    leaves open, but no group's sample may become most of its work. Ask again with a better outlook to place a second
    half better than the first. `known`: int64 [prompts], output tokens, UNKNOWN or NOT_ASKED. `ran`: int64 [groups],
    requests that have begun and count as sampled.
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
    spread = (prompts + mean) * np.sqrt(np.maximum(squares - mean**2, 0.0))
    most = np.minimum(size, np.maximum(FEW, np.ceil(MOST * share * size).astype(np.int64)))
    total = int(np.ceil(share * size.sum()))
    asked = np.bincount(groups.of[known >= 0], minlength=len(groups)) > 0
    new = np.flatnonzero((waiting > 0) & ~asked)
    new = new[np.lexsort((-size[new], groups.levels[new]))][: (total + 1) // 2]
    counts = np.maximum(_shared_out(total, most, size * spread, new) - ran, 0)
    # The first of each group in a random order; those that tell of a group of which nothing is known stand in front.
    shuffled = generator.permutation(len(open_requests))
    by_group = shuffled[np.argsort(of[shuffled], kind="stable")]
    starts = np.concatenate([[0], np.cumsum(waiting)])
    place = np.arange(len(by_group)) - starts[of[by_group]]
    chosen = by_group[place < counts[of[by_group]]]
    alone = np.full(len(groups), len(groups))
    alone[new] = np.arange(len(new))
    first_of = np.where(place[place < counts[of[by_group]]] == 0, alone[of[chosen]], len(groups))
    chosen = chosen[np.argsort(first_of, kind="stable")]
    return open_requests[chosen[: max(0, total - int(ran.sum()))]]


def ask_sample(
    groups: Groups, caps: Column, prompt_tokens: Floats, truth: Column, generator: np.random.Generator, share: float
) -> tuple[Column, Seen]:
    """Choose a sample in two halves, the second where the answers to the first say; the requests, and what was seen.

    `caps`: int64 [groups]. `truth`: int64 [prompts], the output of each request, below zero where nobody can tell.
    """
    if not 0 < share <= 1:
        raise InputError(f"the share to sample must be above 0 and at most 1, not {share}")
    settled, seen, chosen = np.where(truth < 0, NOT_ASKED, UNKNOWN), Seen.nothing(len(groups)), np.empty(0, np.int64)
    total = int(np.ceil(share * np.count_nonzero(settled == UNKNOWN)))
    for wanted in (total // 2, total):
        outlook, left = look_ahead(seen, groups, caps), np.count_nonzero(settled == UNKNOWN)
        if wanted == len(chosen) or left == 0:
            continue
        half = choose_sample(groups, outlook, prompt_tokens, settled, generator, (wanted - len(chosen)) / left)
        settled[half] = truth[half]
        chosen = np.sort(np.concatenate([chosen, half]))
        seen = see(groups, chosen, truth[chosen], np.ones(len(chosen), dtype=np.bool_))
    return chosen, seen


def _shared_out(total: int, size: Column, weight: Floats, new: Column) -> Column:
    """Whole numbers of about this sum, in proportion to weights, up to the group's size; for new groups at least 1."""
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
