"""Fits the pieces of the simulator's roofline by least squares, a regression like HyGen's (section 4.2).

It searches for the parameters together with the piece that each step is on: whether a step only takes as long as
reading the weights, and whether KV reads bind it.
"""

import itertools
from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Floats
from engine_ext.errors import InputError

# Positions of the parameters
GEMM, WEIGHTS, QUADRATIC, READ, OVERHEAD, HIDDEN = range(6)

PARAMETERS = ("gemm_s", "weights_s", "quadratic_s", "read_s", "overhead_s", "interference")
SHOWN_BY = {
    GEMM: "prefill_tokens + decoding",
    WEIGHTS: "prefill_tokens + decoding",
    QUADRATIC: "quadratic",
    READ: "kv_tokens",
    OVERHEAD: "seconds",
    HIDDEN: "kv_tokens",
}

FEWEST_BOUND = 4  # steps that reads must bind; fewer may only look so because of noise
STARTS = 16  # token counts from which to search for the end of the weights' floor
HIDDEN_STARTS = (1.0, 0.3, 0.1, 0.03)
SEARCHED_STEPS = 2048
ROUNDS = 50
APART = 1e-4  # share of a column that the others must leave unexplained
NO_FLOOR = 0.1  # below this share of the shortest step's time, a floor that no step shows does not matter


class Steps(NamedTuple):
    """Holds the loads of steps, or of one operator in them, and the seconds they took; columns of shape (steps,)."""

    tokens: Floats
    quadratic: Floats
    kv_tokens: Floats
    seconds: Floats


def fit(steps: Steps, known: Floats, unknown: list[int], overlapped: bool, source: str) -> Floats:
    """Fit the parameters in `unknown` and return all of them, shape (6,); `source` names the times in errors.

    Raises InputError if the steps do not determine a parameter.
    """
    _check_columns(steps, unknown, source)
    starts = [known]
    if GEMM in unknown:
        counts = np.unique(steps.tokens)
        ends = counts[np.unique(np.linspace(0, len(counts) - 1, STARTS).astype(np.int64))]
        starts = [np.where(np.arange(len(known)) == GEMM, 1.0, known) for _ in ends]
        for start, end in zip(starts, ends, strict=True):
            start[WEIGHTS] = end
    few = _thinned(steps)
    found = [_settle(few, start, [each for each in unknown if each != HIDDEN], False) for start in starts]
    if overlapped:
        found = [_settle(few, start, unknown, True) for each in found for start in _hiding(each, unknown)]
    best = min(found, key=lambda each: _squares(few, each, overlapped))
    best = _settle(steps, best, unknown, overlapped)
    _check_told(steps, best, unknown, overlapped, source)
    return best


def _hiding(fitted: Floats, unknown: list[int]) -> list[Floats]:
    """Return starts for a fit with overlap, made from one without.

    Each start takes the fitted reads for the visible share of longer reads, for one of several shares.
    """
    found = [fitted.copy() for _ in HIDDEN_STARTS]
    for start, share in zip(found, HIDDEN_STARTS, strict=True):
        start[HIDDEN] = share
        if READ in unknown:
            start[READ] /= share
    return found


def _thinned(steps: Steps) -> Steps:
    """Return as many steps of every size as a search needs."""
    order = np.argsort(steps.tokens, kind="stable")[:: -(-len(steps.tokens) // SEARCHED_STEPS)]
    return Steps(*(column[order] for column in steps))


def _settle(steps: Steps, start: Floats, unknown: list[int], overlapped: bool) -> Floats:
    """Fit, move each step to the pieces of the maxima that the fit puts it on, and repeat until nothing changes."""
    best, least, now = start, np.inf, start
    for _ in range(ROUNDS):
        fitted = _fit_pieces(steps, now, unknown, overlapped)
        squares = _squares(steps, fitted, overlapped)
        if squares < least:
            best, least = fitted, squares
        if np.allclose(fitted, now, rtol=1e-9, atol=0.0):
            break
        now = fitted
    return best


def _fit_pieces(steps: Steps, now: Floats, unknown: list[int], overlapped: bool) -> Floats:
    """Fit by least squares with every step on the piece where `now` has it; the interference is at most 1."""
    columns = _columns(steps, now, overlapped)
    fitted = now.copy()
    fixed = [each for each in range(len(now)) if each not in unknown and each != HIDDEN]
    # The interference multiplies hidden time, which is fitted too, so its column is for the change from `now`.
    rest = (
        steps.seconds - columns[:, fixed] @ now[fixed] + (columns[:, HIDDEN] * now[HIDDEN] if HIDDEN in unknown else 0)
    )
    fitted[unknown] = _non_negative(columns[:, unknown] / steps.seconds[:, None], rest / steps.seconds)
    if HIDDEN in unknown and fitted[HIDDEN] > 1:
        fitted[HIDDEN] = 1.0
        others = [each for each in unknown if each != HIDDEN]
        rest = rest - columns[:, HIDDEN]
        fitted[others] = _non_negative(columns[:, others] / steps.seconds[:, None], rest / steps.seconds)
    return fitted


def _columns(steps: Steps, now: Floats, overlapped: bool) -> Floats:
    """Return how a step's seconds grow with each parameter, shape (steps, 6).

    The seconds themselves are all columns but the last, each times its parameter.
    """
    floor = steps.tokens * now[GEMM] <= now[WEIGHTS]
    compute = np.column_stack([np.where(floor, 0.0, steps.tokens), floor & (steps.tokens > 0), steps.quadratic])
    compute_s, reads_s = compute @ now[[GEMM, WEIGHTS, QUADRATIC]], steps.kv_tokens * now[READ]
    hidden = np.minimum(compute_s, reads_s) if overlapped else np.zeros(len(floor))
    shown = np.array([1.0, now[HIDDEN] if overlapped else 1.0])
    bound = (compute_s < reads_s).astype(np.int64)  # by reads
    return np.column_stack(
        [compute * shown[bound][:, None], steps.kv_tokens * shown[1 - bound], np.ones(len(floor)), hidden]
    )


def _non_negative(columns: Floats, target: Floats) -> Floats:
    """Solve least squares with nothing below zero, by trying which of the few columns are zero."""
    scale = np.linalg.norm(columns, axis=0)
    scale[scale == 0] = 1.0
    # The same problem in few rows
    triangle: Floats = np.asarray(np.linalg.qr(np.column_stack([columns / scale, target]), mode="r"))
    rows, right = triangle[:, :-1], triangle[:, -1]
    best, least = np.zeros(len(scale)), float(right @ right)
    for size in range(len(scale), 0, -1):
        for chosen in itertools.combinations(range(len(scale)), size):
            found = np.linalg.lstsq(rows[:, chosen], right)[0]
            squares = float(np.square(rows[:, chosen] @ found - right).sum())
            if squares < least and np.all(found >= 0):
                best, least = np.zeros(len(scale)), squares
                best[list(chosen)] = found
                if size == len(scale):
                    return best / scale
    return best / scale


def _dependent(columns: Floats) -> int | None:
    """Return the first column that is zero or almost a sum of the others; None if there is none."""
    scale = np.linalg.norm(columns, axis=0)
    if not np.all(scale):
        return int(np.argmin(scale))
    triangle: Floats = np.asarray(np.linalg.qr(columns / scale, mode="r"))
    for each in range(len(scale)):
        others = np.delete(triangle, each, axis=1)
        left = triangle[:, each] - others @ np.linalg.lstsq(others, triangle[:, each])[0]
        if np.linalg.norm(left) < APART:
            return each
    return None


def _seconds(steps: Steps, fitted: Floats, overlapped: bool) -> Floats:
    return _columns(steps, fitted, overlapped)[:, :HIDDEN] @ fitted[:HIDDEN]


def relative(steps: Steps, fitted: Floats, overlapped: bool) -> Floats:
    return _seconds(steps, fitted, overlapped) / steps.seconds - 1


def _squares(steps: Steps, fitted: Floats, overlapped: bool) -> float:
    return float(np.square(relative(steps, fitted, overlapped)).sum())


def _check_columns(steps: Steps, unknown: list[int], source: str) -> None:
    """Raise InputError if a load never changes."""
    for parameter, load in ((GEMM, steps.tokens), (QUADRATIC, steps.quadratic), (READ, steps.kv_tokens)):
        if parameter in unknown and load.min() == load.max():
            raise InputError(
                f"{SHOWN_BY[parameter]} never changes where {source} was measured (rows 0 to {len(load) - 1} have "
                f"{load[0]:g}), so {PARAMETERS[parameter]} cannot be determined"
            )


def _check_told(steps: Steps, fitted: Floats, unknown: list[int], overlapped: bool, source: str) -> None:
    """Raise InputError if no step shows a parameter, or none shows it apart from the others."""
    shortest, longest = int(np.argmin(steps.tokens)), int(np.argmax(steps.tokens))
    if GEMM in unknown and not steps.tokens[longest] * fitted[GEMM] > fitted[WEIGHTS]:
        raise InputError(
            f"{SHOWN_BY[GEMM]} is too small: all steps with {source} take as long as reading the weights, even row "
            f"{longest} with {steps.tokens[longest]:g} tokens, so gemm_s cannot be determined"
        )
    columns = _columns(steps, fitted, overlapped)
    if WEIGHTS in unknown and not columns[:, WEIGHTS].any():
        at_most = steps.tokens[shortest] * fitted[GEMM]
        if at_most > NO_FLOOR * steps.seconds[shortest]:
            raise InputError(
                f"{SHOWN_BY[WEIGHTS]} is too large: no step with {source} is short enough to show weights_s, not even "
                f"row {shortest} with {steps.tokens[shortest]:g} tokens"
            )
        unknown = [each for each in unknown if each != WEIGHTS]
    if READ in unknown and overlapped:
        bound = int(np.count_nonzero(steps.kv_tokens * fitted[READ] > columns[:, HIDDEN]))
        if bound < FEWEST_BOUND:
            raise InputError(
                f"{SHOWN_BY[READ]} is too small: {bound} steps take as long as their reads, so read_s cannot be "
                f"determined apart from interference; measure {FEWEST_BOUND} such steps, or decode_attention_s"
            )
    lost = _dependent(columns[:, unknown] / steps.seconds[:, None])
    if lost is not None:
        raise InputError(
            f"{SHOWN_BY[unknown[lost]]} changes only together with the other columns where {source} was measured, so "
            f"{PARAMETERS[unknown[lost]]} cannot be determined; measure steps that differ more, or operators alone"
        )
