"""Models each operator of a step by its roofline, plus a fixed overhead: the finer cost model (OOCO section 3.3)."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_ext.costs.hardware import DTYPE_BYTES, Machine
from engine_ext.costs.model_shape import Matrix, ModelShape


@dataclass(frozen=True, slots=True)
class Achievable:
    """Holds what operators reach on a machine (OOCO's table 4): FLOP/s, bytes/s, and seconds of overhead per step."""

    gemm_flops: float
    prefill_flops: float
    decode_flops: float
    gemm_bandwidth: float
    attention_bandwidth: float
    prefill_overhead_s: float = 0.0
    decode_overhead_s: float = 0.0

    @classmethod
    def of(cls, machine: Machine, dtype: str, flops: float = 1.0, bandwidth: float = 1.0) -> "Achievable":
        """Return the datasheet's peaks times these shares, for a machine that is not calibrated yet."""
        peak, bytes_s = machine.flops(dtype) * flops, machine.bandwidth * bandwidth
        return cls(peak, peak, peak, bytes_s, bytes_s)


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prefill chunk: `new` prompt tokens of one request, behind `before` tokens already in its KV cache."""

    new: int
    before: int = 0


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One forward pass: prefill chunks, and the KV cache lengths of the requests that decode a token each."""

    prefills: Sequence[Prefill] = ()
    decodes: Sequence[int] = ()

    @property
    def tokens(self) -> int:
        return sum(prefill.new for prefill in self.prefills) + len(self.decodes)


@dataclass(frozen=True, slots=True)
class StepTime:
    """Holds the seconds that each part of a step takes."""

    gemm_s: float
    prefill_attention_s: float
    decode_attention_s: float
    overhead_s: float

    @property
    def sequential_s(self) -> float:
        """Return the seconds of a step whose operators run one after the other, as in SGLang."""
        return self.gemm_s + self.prefill_attention_s + self.decode_attention_s + self.overhead_s


@dataclass(frozen=True, slots=True)
class OperatorModel:
    shape: ModelShape
    achievable: Achievable
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    def step_time(self, step: ForwardPass) -> StepTime:
        reached = self.achievable
        return StepTime(
            gemm_s=self.gemm_s(step.tokens, sampled=len(step.prefills) + len(step.decodes)),
            prefill_attention_s=sum(
                self._attention_s(each.new, each.before, reached.prefill_flops) for each in step.prefills
            ),
            decode_attention_s=self._decode_s(step.decodes),
            overhead_s=reached.prefill_overhead_s if step.prefills else reached.decode_overhead_s,
        )

    def gemm_s(self, tokens: int, sampled: int) -> float:
        """Return the seconds of all matrix products for `tokens`.

        Of these, `sampled` tokens go through the output projection.
        """
        if tokens == 0:
            return 0.0
        body = sum(self._matrix_s(matrix, tokens) for matrix in self.shape.matrices)
        return body + (self._matrix_s(self.shape.head, sampled) if sampled else 0.0)

    def _matrix_s(self, matrix: Matrix, tokens: int) -> float:
        """Return max(2 N D_in D_out / F, d (N D_in + D_in D_out + N D_out) / M) for all matrices of this kind."""
        rows = tokens * matrix.active
        # Only the experts that some token has chosen are read.
        touched = 1 - (1 - matrix.active) ** tokens
        flops = 2 * rows * matrix.parameters
        elements = touched * matrix.parameters + rows * (matrix.d_in + matrix.d_out) * matrix.count
        reached = self.achievable
        return max(flops / reached.gemm_flops, elements * DTYPE_BYTES[self.dtype] / reached.gemm_bandwidth)

    def _attention_s(self, new: int, before: int, flops_s: float) -> float:
        """Return the seconds of causal attention of `new` query tokens, each over all before it.

        The KV cache is read once.
        """
        pairs = new * before + new * (new + 1) / 2
        return max(self.shape.attention_flops * pairs / flops_s, self._bytes(new, before + new))

    def _decode_s(self, decodes: Sequence[int]) -> float:
        """Return the seconds of one kernel for all decoding requests, bound by the sum of what they read or compute."""
        reached = self.achievable
        kv_tokens = sum(decodes)
        compute = self.shape.attention_flops * kv_tokens / reached.decode_flops
        return max(compute, self._bytes(len(decodes), kv_tokens)) if decodes else 0.0

    def _bytes(self, queries: int, kv_tokens: int) -> float:
        """Return the seconds to move queries in, outputs out and the KV cache through.

        OOCO prints 2 d (S_q D_h + S_kv D_h H_q / H_kv); the cache is narrower than the queries, so H_kv / H_q must be
        meant.
        """
        moved = 2 * queries * self.shape.query_elements * DTYPE_BYTES[self.dtype]
        read = kv_tokens * self.shape.kv_bytes_per_token(DTYPE_BYTES[self.kv_dtype])
        return (moved + read) / self.achievable.attention_bandwidth
