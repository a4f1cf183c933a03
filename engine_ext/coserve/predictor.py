"""Predicts how long a step takes: the cost model's time, and a regression of what the cost model misses.

HyGen (equation 1) fits a step's seconds to its tokens, their squares and the numbers of its requests. The cost model
knows most of that before any step runs, and what HyGen's features leave out: how much KV cache the decodes read. So
only the rest is left to learn, from the steps that have run.
"""

from typing import NamedTuple

import numpy as np

from engine_ext.arrays import Column, Floats
from engine_ext.compiled import compiled
from engine_ext.coserve.tuning import LEAST_PREDICTED, MARGIN_QUANTILE, OUTLIER, PREDICTOR_KEEPS, RECENT, REFIT, RIDGE
from engine_ext.costs.engine_model import StepModel, compute_time, step_time

FEATURES = 7
SCALES = np.array([1.0, 1e3, 1e5, 1e6, 1e4, 1e1, 1e2])  # typical sizes of the features, so that one ridge suits all


class Load(NamedTuple):
    """The work of one step.

    `prompt_tokens`: those of all its `prompts`; `quadratic`: the sum of end^2 - begin^2 over their chunks. `kv_tokens`:
    KV tokens that the `decoding` requests read.
    """

    prompt_tokens: int
    quadratic: float
    prompts: int
    decoding: int
    kv_tokens: int


class Predictor(NamedTuple):
    """The cost model's numbers, and what the regression has learned.

    `weights`: seconds per feature, float64 [FEATURES]. `gram`, `moment`: weighted sums over the steps so far, of the
    features' products and of their products with what the cost model missed. `errors`: of the last steps, as shares of
    the prediction; a positive one is a step that took longer. `observed`: how many steps there were. `margin`: by which
    share of a prediction nine of ten recent steps took at most longer.
    """

    model: StepModel
    weights: Floats
    gram: Floats
    moment: Floats
    errors: Floats
    observed: Column
    margin: Floats


def new_predictor(model: StepModel) -> Predictor:
    """Return a predictor that knows the cost model and no step yet."""
    return Predictor(
        model,
        np.zeros(FEATURES),
        np.zeros((FEATURES, FEATURES)),
        np.zeros(FEATURES),
        np.zeros(RECENT),
        np.zeros(1, dtype=np.int64),
        np.zeros(1),
    )


@compiled
def predict(predictor: Predictor, load: Load) -> float:
    """Return the seconds that a step is expected to take, without a margin; 0 for an empty step."""
    base = _by_cost_model(predictor.model, load)
    if base == 0.0:
        return 0.0
    return max(LEAST_PREDICTED * base, base + _correction(predictor, load))


@compiled
def with_margin(predictor: Predictor, load: Load) -> float:
    """Return the seconds that nine of ten such steps do not exceed."""
    return predict(predictor, load) * (1.0 + predictor.margin[0])


@compiled
def observe(predictor: Predictor, load: Load, seconds: float) -> None:
    """Learn from a step that took so many seconds."""
    base = _by_cost_model(predictor.model, load)
    if base == 0.0 or seconds <= 0.0:
        return
    expected = predict(predictor, load)
    seconds = min(seconds, OUTLIER * expected)
    predictor.errors[predictor.observed[0] % RECENT] = seconds / expected - 1.0
    predictor.observed[0] += 1
    features = _features(load)
    weight = 1.0 / (base * base)  # relative errors count, so that short steps matter as much as long ones
    for row in range(FEATURES):
        for column in range(FEATURES):
            predictor.gram[row, column] *= PREDICTOR_KEEPS
            predictor.gram[row, column] += weight * features[row] * features[column]
        predictor.moment[row] = PREDICTOR_KEEPS * predictor.moment[row] + weight * features[row] * (seconds - base)
    if predictor.observed[0] % REFIT == 0:
        _refit(predictor)


@compiled
def longest_chunk(predictor: Predictor, load: Load, before: int, seconds: float, most: int) -> int:
    """Return the most prompt tokens, up to `most`, with which a step of this load still ends within `seconds`.

    They are the next tokens of one prompt that has `before` tokens computed. This is the inverse of `with_margin`.
    """
    least, largest = 0, most
    while least < largest:
        tokens = (least + largest + 1) // 2
        if with_margin(predictor, with_chunk(load, before, tokens)) <= seconds:
            least = tokens
        else:
            largest = tokens - 1
    return least


@compiled
def with_chunk(load: Load, before: int, tokens: int) -> Load:
    """Return the load with this many more prompt tokens, of one prompt that has `before` tokens computed."""
    quadratic = (float(before) + tokens) ** 2 - float(before) ** 2
    return Load(
        load.prompt_tokens + tokens, load.quadratic + quadratic, load.prompts + 1, load.decoding, load.kv_tokens
    )


@compiled
def with_decodes(load: Load, decoding: int, kv_tokens: int) -> Load:
    """Return the load with this many more decodes, which read so many KV tokens."""
    return Load(load.prompt_tokens, load.quadratic, load.prompts, load.decoding + decoding, load.kv_tokens + kv_tokens)


@compiled
def _by_cost_model(model: StepModel, load: Load) -> float:
    if load.prompt_tokens + load.decoding == 0:
        return 0.0
    compute = compute_time(model, load.prompt_tokens + load.decoding, load.quadratic)
    return step_time(model, compute, load.kv_tokens * model.read_s)


@compiled
def _features(load: Load) -> Floats:
    prompts, kv = float(load.prompt_tokens), float(load.kv_tokens)
    raw = np.array([1.0, prompts, kv, prompts * prompts, float(load.decoding) ** 2, load.prompts, load.decoding])
    return raw / SCALES


@compiled
def _correction(predictor: Predictor, load: Load) -> float:
    if predictor.observed[0] < REFIT:
        return 0.0
    return float(np.sum(predictor.weights * _features(load)))


@compiled
def _refit(predictor: Predictor) -> None:
    """Solve the regression, and measure the margin that covers MARGIN_QUANTILE of the recent errors."""
    gram = predictor.gram.copy()
    ridge = RIDGE * np.trace(gram) / FEATURES
    for row in range(FEATURES):
        gram[row, row] += ridge
    predictor.weights[:] = _solve(gram, predictor.moment.copy())
    recent = predictor.errors[: min(RECENT, predictor.observed[0])]
    predictor.margin[0] = max(0.0, float(np.quantile(recent, MARGIN_QUANTILE)))


@compiled
def _solve(matrix: Floats, right: Floats) -> Floats:
    """Solve a positive definite system by elimination; numba's own solver needs scipy, which the server has not."""
    size = len(right)
    for pivot in range(size):
        for row in range(pivot + 1, size):
            factor = matrix[row, pivot] / matrix[pivot, pivot]
            for column in range(pivot, size):
                matrix[row, column] -= factor * matrix[pivot, column]
            right[row] -= factor * right[pivot]
    for row in range(size - 1, -1, -1):
        for column in range(row + 1, size):
            right[row] -= matrix[row, column] * right[column]
        right[row] /= matrix[row, row]
    return right
