"""Fits an engine model to measured steps, as HyGen (section 4.2) and OOCO (section 3.3.2) fit theirs."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from engine_ext.arrays import Floats
from engine_ext.costs.engine_model import INTERFERENCE, Clock, EngineModel
from engine_ext.costs.roofline_fit import (
    GEMM,
    HIDDEN,
    OVERHEAD,
    PARAMETERS,
    QUADRATIC,
    READ,
    WEIGHTS,
    Steps,
    fit,
    relative,
)
from engine_ext.errors import InputError

OPERATORS: Mapping[str, tuple[int, ...]] = {
    "gemm_s": (GEMM, WEIGHTS),
    "prefill_attention_s": (QUADRATIC, OVERHEAD),  # OVERHEAD: what a kernel costs however little work it gets
    "decode_attention_s": (READ, OVERHEAD),
}

FEWEST_STEPS = 12
FEWEST_OF_OPERATOR = 3
ALIKE = 0.1  # of the logarithm of KV tokens, within which steps count as alike


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Holds measured steps, one row per step; all columns have shape (steps,).

    `quadratic` is the sum of end^2 - begin^2 over the step's prefill chunks, in tokens squared; `decoding` is the
    number of requests that decode, `kv_tokens` the KV tokens that they read, and `seconds` the time of the whole step.
    Times of operators that were measured alone are in seconds over all layers, NaN where not measured. Raises
    InputError, which names the field and the row, counted from 0.
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
                raise InputError(f"{each.name} has shape {column.shape}, but seconds has {self.seconds.shape}")
            bad = ~np.isfinite(column) | (column < 0)
            if each.name in OPERATORS:
                bad &= ~np.isnan(column)
            _refuse(bad, each.name, column, "must be a finite number of at least 0")
        _refuse(self.seconds == 0, "seconds", self.seconds, "must be above 0")
        _refuse(self.tokens == 0, "prefill_tokens", self.prefill_tokens, "must be above 0 if nothing decodes")
        for name, of in (("quadratic", "prefill_tokens"), ("kv_tokens", "decoding")):
            load, cause = getattr(self, name), getattr(self, of)
            _refuse((load > 0) != (cause > 0), name, load, f"must be above 0 where {of} is, and only there")
        for name, load in self._loads.items():
            if (times := getattr(self, name)) is not None:
                _refuse((load > 0) & (times == 0), name, times, "must be above 0 in a step that has such work")

    @property
    def tokens(self) -> Floats:
        """Return the tokens that go through the GEMM in each step."""
        return self.prefill_tokens + self.decoding

    @property
    def _loads(self) -> Mapping[str, Floats]:
        return dict(zip(OPERATORS, (self.tokens, self.quadratic, self.kv_tokens), strict=True))

    @property
    def steps(self) -> Steps:
        return Steps(self.tokens, self.quadratic, self.kv_tokens, self.seconds)

    def operator(self, name: str) -> tuple[Steps, NDArray[np.intp]]:
        """Return one operator's loads and times, and the rows in which it was measured with work to do."""
        times: Floats | None = getattr(self, name)
        loads = self._loads
        rows = (
            np.flatnonzero((loads[name] > 0) & ~np.isnan(times)) if times is not None else np.array([], dtype=np.intp)
        )
        only = [load[rows] if name == each else np.zeros(len(rows)) for each, load in loads.items()]
        return Steps(*only, seconds=times[rows] if times is not None else np.zeros(0)), rows


@dataclass(frozen=True, slots=True)
class Misfit:
    """Holds the mean and the largest error of a fitted model over `steps` steps; `row` has the largest.

    Errors are absolute, as shares of the measured time.
    """

    mean: float
    largest: float
    row: int
    steps: int


@dataclass(frozen=True, slots=True)
class Calibration:
    """Holds the fitted parameters of an EngineModel, and how far they are from the profile.

    `errors` has an entry for each operator that was measured alone, and one for each kind of whole step: `prefill`,
    `decode` and `mixed` ones, and all `steps`.
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


def typical(profile: Profile) -> tuple[Profile, NDArray[np.intp]]:
    """Merge steps with the same tokens and nearly as much KV cache into one with the median of their seconds.

    Single steps are late or early on a real clock, and the fit's relative errors would let a few that look too short
    rule it. Returns also the row of `profile` that stands for each step.
    """
    kv = np.rint(np.log(np.maximum(profile.kv_tokens, 1.0)) / ALIKE).astype(np.int64)
    keys = np.column_stack([profile.prefill_tokens, profile.quadratic, profile.decoding, kv])
    _, group = np.unique(keys, axis=0, return_inverse=True)
    order = np.lexsort((profile.seconds, group))
    counts = np.bincount(group)
    rows = np.sort(order[np.cumsum(counts) - counts + counts // 2])
    columns = {each.name: getattr(profile, each.name) for each in dataclasses.fields(profile)}
    merged = {name: None if column is None else column[rows] for name, column in columns.items()}
    return Profile(**merged), rows  # pyright: ignore[reportArgumentType]


def calibrate(profile: Profile, clock: Clock, interference: float = INTERFERENCE) -> Calibration:
    """Fit the model to typical steps of an engine of this clock, by least squares of relative errors.

    Operators that were measured alone fix their parameters first; the other parameters, the overhead and the
    interference come from whole steps. Without overlap no step shows the interference, so the given value is kept.
    Raises InputError if there are too few steps, or if they are so alike that a parameter cannot be determined.
    """
    if not 0 <= interference <= 1:
        raise InputError(f"interference must be from 0 to 1, not {interference}")
    _at_least(FEWEST_STEPS, len(profile.seconds), "seconds")
    profile, stand_for = typical(profile)
    overlapped = clock is Clock.OVERLAPPED
    fitted = np.zeros(len(PARAMETERS))
    fitted[HIDDEN] = interference
    unknown = [GEMM, WEIGHTS, QUADRATIC, READ, OVERHEAD] + ([HIDDEN] if overlapped else [])
    for name, parameters in OPERATORS.items():
        steps, rows = profile.operator(name)
        if len(rows):
            _at_least(FEWEST_OF_OPERATOR, len(rows), name)
            alone = fit(steps, np.zeros(len(PARAMETERS)), list(parameters), overlapped=False, source=name)
            for each in parameters:
                if each != OVERHEAD:  # it is fitted to whole steps
                    fitted[each] = alone[each]
                    unknown.remove(each)
    fitted = fit(profile.steps, fitted, unknown, overlapped, source="seconds")
    return Calibration(
        gemm_s=float(fitted[GEMM]),
        read_s=float(fitted[READ]),
        quadratic_s=float(fitted[QUADRATIC]),
        weights_s=float(fitted[WEIGHTS]),
        overhead_s=float(fitted[OVERHEAD]),
        interference=float(fitted[HIDDEN]),
        errors=_errors(profile, stand_for, fitted, overlapped),
    )


def _errors(profile: Profile, named: NDArray[np.intp], fitted: Floats, overlapped: bool) -> dict[str, Misfit]:
    """Return the errors by kind of step; `named`: the row of the whole profile for each row of this one."""
    found: dict[str, Misfit] = {}
    for name in OPERATORS:
        steps, rows = profile.operator(name)
        if len(rows):
            alone = np.where(np.arange(len(fitted)) == OVERHEAD, 0.0, fitted)
            found[name] = _misfit(relative(steps, alone, overlapped=False), named[rows])
    off = relative(profile.steps, fitted, overlapped)
    prefills, decodes = profile.prefill_tokens > 0, profile.decoding > 0
    kinds = {
        "prefill": prefills & ~decodes,
        "decode": decodes & ~prefills,
        "mixed": prefills & decodes,
        "steps": np.ones(len(off), dtype=np.bool_),
    }
    for kind, chosen in kinds.items():
        if np.any(chosen):
            found[kind] = _misfit(off[chosen], named[chosen])
    return found


def _misfit(relative: Floats, rows: NDArray[np.intp]) -> Misfit:
    off = np.abs(relative)
    worst = int(np.argmax(off))
    return Misfit(float(off.mean()), float(off[worst]), int(rows[worst]), len(off))


def _at_least(fewest: int, steps: int, name: str) -> None:
    if steps < fewest:
        raise InputError(f"{name}: {steps} steps are too few for a fit; measure at least {fewest}")


def _refuse(bad: NDArray[np.bool_], name: str, column: Floats, problem: str) -> None:
    if np.any(bad):
        row = int(np.argmax(bad))
        raise InputError(f"{name}, row {row}: {column[row]:g} {problem}")
