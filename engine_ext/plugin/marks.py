"""Names the marks that a worker puts into a request's `custom_params`, which SGLang carries to the scheduler."""

import logging
import math
from functools import lru_cache
from hashlib import blake2b
from typing import Any, NamedTuple

from engine_ext.coserve.slo import DEFAULT
from engine_ext.errors import InputError
from engine_ext.plan.memory import Profile

log = logging.getLogger(__name__)
PROFILES = 1024  # of lengths, that are kept parsed; requests of one profile share the object

KIND = "batchweave_kind"  # requests of one kind are alike in more than their prompts, such as those of one batch
UNTOLD = "batchweave_untold"  # beside KIND: the request ends at max_tokens, and the scheduler is not told
DUE = "batchweave_due"  # beside KIND: when it must have ended, by this host's time.monotonic
LENGTHS = "batchweave_lengths"  # beside KIND: the profile of earlier answers to requests like it (plan/memory.py)
SLO = "batchweave_slo"  # without KIND: the class of an online request, if it is not the default one
PROJECT = "batchweave_project"  # whose request it is; without it, it shares the cache with all that have none
WEIGHT = "batchweave_weight"  # beside PROJECT: its share beside other projects, if it is not 1
STOPS_LOOPS = "batchweave_stops_loops"  # its answer ends where it becomes a loop
THINKING = "thinking_budget"  # SGLang's own name: how many tokens it may think


class Terms(NamedTuple):
    """What a worker knows of a batch's request beside its body.

    `due`: when it must have ended, by time.monotonic. `lengths`: the profile of earlier answers to requests like it
    (plan/memory.py). `project`: whose request it is, with whose others alone it shares the KV cache. `stops_loops`: its
    answer ends where it repeats itself. `thinking_tokens`: how many it may think; None is as many as it likes.
    `weight`: the project's share beside other projects.
    """

    due: float = math.inf
    lengths: str = ""
    project: str = ""
    stops_loops: bool = False
    thinking_tokens: int | None = None
    weight: float = 1.0


NO_TERMS = Terms()


def marks(kind: str, terms: Terms = NO_TERMS) -> dict[str, Any]:
    """Return the marks of a request of this kind, of its terms those that it has."""
    given: dict[str, Any] = {KIND: kind}
    if terms.project:
        given[PROJECT] = terms.project
    if terms.weight != 1.0:
        given[WEIGHT] = terms.weight
    if not math.isinf(terms.due):
        given[DUE] = terms.due
    if terms.lengths:
        given[LENGTHS] = terms.lengths
    if terms.stops_loops:
        given[STOPS_LOOPS] = True
    if terms.thinking_tokens is not None:
        given[THINKING] = terms.thinking_tokens
    return given


def online_marks(slo: str, project: str = "", weight: float = 1.0) -> dict[str, Any]:
    """Return the marks of an online request of this class and project, which has this weight."""
    found: dict[str, Any] = {} if slo == DEFAULT else {SLO: slo}
    return found | ({PROJECT: project} if project else {}) | ({WEIGHT: weight} if weight != 1.0 else {})


def weight_of(req: Any) -> float:
    """Return the weight of the project of a request in the scheduler."""
    given: Any = req.sampling_params.custom_params
    weight = given.get(WEIGHT, 1.0) if isinstance(given, dict) else 1.0
    return float(weight) if isinstance(weight, int | float) and weight > 0 else 1.0


def project_of(req: Any) -> str:
    """Return whose request it is in the scheduler; "" if nobody said."""
    given: Any = req.sampling_params.custom_params
    return str(given.get(PROJECT, "")) if isinstance(given, dict) else ""


def number_of(name: str) -> int:
    """Return a number that two names hardly share, the same on all ranks."""
    return int.from_bytes(blake2b(name.encode(errors="surrogatepass"), digest_size=7).digest())


def slo_of(req: Any) -> str:
    """Return the class of an online request in the scheduler."""
    given: Any = req.sampling_params.custom_params
    return given.get(SLO, DEFAULT) if isinstance(given, dict) else DEFAULT


def due_of(custom_params: dict[str, Any]) -> float:
    """Return when a request must have ended, or infinity."""
    due = custom_params.get(DUE, math.inf)
    return float(due) if isinstance(due, (int, float)) else math.inf


def stops_loops(req: Any) -> bool:
    """Return whether a request in the scheduler ends where its answer becomes a loop."""
    given: Any = req.sampling_params.custom_params
    return isinstance(given, dict) and given.get(STOPS_LOOPS) is True


@lru_cache(PROFILES)
def profile_of(text: Any) -> Profile | None:
    """Return the profile that a request came with; None if it has none, or one that another version wrote."""
    try:
        return Profile.parse(text) if text else None
    except InputError as error:
        log.warning("%s", error)
        return None
