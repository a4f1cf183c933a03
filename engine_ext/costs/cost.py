"""Computes what requests cost, in seconds of arithmetic and of KV cache reads, and the ratio (BlendServe section 4)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine_ext.costs.hardware import DTYPE_BYTES, Machine
from engine_ext.costs.model_shape import ModelShape
from engine_ext.errors import DoesNotFit, InputError

Seconds = NDArray[np.float64]
CONTEXT = 2048  # tokens; where reads must be proportional to a context, windows and states count as at this one
STATE_MOVES = 2  # a decode reads and writes the state of linear attention


@dataclass(frozen=True, slots=True)
class CostModel:
    """Computes the costs of a model on a machine, for scalars or for arrays of one shape.

    Lengths are in tokens, results in seconds. `attention_compute` keeps the prefill's quadratic term 4 p^2 H L, which
    the paper omits for short prompts.
    """

    shape: ModelShape
    machine: Machine
    dtype: str = "bf16"
    kv_dtype: str = "bf16"
    attention_compute: bool = True

    def __post_init__(self) -> None:
        self.machine.hardware.flops_of(self.dtype)
        if self.kv_dtype not in DTYPE_BYTES:
            raise InputError(f"unknown KV dtype {self.kv_dtype!r}; choose from {', '.join(DTYPE_BYTES)}")

    @property
    def name(self) -> str:
        return f"{self.shape.name} on {self.machine.accelerators} x {self.machine.hardware.name}"

    @property
    def kv_bytes_per_token(self) -> float:
        return self.shape.kv_bytes_per_token(DTYPE_BYTES[self.kv_dtype])

    @property
    def gemm_s_per_token(self) -> float:
        """Return the seconds of matrix products for one token, prompt or output."""
        # GEMMs hold most of a model's parameters, so P approximates their work (section 4.1).
        return 2 * self.shape.active_parameters / self.machine.flops(self.dtype) + self._reduce_s_per_token

    @property
    def quadratic_s(self) -> float:
        """Return the seconds of a prompt's attention per unit of end^2 - begin^2 of the tokens computed."""
        # All p^2 pairs of tokens, as section 4.1 counts them, though attention computes only the causal half.
        attention = self.shape.attention_flops / self.machine.attention_flops(self.dtype)
        return attention if self.attention_compute else 0.0

    @property
    def _reduce_s_per_token(self) -> float:
        """Return the seconds in which tensor-parallel ranks add up one token's hidden states, twice a layer."""
        tp, link = self.machine.tp, self.machine.hardware.link_bandwidth
        if tp == 1 or link is None:
            return 0.0
        sent = 2 * (tp - 1) / tp * self.shape.hidden * DTYPE_BYTES[self.dtype]  # by each rank, around a ring
        return 2 * self.shape.layers * sent / link / (self.machine.pp * self.machine.sp)

    @property
    def read_bytes_per_token(self) -> float:
        """Return what a decode reads per token of its context, where windows and states count at CONTEXT tokens."""
        windows = self.shape.window_kv_elements * min(1.0, self.shape.window / CONTEXT)
        cache = (self.shape.kv_elements + windows) * DTYPE_BYTES[self.kv_dtype]
        return cache + STATE_MOVES * self.shape.state_bytes / CONTEXT

    @property
    def read_s_per_token(self) -> float:
        """Return the seconds to read the KV cache of one token once; see `read_bytes_per_token`."""
        return self.read_bytes_per_token / self.machine.bandwidth

    @property
    def floor_s(self) -> float:
        """Return the least seconds of a step: reading the weights, or its overhead."""
        return max(self.weights_s, self.machine.hardware.overhead_s or 0.0)

    @property
    def weights_s(self) -> float:
        """Return the seconds to read the weights once."""
        return self.shape.weight_bytes(DTYPE_BYTES[self.dtype]) / self.machine.weight_bandwidth

    def compute_s(self, prompt: ArrayLike, output: ArrayLike) -> Seconds:
        """Return Comp(r) = (2 (p + d) P + 4 p^2 H L) / C."""
        p, d = _lengths(prompt, output)
        return (p + d) * self.gemm_s_per_token + p * p * self.quadratic_s + self._windows_s(p)

    def memory_s(self, prompt: ArrayLike, output: ArrayLike, output_squares: ArrayLike | None = None) -> Seconds:
        """Return Mem(r) = (p d + d^2 / 2) KV bytes / B: each output token reads the cache of all before it.

        Layers with windows read at most a window, and linear attention moves its state.
        If the output is an estimate, `output_squares` is the mean of its square, which exceeds the square of its mean.
        """
        p, d = _lengths(prompt, output)
        squares = d * d if output_squares is None else np.asarray(output_squares, dtype=np.float64)
        shape, kv_bytes = self.shape, DTYPE_BYTES[self.kv_dtype]
        read = (p * d + squares / 2) * (shape.kv_elements * kv_bytes)
        if shape.window:
            until = np.clip(shape.window - p, 0.0, d)  # output tokens until the window is full
            inside = p * until + until**2 / 2 + (d - until) * shape.window
            read = read + inside * (shape.window_kv_elements * kv_bytes)
        return (read + d * (STATE_MOVES * shape.state_bytes)) / self.machine.bandwidth

    def density(self, prompt: ArrayLike, output: ArrayLike) -> Seconds:
        """Return Comp / Mem; infinite for a request without output."""
        with np.errstate(divide="ignore"):
            return self.compute_s(prompt, output) / self.memory_s(prompt, output)

    def saved_s(self, shared: ArrayLike, before: ArrayLike = 0) -> Seconds:
        """Return the compute saved if `shared` prompt tokens, behind `before` others, are found in the cache."""
        n, b = _lengths(shared, before)
        attention = ((b + n) ** 2 - b**2) * self.quadratic_s + self._windows_s(b + n) - self._windows_s(b)
        return n * self.gemm_s_per_token + attention

    def _windows_s(self, prompt: Seconds) -> Seconds | float:
        """Return the seconds of a prompt's attention in the layers that attend to a window."""
        window = self.shape.window
        if not window or not self.attention_compute:
            return 0.0
        inside = np.minimum(prompt, window)
        pairs = inside**2 + 2 * window * (prompt - inside)  # counted as for full attention, which has p^2
        return pairs * (self.shape.window_attention_flops / self.machine.attention_flops(self.dtype))

    def kv_capacity_tokens(self, usable: float = 0.9) -> int:
        """Return the tokens of KV cache that fit beside the weights in the `usable` share of memory.

        Raises DoesNotFit.
        """
        weights = self.shape.weight_bytes(DTYPE_BYTES[self.dtype])
        room = self.machine.memory_bytes * usable - weights
        if room < self.kv_bytes_per_token:
            raise DoesNotFit(
                f"{self.shape.name} needs {weights / 1e9:.1f} GB for its weights in {self.dtype}, but "
                f"{self.machine.accelerators} x {self.machine.hardware.name} has "
                f"{self.machine.memory_bytes * usable / 1e9:.1f} GB to use; raise tp or use a smaller dtype"
            )
        return int(room / self.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Load:
    """The work of a set of requests, in seconds.

    `compute_s` is the compute without any sharing, `saved_s` the part of it that sharing saves, `memory_s` the memory
    reads.
    """

    compute_s: float
    saved_s: float
    memory_s: float

    def __add__(self, other: "Load") -> "Load":
        return Load(self.compute_s + other.compute_s, self.saved_s + other.saved_s, self.memory_s + other.memory_s)

    @property
    def sharing(self) -> float:
        """Return s, the share of the compute that prefix sharing saves."""
        return self.saved_s / self.compute_s if self.compute_s else 0.0

    @property
    def net_compute_s(self) -> float:
        return self.compute_s - self.saved_s

    @property
    def density(self) -> float:
        """Return rho = (1 - s) T_comp / T_mem; infinite without memory reads."""
        return self.net_compute_s / self.memory_s if self.memory_s else float("inf")

    @property
    def ideal_s(self) -> float:
        """Return T_o = max((1 - s) T_comp, T_mem): all is shared, and the lesser resource hides behind the other."""
        return max(self.net_compute_s, self.memory_s)

    def practical_s(self, interference: float) -> float:
        """Return T_o where overlapping has a cost: `interference` is the share of the hidden time that shows anyway.

        With 0 the overlap is perfect, with 1 compute and reads run one after the other. It is measured by running GEMM
        beside attention (section 6.2).
        """
        if not 0 <= interference <= 1:
            raise InputError(f"interference must be from 0 to 1, not {interference}")
        return self.ideal_s + interference * min(self.net_compute_s, self.memory_s)


def _lengths(first: ArrayLike, second: ArrayLike) -> tuple[Seconds, Seconds]:
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if np.any(a < 0) or np.any(b < 0):
        raise InputError("lengths in tokens must not be negative")
    return a, b
