"""Reads a profile: steps measured on a real engine, to which the simulator's model is fitted."""

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import WorkloadError
from service.workloads.workload import lines_of

MAX_LINE_BYTES = 64 * 1024
MAX_STEPS = 100_000

Count = Annotated[int, msgspec.Meta(ge=0, le=10**9)]
Quadratic = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Time = Annotated[float, msgspec.Meta(gt=0, le=1e6)]
OperatorTime = Annotated[float, msgspec.Meta(ge=0, le=1e6)]


class ProfileLine(msgspec.Struct, forbid_unknown_fields=True):
    """One measured step.

    `prefill_tokens`: prompt tokens computed; `quadratic`: the sum over their chunks of end^2 - begin^2, without which
    they are one prompt from its start; `decoding`: requests that decode; `kv_tokens`: KV tokens that these read;
    `seconds` of the whole step. The other times are seconds of operators run alone.
    """

    prefill_tokens: Count
    decoding: Count
    kv_tokens: Count
    seconds: Time
    quadratic: Quadratic | None = None
    gemm_s: OperatorTime | None = None
    prefill_attention_s: OperatorTime | None = None
    decode_attention_s: OperatorTime | None = None


def read_profile(path: Path) -> dict[str, NDArray[np.float64]]:
    """Return columns of shape (steps,) named as in calibrate.Profile; NaN: not measured. Raises WorkloadError."""
    steps: list[ProfileLine] = []
    for number, raw in lines_of(path, MAX_LINE_BYTES):
        if len(steps) == MAX_STEPS:
            raise WorkloadError(f"{path}, line {number}: there are more than {MAX_STEPS:,} steps; keep only a part")
        steps.append(_step(path, number, raw))
    if not steps:
        raise WorkloadError(f"{path} has no steps")
    return {
        name: np.array([getattr(step, name) for step in steps], dtype=np.float64)  # None becomes NaN
        for name in ProfileLine.__struct_fields__
    }


def _step(path: Path, number: int, raw: bytes) -> ProfileLine:
    try:
        step = msgspec.json.decode(raw, type=ProfileLine)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WorkloadError(f"{path}, line {number}: {error}") from error
    if step.quadratic is None:
        step.quadratic = float(step.prefill_tokens) ** 2
    if not step.prefill_tokens and not step.decoding:
        raise WorkloadError(f"{path}, line {number}: prefill_tokens and decoding are both 0, so it is not a step")
    for name, load, of, cause in (
        ("quadratic", step.quadratic, "prefill_tokens", step.prefill_tokens),
        ("kv_tokens", step.kv_tokens, "decoding", step.decoding),
    ):
        if (load > 0) != (cause > 0):
            raise WorkloadError(f"{path}, line {number}: {name} is {load:g} but {of} is {cause}; one needs the other")
    for name, load in (
        ("gemm_s", step.prefill_tokens + step.decoding),
        ("prefill_attention_s", step.prefill_tokens),
        ("decode_attention_s", step.decoding),
    ):
        if load and getattr(step, name) == 0:
            raise WorkloadError(f"{path}, line {number}: {name} must be above 0 in a step that has such work")
    return step
