"""An engine model fitted to measured steps, as HyGen (section 4.2) and OOCO (section 3.3.2) fit theirs.

A regression like HyGen's, on the pieces of the simulator's roofline: which steps are on the floor of the weights, and
which are bound by reads, is searched together with the parameters.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine_ext.simulate.model import INTERFERENCE, Clock, EngineModel

Floats = NDArray[np.float64]

# Places of the parameters
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
OPERATORS: Mapping[str, tuple[int, ...]] = {
    "gemm_s": (GEMM, WEIGHTS),
    "prefill_attention_s": (QUADRATIC, OVERHEAD),  # what a kernel costs however little it has to do
    "decode_attention_s": (READ, OVERHEAD),
}

FEWEST_STEPS = 12
FEWEST_OF_OPERATOR = 3
FEWEST_BOUND = 4  # steps that reads must bind; fewer look so by noise
STARTS = 16  # token counts from which the floor's end is searched
HIDDEN_STARTS = (1.0, 0.3, 0.1, 0.03)
SEARCHED_STEPS = 2048
ROUNDS = 50
APART = 1e-4  # share of a column that the others must leave unexplained
NO_FLOOR = 0.1  # share of the shortest step's time below which a floor that no step shows does not matter


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Measured steps, a row each; columns of shape (steps,).

    `quadratic`: the sum over prefill chunks of end^2 - begin^2, tokens squared; `decoding`: requests; `kv_tokens`: KV
    tokens that these read; `seconds` of the whole step. Times of operators run alone, in seconds over all layers, are
    NaN where not measured. Raises ValueError, which names the field and the row, counted from 0.
    """

    prefill_tokens: Floats
    quadratic: Floats
    decoding: Floats
    kv_tokens: Floats
    seconds: Floats
    gemm_s: Floats | None = None
    prefill_attention_s: Floats | None = None
    decode_attention_s: Floats | None = None

    def __post_init__(self) -> None:
        steps = len(self.seconds)
        for each in dataclasses.fields(self):
            column: Floats | None = getattr(self, each.name)
            if column is None:
                continue
            if column.shape != (steps,):
                raise ValueError(f"{each.name} has shape {column.shape}, and seconds {self.seconds.shape}")
            bad = ~np.isfinite(column) | (column < 0)
            if each.name in OPERATORS:
                bad &= ~np.isnan(column)
            _refuse(bad, each.name, column, "must be a number from 0 up")
        _refuse(self.seconds == 0, "seconds", self.seconds, "must be above 0")
        _refuse(self.tokens == 0, "prefill_tokens", self.prefill_tokens, "without decoding either, is no step")
        for name, of in (("quadratic", "prefill_tokens"), ("kv_tokens", "decoding")):
            load, cause = getattr(self, name), getattr(self, of)
            _refuse((load > 0) != (cause > 0), name, load, f"must be above 0 where {of} is, and only there")
        for name, load in self._loads.items():
            if (times := getattr(self, name)) is not None:
                _refuse((load > 0) & (times == 0), name, times, "must be above 0 in a step that has such work")

    @property
    def tokens(self) -> Floats:
        """Tokens that go through the GEMM."""
        return self.prefill_tokens + self.decoding

    @property
    def _loads(self) -> Mapping[str, Floats]:
        return dict(zip(OPERATORS, (self.tokens, self.quadratic, self.kv_tokens), strict=True))

    @property
    def steps(self) -> "Steps":
        return Steps(self.tokens, self.quadratic, self.kv_tokens, self.seconds)

    def operator(self, name: str) -> tuple["Steps", NDArray[np.intp]]:
        """One operator's loads and times, and the rows in which it was measured at work."""
        times: Floats | None = getattr(self, name)
        loads = self._loads
        rows = (
            np.flatnonzero((loads[name] > 0) & ~np.isnan(times)) if times is not None else np.array([], dtype=np.intp)
        )
        only = [load[rows] if name == each else np.zeros(len(rows)) for each, load in loads.items()]
        return Steps(*only, seconds=times[rows] if times is not None else np.zeros(0)), rows


class Steps(NamedTuple):
    """Loads of steps, or of one operator in them, and the seconds that they took; columns of shape (steps,)."""

    tokens: Floats
    quadratic: Floats
    kv_tokens: Floats
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Misfit:
    """Absolute errors of the fitted model as shares of the measured time, over `steps`; `row` is the worst."""

    mean: float
    largest: float
    row: int
    steps: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Parameters of an EngineModel, and how far the profile that they were fitted to is from them.

    `errors`: by operator, where measured, and of whole steps: `prefill`, `decode` and `mixed` ones, and all `steps`.
    """

    gemm_s: float
    read_s: float
    quadratic_s: float
    weights_s: float
    overhead_s: float
    interference: float
    errors: Mapping[str, Misfit] = field(default_factory=dict[str, Misfit])

    def model(self, capacity: int, clock: Clock) -> EngineModel:
        return EngineModel(
            gemm_s=self.gemm_s,
            read_s=self.read_s,
            quadratic_s=self.quadratic_s,
            weights_s=self.weights_s,
            capacity=capacity,
            overhead_s=self.overhead_s,
            interference=self.interference,
            clock=clock,
        )


def calibrate(profile: Profile, clock: Clock, interference: float = INTERFERENCE) -> Calibration:
    """Fit the model to steps of an engine that runs by this clock, by least squares of relative errors.

    Operators that were measured fix their parameters first; the others, overhead and interference come from whole
    steps. Without overlap nothing shows the interference, and the given one is kept. Raises ValueError where steps are
    too few, or so alike that a parameter cannot be told.
    """
    if not 0 <= interference <= 1:
        raise ValueError(f"interference must be from 0 to 1, not {interference}")
    _at_least(FEWEST_STEPS, len(profile.seconds), "seconds")
    overlapped = clock is Clock.OVERLAPPED
    fitted = np.zeros(len(PARAMETERS))
    fitted[HIDDEN] = interference
    unknown = [GEMM, WEIGHTS, QUADRATIC, READ, OVERHEAD] + ([HIDDEN] if overlapped else [])
    for name, parameters in OPERATORS.items():
        steps, rows = profile.operator(name)
        if len(rows):
            _at_least(FEWEST_OF_OPERATOR, len(rows), name)
            alone = _fit(steps, np.zeros(len(PARAMETERS)), list(parameters), overlapped=False, source=name)
            for each in parameters:
                if each != OVERHEAD:  # it shows in whole steps
                    fitted[each] = alone[each]
                    unknown.remove(each)
    fitted = _fit(profile.steps, fitted, unknown, overlapped, source="seconds")
    return Calibration(
        gemm_s=float(fitted[GEMM]),
        read_s=float(fitted[READ]),
        quadratic_s=float(fitted[QUADRATIC]),
        weights_s=float(fitted[WEIGHTS]),
        overhead_s=float(fitted[OVERHEAD]),
        interference=float(fitted[HIDDEN]),
        errors=_errors(profile, fitted, overlapped),
    )


def _errors(profile: Profile, fitted: Floats, overlapped: bool) -> dict[str, Misfit]:
    found: dict[str, Misfit] = {}
    for name in OPERATORS:
        steps, rows = profile.operator(name)
        if len(rows):
            alone = np.where(np.arange(len(fitted)) == OVERHEAD, 0.0, fitted)
            found[name] = _misfit(_relative(steps, alone, overlapped=False), rows)
    off = _relative(profile.steps, fitted, overlapped)
    prefills, decodes = profile.prefill_tokens > 0, profile.decoding > 0
    kinds = {
        "prefill": prefills & ~decodes,
        "decode": decodes & ~prefills,
        "mixed": prefills & decodes,
        "steps": np.ones(len(off), dtype=np.bool_),
    }
    for kind, chosen in kinds.items():
        if np.any(chosen):
            found[kind] = _misfit(off[chosen], np.flatnonzero(chosen))
    return found


def _misfit(relative: Floats, rows: NDArray[np.intp]) -> Misfit:
    off = np.abs(relative)
    worst = int(np.argmax(off))
    return Misfit(float(off.mean()), float(off[worst]), int(rows[worst]), len(off))


def _fit(steps: Steps, known: Floats, unknown: list[int], overlapped: bool, source: str) -> Floats:
    """The parameters, shape (6,), of which `unknown` are fitted; `source` names the times for errors."""
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
    """Starts from a fit without overlap, whose reads are the share that showed of longer ones, for several shares."""
    found = [fitted.copy() for _ in HIDDEN_STARTS]
    for start, share in zip(found, HIDDEN_STARTS, strict=True):
        start[HIDDEN] = share
        if READ in unknown:
            start[READ] /= share
    return found


def _thinned(steps: Steps) -> Steps:
    """As many steps of every size as a search needs."""
    order = np.argsort(steps.tokens, kind="stable")[:: -(-len(steps.tokens) // SEARCHED_STEPS)]
    return Steps(*(column[order] for column in steps))


def _settle(steps: Steps, start: Floats, unknown: list[int], overlapped: bool) -> Floats:
    """Fit, give each step to the pieces of the maxima that the fit says, and again, until nothing changes."""
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
    """Least squares with every step on the piece on which `now` has it; the interference is at most 1."""
    columns = _columns(steps, now, overlapped)
    fitted = now.copy()
    fixed = [each for each in range(len(now)) if each not in unknown and each != HIDDEN]
    # The interference multiplies what is hidden, which is fitted too: its column is the change from `now`.
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
    """How a step's seconds grow with each parameter, shape (steps, 6); `seconds` are these times all but the last."""
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
    """Least squares with nothing below zero; tries which are zero, of the few columns there are."""
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
    """The first column that is a sum of the others, nearly, or zero."""
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


def _relative(steps: Steps, fitted: Floats, overlapped: bool) -> Floats:
    return _seconds(steps, fitted, overlapped) / steps.seconds - 1


def _squares(steps: Steps, fitted: Floats, overlapped: bool) -> float:
    return float(np.square(_relative(steps, fitted, overlapped)).sum())


def _check_columns(steps: Steps, unknown: list[int], source: str) -> None:
    """Raises ValueError for a load that never changes."""
    for parameter, load in ((GEMM, steps.tokens), (QUADRATIC, steps.quadratic), (READ, steps.kv_tokens)):
        if parameter in unknown and load.min() == load.max():
            raise ValueError(
                f"{SHOWN_BY[parameter]} never changes where {source} was measured (rows 0 to {len(load) - 1} have "
                f"{load[0]:g}), so {PARAMETERS[parameter]} cannot be told"
            )


def _check_told(steps: Steps, fitted: Floats, unknown: list[int], overlapped: bool, source: str) -> None:
    """Raises ValueError for a parameter that no step shows, or none apart from the others."""
    shortest, longest = int(np.argmin(steps.tokens)), int(np.argmax(steps.tokens))
    if GEMM in unknown and not steps.tokens[longest] * fitted[GEMM] > fitted[WEIGHTS]:
        raise ValueError(
            f"{SHOWN_BY[GEMM]} is too small: all steps with {source} take as long as reading the weights, even row "
            f"{longest} with {steps.tokens[longest]:g} tokens, so gemm_s cannot be told"
        )
    columns = _columns(steps, fitted, overlapped)
    if WEIGHTS in unknown and not columns[:, WEIGHTS].any():
        at_most = steps.tokens[shortest] * fitted[GEMM]
        if at_most > NO_FLOOR * steps.seconds[shortest]:
            raise ValueError(
                f"{SHOWN_BY[WEIGHTS]} is too large: no step with {source} is short enough to show weights_s, not even "
                f"row {shortest} with {steps.tokens[shortest]:g} tokens"
            )
        unknown = [each for each in unknown if each != WEIGHTS]
    if READ in unknown and overlapped:
        bound = int(np.count_nonzero(steps.kv_tokens * fitted[READ] > columns[:, HIDDEN]))
        if bound < FEWEST_BOUND:
            raise ValueError(
                f"{SHOWN_BY[READ]} is too small: {bound} steps take as long as their reads, so read_s cannot be told "
                f"from interference; measure {FEWEST_BOUND} such steps, or decode_attention_s"
            )
    lost = _dependent(columns[:, unknown] / steps.seconds[:, None])
    if lost is not None:
        raise ValueError(
            f"{SHOWN_BY[unknown[lost]]} changes only together with the other columns where {source} was measured, so "
            f"{PARAMETERS[unknown[lost]]} cannot be told; measure steps that differ more, or operators alone"
        )


def _at_least(fewest: int, steps: int, name: str) -> None:
    if steps < fewest:
        raise ValueError(f"{name}: {steps} steps are too few to fit to; at least {fewest} must be measured")


def _refuse(bad: NDArray[np.bool_], name: str, column: Floats, problem: str) -> None:
    if np.any(bad):
        row = int(np.argmax(bad))
        raise ValueError(f"{name}, row {row}: {column[row]:g} {problem}")
