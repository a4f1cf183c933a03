"""The operator model against closed forms and the coarser model."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import ModelShape, preset, shape_of
from tests.unit.coserve.operators import Achievable, ForwardPass, OperatorModel, Prefill

A100 = Machine(hardware("a100-80gb"))
LLAMA = preset("llama-3-8b")
MODEL = OperatorModel(LLAMA, Achievable.of(A100, "bf16"))
MULTIPLIED = LLAMA.active_parameters - LLAMA.other_parameters


def test_many_tokens_cost_their_arithmetic() -> None:
    tokens = 100_000
    expected = 2 * tokens * MULTIPLIED / 312e12
    assert MODEL.gemm_s(tokens, sampled=tokens) == pytest.approx(expected)


def test_one_token_costs_reading_the_weights() -> None:
    floor = MULTIPLIED * 2 / 2.039e12
    assert floor < MODEL.gemm_s(1, sampled=1) < floor * 1.01


def test_long_decode_costs_reading_the_cache() -> None:
    step = ForwardPass(decodes=[8000] * 64)
    assert MODEL.step_time(step).decode_attention_s == pytest.approx(64 * 8000 * 131072 / 2.039e12, rel=0.01)


def test_decode_step_costs_what_the_coarse_model_says_of_it() -> None:
    coarse = CostModel(LLAMA, A100)
    request = sum(MODEL.step_time(ForwardPass(decodes=[512 + n] * 100)).decode_attention_s for n in range(256)) / 100
    assert request == pytest.approx(float(coarse.memory_s(512, 256)), rel=0.02)


def test_chunks_cost_the_attention_of_the_whole() -> None:
    whole = MODEL.step_time(ForwardPass(prefills=[Prefill(8192)])).prefill_attention_s
    chunks = [Prefill(1024, before) for before in range(0, 8192, 1024)]
    parts = sum(MODEL.step_time(ForwardPass(prefills=[each])).prefill_attention_s for each in chunks)
    assert parts == pytest.approx(whole, rel=0.001)


def test_overhead_is_that_of_the_kind_of_step() -> None:
    model = OperatorModel(LLAMA, Achievable(1e15, 1e15, 1e15, 1e12, 1e12, 0.003, 0.001))
    assert model.step_time(ForwardPass(prefills=[Prefill(5)], decodes=[9])).overhead_s == 0.003
    assert model.step_time(ForwardPass(decodes=[9])).overhead_s == 0.001
    mixed = model.step_time(ForwardPass(prefills=[Prefill(5)], decodes=[9]))
    parts = mixed.gemm_s + mixed.prefill_attention_s + mixed.decode_attention_s + mixed.overhead_s
    assert mixed.sequential_s == pytest.approx(parts)


def test_few_tokens_read_few_experts() -> None:
    def mixture(experts: int) -> ModelShape:
        return shape_of(
            {
                "hidden_size": 1024,
                "num_hidden_layers": 4,
                "num_attention_heads": 8,
                "intermediate_size": 4096,
                "vocab_size": 1000,
                "num_experts": experts,
                "num_experts_per_tok": 2,
            }
        )

    reached = Achievable.of(A100, "bf16")
    few, many = (OperatorModel(mixture(experts), reached) for experts in (4, 64))
    assert many.gemm_s(1, 1) == pytest.approx(few.gemm_s(1, 1), rel=0.02)  # two experts are read
    assert many.gemm_s(4096, 1) > few.gemm_s(4096, 1)  # all are


@given(st.integers(1, 5000), st.integers(1, 5000))
def test_more_tokens_never_cost_less(a: int, b: int) -> None:
    assert MODEL.gemm_s(a, 1) <= MODEL.gemm_s(a + b, 1)
    one, more = (MODEL.step_time(ForwardPass(decodes=[length] * 8)) for length in (a, a + b))
    assert one.decode_attention_s < more.decode_attention_s
    alone = MODEL.step_time(ForwardPass(prefills=[Prefill(a)])).prefill_attention_s
    assert alone < MODEL.step_time(ForwardPass(prefills=[Prefill(a, b)])).prefill_attention_s


def test_empty_step_costs_nothing_but_overhead() -> None:
    time = MODEL.step_time(ForwardPass())
    assert (time.gemm_s, time.prefill_attention_s, time.decode_attention_s) == (0, 0, 0)
