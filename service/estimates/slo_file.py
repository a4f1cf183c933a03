"""Reads the file in which `batchweave profile-slo` says what online requests must get, and how long steps may be."""

from pathlib import Path

import msgspec

from engine_ext.coserve.limit import Limits
from engine_ext.coserve.slo import DEFAULT, FLEX, PRIORITY, SloClass, SloClasses
from engine_ext.errors import InputError
from service.errors import SettingsError

MOST_BYTES = 65_536


class _Bounds(msgspec.Struct, forbid_unknown_fields=True):
    ttft_s: float | None = None
    tpot_s: float | None = None
    tbt_s: float | None = None
    percentile: float = 0.99


class _Limits(msgspec.Struct, forbid_unknown_fields=True):
    limit_s: float | None = None
    price_s: float | None = None
    prompts_alone: bool = False
    cuts_prompts: bool = False
    prompt_tokens: int | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    slo: _Bounds
    priority: _Bounds | None = None
    profiled: _Limits = msgspec.field(default_factory=_Limits)


def read_slo_file(path: Path) -> tuple[SloClasses, Limits]:
    """Return the classes of online requests, and the limits of steps beside them. Raises SettingsError."""
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(MOST_BYTES), type=_File)
        return (
            (_named(PRIORITY, found.priority or found.slo), _named(DEFAULT, found.slo), SloClass(FLEX)),
            Limits(**msgspec.structs.asdict(found.profiled)),
        )
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, InputError) as error:
        raise SettingsError(f"BATCHWEAVE_SLO_FILE: {path}: {error}") from error


def _named(name: str, bounds: _Bounds) -> SloClass:
    return SloClass(name, bounds.ttft_s, bounds.tpot_s, bounds.tbt_s, bounds.percentile)
