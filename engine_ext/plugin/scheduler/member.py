"""Holds what one scheduler knows of a request of ours: where it is, and how often it has made way for others."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

GAIN = 256  # prompt tokens


class Phase(IntEnum):
    """The progress of a request. A retracted request waits again."""

    WAITING = 0
    PREFILL = 1  # admitted; its prompt is being computed
    STORING = 2  # the prompt is computed, and not yet in SGLang's radix cache
    DECODE = 3


class Reason(IntEnum):
    """Why a running request waits again."""

    PARKED = 0  # its prompt made way for online requests; what is computed stays in the cache
    TAKEN_OFF = 1  # it decoded and made way for them; its KV cache stays while nobody needs the room
    RETRACTED = 2  # by SGLang, for lack of KV cache


@dataclass(slots=True, eq=False)
class Member:
    """One of our requests: SGLang's object and its key in the scan.

    `tokens`: output tokens when its prefill ended; with the next one SGLang puts the prompt into its cache.
    `computed`: prompt tokens that were computed when its prefill was last stopped for online requests. `stopped`: how
    often that was with fewer than GAIN more than the time before. `taken_off`: how often it was taken off the engine
    for them while it decoded. `skipped`: steps running in which others decoded and it was left out.
    """

    req: Any
    key: int
    phase: Phase = Phase.WAITING
    tokens: int = 0
    computed: int = 0
    stopped: int = 0
    taken_off: int = 0
    skipped: int = 0
