"""Describes machines as the cost model sees them: dense arithmetic, memory bandwidth and memory."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine_ext.errors import HardwareError, InputError, UnknownHardware

TERA = 1e12
GIGA = 1e9

# Bytes of one element of weights or KV cache, by dtype.
DTYPE_BYTES: Mapping[str, int] = MappingProxyType({"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1})


MEASURED = ("weight_bandwidth", "attention_flops", "overhead_s")  # only a calibration sets them
LEAST = {"overhead_s": 1e-9}  # of a number in a description, where it is not 1e3


@dataclass(frozen=True, slots=True)
class Hardware:
    """Describes one accelerator.

    `flops` is FLOP/s by operand dtype, without sparsity; `bandwidth` is bytes/s. `link_bandwidth` is bytes/s to the
    other accelerators of a replica in each direction; None where `flops` was measured with them. `weight_bandwidth`
    (reading weights) and `attention_flops` (prefill attention) are set where they were measured; otherwise `bandwidth`
    and `flops` apply. `overhead_s`: what a step costs besides its work.
    """

    name: str
    flops: Mapping[str, float]
    bandwidth: float
    memory_bytes: float
    weight_bandwidth: float | None = None
    attention_flops: float | None = None
    link_bandwidth: float | None = None
    overhead_s: float | None = None

    def __post_init__(self) -> None:
        for field in ("bandwidth", "memory_bytes", "link_bandwidth", *MEASURED):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise InputError(f"hardware {self.name!r}: {field} must be above zero, not {value}")
        for dtype, value in self.flops.items():
            if dtype not in DTYPE_BYTES:
                raise InputError(f"hardware {self.name!r}: flops names the unknown dtype {dtype!r}")
            if not value > 0:
                raise InputError(f"hardware {self.name!r}: flops.{dtype} must be above zero, not {value}")

    def flops_of(self, dtype: str) -> float:
        """Return the FLOP/s for operands of this dtype. Raises InputError if the hardware cannot multiply them."""
        if dtype not in self.flops:
            raise InputError(f"{self.name} has no {dtype} arithmetic; it has {', '.join(self.flops)}")
        return self.flops[dtype]


@dataclass(frozen=True, slots=True)
class Machine:
    """One engine replica: `tp` x `pp` x `sp` accelerators that share a model and its work (BlendServe section 7)."""

    hardware: Hardware
    tp: int = 1
    pp: int = 1
    sp: int = 1

    def __post_init__(self) -> None:
        for field in ("tp", "pp", "sp"):
            if getattr(self, field) < 1:
                raise InputError(f"{field} must be at least 1, not {getattr(self, field)}")

    @property
    def accelerators(self) -> int:
        return self.tp * self.pp * self.sp

    def flops(self, dtype: str) -> float:
        """Return the FLOP/s of the whole replica."""
        return self.hardware.flops_of(dtype) * self.accelerators

    @property
    def bandwidth(self) -> float:
        """Return the bytes/s of the whole replica."""
        return self.hardware.bandwidth * self.accelerators

    @property
    def weight_bandwidth(self) -> float:
        """Return the bytes/s at which the whole replica reads weights."""
        return (self.hardware.weight_bandwidth or self.hardware.bandwidth) * self.accelerators

    def attention_flops(self, dtype: str) -> float:
        """Return the FLOP/s of the whole replica in prefill attention."""
        return (self.hardware.attention_flops or self.hardware.flops_of(dtype)) * self.accelerators

    @property
    def memory_bytes(self) -> float:
        return self.hardware.memory_bytes * self.accelerators


def _preset(name: str, fp16: float, bandwidth: float, memory: float, link: float, fp8: float | None = None) -> Hardware:
    """Build hardware from its datasheet: TFLOP/s, TB/s, GB of memory, and GB/s of its links in each direction."""
    flops = {"fp16": fp16 * TERA, "bf16": fp16 * TERA} | ({"fp8": fp8 * TERA} if fp8 else {})
    return Hardware(name, flops, bandwidth * TERA, memory * GIGA, link_bandwidth=link * GIGA)


# Vendors' datasheets, SXM parts where there are several, without sparsity; NVLink, or PCIe 4 for the L40S.
PRESETS: Mapping[str, Hardware] = MappingProxyType(
    {
        each.name: each
        for each in (
            _preset("a100-40gb", 312, 1.555, 40, link=300),
            _preset("a100-80gb", 312, 2.039, 80, link=300),
            _preset("h100", 989, 3.35, 80, link=450, fp8=1979),
            _preset("h200", 989, 4.8, 141, link=450, fp8=1979),
            _preset("l40s", 362, 0.864, 48, link=32, fp8=733),
            _preset("b200", 2250, 8.0, 192, link=900, fp8=4500),
        )
    }
)

# How drivers name what the presets describe. Others of a family, such as an H100 on PCIe, are slower and match none.
_NAMES = (
    (r"\bA100\b.*\b40GB\b", "a100-40gb"),
    (r"\bA100\b.*\b80GB\b", "a100-80gb"),
    (r"\bH100 80GB HBM3\b", "h100"),
    (r"\bH200\b(?! NVL)", "h200"),
    (r"\bL40S\b", "l40s"),
    (r"\bB200\b", "b200"),
)


def preset_of(name: str) -> str | None:
    """Return the preset of an accelerator by the name that its driver gives it, or None."""
    return next((preset for pattern, preset in _NAMES if re.search(pattern, name)), None)


def hardware_of(described: Mapping[str, Any]) -> Hardware:
    """Build hardware from a description, such as a calibration's. Raises HardwareError.

    `described` has name, flops (FLOP/s by dtype), bandwidth (bytes/s) and memory_bytes, and may have the fields of
    MEASURED.
    """
    for field in ("name", "flops", "bandwidth", "memory_bytes"):
        if field not in described:
            raise HardwareError(f"the hardware file has no {field!r}")
    flops = described["flops"]
    if not isinstance(flops, Mapping) or not flops:
        raise HardwareError("'flops' of the hardware file must give FLOP/s by dtype")
    numbers = {"bandwidth": described["bandwidth"], "memory_bytes": described["memory_bytes"]}
    numbers |= {field: described[field] for field in MEASURED if field in described}
    numbers |= {f"flops.{dtype}": value for dtype, value in flops.items()}
    for field, value in numbers.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not LEAST.get(field, 1e3) <= value <= 1e21:
            least = LEAST.get(field, 1e3)
            raise HardwareError(
                f"{field!r} of the hardware file must be a number from {least:g} to 1e21, not {value!r:.40}"
            )
    try:
        return Hardware(
            str(described["name"]),
            {dtype: float(value) for dtype, value in flops.items()},
            float(described["bandwidth"]),
            float(described["memory_bytes"]),
            **{field: float(described[field]) for field in MEASURED if field in described},
        )
    except ValueError as error:
        raise HardwareError(str(error)) from error


def hardware(name: str) -> Hardware:
    """Return the preset with this name. Raises UnknownHardware."""
    if name not in PRESETS:
        raise UnknownHardware(f"no hardware {name!r}; choose from {', '.join(PRESETS)}")
    return PRESETS[name]
