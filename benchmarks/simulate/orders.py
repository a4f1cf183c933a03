"""Fixed orders of other systems, which SGLang's scheduler runs here: BatchGen's, and Sorted-F's (arXiv 2508.06133).

Both know what all policies know: the lengths of prompts, and estimates of the answers.
"""

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.simulate.policies import Work


def decode_heavy_first(work: Work, seed: int) -> Column:
    """Return BatchGen's order: requests with the most expected output for their prompt first."""
    return np.argsort(-work.estimates.mean / work.lengths, kind="stable")


def sorted_f(work: Work, seed: int, capacity: int) -> Column:
    """Return the greedy form of Sorted-F for a KV cache of `capacity` tokens.

    Of the batches that fit and are a beginning of the remaining requests, by output or by all tokens, the one with the
    least F = outputs / size^2 comes next, its short answers first.
    """
    output, size = work.estimates.mean, work.lengths + work.estimates.mean
    orders, found = [np.argsort(each, kind="stable") for each in (output, size)], list[Column]()
    while len(orders[0]):
        beginnings = [_best_beginning(order, output, size, capacity) for order in orders]
        batch = min(beginnings, key=lambda each: float(output[each].sum()) / len(each) ** 2)
        found.append(batch[np.argsort(output[batch], kind="stable")])
        taken = np.zeros(len(output), dtype=np.bool_)
        taken[batch] = True
        orders = [order[~taken[order]] for order in orders]
    return np.concatenate(found)


def _best_beginning(order: Column, output: Floats, size: Floats, capacity: int) -> Column:
    """Return the beginning of the order with the least F that fits; at least one request."""
    fits = max(1, int(np.searchsorted(np.cumsum(size[order]), capacity, side="right")))
    quality = np.cumsum(output[order[:fits]]) / np.arange(1, fits + 1) ** 2
    return order[: int(np.argmin(quality)) + 1]
