"""The cost model against the numbers that the papers and the models' makers print."""

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_ext.costs.cost import CostModel, Load
from engine_ext.costs.hardware import PRESETS, Hardware, Machine, hardware
from engine_ext.costs.model_shape import Matrix, preset, shape_of
from engine_ext.errors import ConfigError, DoesNotFit, UnknownHardware

LLAMA_8B = preset("llama-3-8b")
# BlendServe counts Llama-3-8B as 8e9 parameters, and its figures are cut, not rounded: 3.7395 is printed as 3.73.
PAPER = CostModel(
    dataclasses.replace(LLAMA_8B, matrices=(), head=Matrix(80_000, 100_000, 1), other_parameters=0),
    Machine(hardware("a100-80gb")),
    dtype="fp16",
    kv_dtype="fp16",
    attention_compute=False,
)
lengths = st.integers(1, 100_000)


def cut(value: float, digits: int) -> float:
    return int(value * 10**digits) / 10**digits


def test_densities_of_the_paper() -> None:
    assert cut(float(PAPER.density(512, 256)), 2) == 3.73
    assert float(PAPER.density(256, 16384)) == pytest.approx(0.096, abs=0.0005)


def test_compute_and_memory_are_the_formulas() -> None:
    p, d = 700, 300
    compute, memory = (2 * (p + d) * 8e9) / 312e12, (p * d + d * d / 2) * 1024 * 32 * 4 / 2.039e12
    assert float(PAPER.compute_s(p, d)) == pytest.approx(compute)
    assert float(PAPER.memory_s(p, d)) == pytest.approx(memory)
    whole = dataclasses.replace(PAPER, attention_compute=True)
    assert float(whole.compute_s(p, d)) == pytest.approx(compute + 4 * p * p * 4096 * 32 / 312e12)


@given(lengths, lengths)
def test_density_falls_with_the_output(p: int, d: int) -> None:
    assert PAPER.density(p, d) > PAPER.density(p, d + 1)


@given(st.integers(0, 50_000), st.integers(0, 50_000))
def test_a_prefix_saves_what_it_would_cost(shared: int, more: int) -> None:
    model = CostModel(LLAMA_8B, Machine(hardware("h200")))
    whole = float(model.compute_s(shared + more, 0))
    assert float(model.saved_s(shared)) == pytest.approx(float(model.compute_s(shared, 0)))
    assert float(model.saved_s(shared)) + float(model.saved_s(more, shared)) == pytest.approx(whole)


def test_arrays_are_costed_like_their_elements() -> None:
    p, d = np.array([10, 2000, 5]), np.array([1, 50, 9000])
    assert PAPER.density(p, d).tolist() == [float(PAPER.density(int(a), int(b))) for a, b in zip(p, d, strict=True)]


def test_request_without_output_is_all_compute() -> None:
    assert float(PAPER.density(100, 0)) == float("inf")
    with pytest.raises(ValueError, match="negative"):
        PAPER.compute_s(-1, 5)


def test_replica_scales_compute_bandwidth_and_memory() -> None:
    alone = replace(hardware("h100"), link_bandwidth=None)
    one, eight = CostModel(LLAMA_8B, Machine(alone)), CostModel(LLAMA_8B, Machine(alone, tp=8))
    assert float(one.compute_s(100, 10)) == pytest.approx(8 * float(eight.compute_s(100, 10)))
    assert float(one.memory_s(100, 10)) == pytest.approx(8 * float(eight.memory_s(100, 10)))
    assert eight.kv_capacity_tokens() > 8 * one.kv_capacity_tokens()  # the weights are there once
    assert Machine(hardware("h100"), tp=2, pp=2, sp=2).accelerators == 8


def test_tensor_parallel_ranks_add_up_hidden_states_twice_a_layer() -> None:
    linked = CostModel(preset("llama-3-70b"), Machine(hardware("a100-80gb"), tp=8))
    alone = replace(linked, machine=Machine(replace(hardware("a100-80gb"), link_bandwidth=None), tp=8))
    sent = 80 * 2 * (2 * 7 / 8) * 8192 * 2  # bytes of one token by each rank
    assert linked.gemm_s_per_token - alone.gemm_s_per_token == pytest.approx(sent / 300e9)
    single = CostModel(LLAMA_8B, Machine(hardware("a100-80gb")))
    assert single.gemm_s_per_token == 2 * LLAMA_8B.active_parameters / 312e12


def test_no_step_is_shorter_than_its_overhead() -> None:
    slow = replace(hardware("h200"), overhead_s=0.004)
    assert CostModel(LLAMA_8B, Machine(slow)).floor_s == 0.004
    fast = CostModel(LLAMA_8B, Machine(replace(slow, overhead_s=0.001)))
    assert fast.floor_s == fast.weights_s > 0.003


def test_half_the_bytes_halve_the_reads() -> None:
    bf16 = CostModel(LLAMA_8B, Machine(hardware("h200")))
    fp8 = CostModel(LLAMA_8B, Machine(hardware("h200")), dtype="fp8", kv_dtype="fp8")
    assert float(bf16.memory_s(100, 100)) == pytest.approx(2 * float(fp8.memory_s(100, 100)))
    assert float(bf16.compute_s(100, 100)) == pytest.approx(1979 / 989 * float(fp8.compute_s(100, 100)))


def test_model_that_does_not_fit_is_said_with_its_sizes() -> None:
    with pytest.raises(DoesNotFit, match=r"141\.1 GB.*1 x l40s"):
        CostModel(preset("llama-3-70b"), Machine(hardware("l40s"))).kv_capacity_tokens()
    assert CostModel(preset("llama-3-70b"), Machine(hardware("h200"), tp=2)).kv_capacity_tokens() > 300_000


def test_ideal_and_practical_time_of_a_set() -> None:
    load = Load(compute_s=100, saved_s=20, memory_s=50) + Load(compute_s=10, saved_s=2, memory_s=38)
    assert (load.sharing, load.net_compute_s) == (pytest.approx(0.2), pytest.approx(88))
    assert load.density == pytest.approx(1.0)
    assert load.ideal_s == pytest.approx(88)
    assert load.practical_s(0) == pytest.approx(load.ideal_s)
    assert load.practical_s(1) == pytest.approx(88 + 88)
    assert Load(5, 0, 0).density == float("inf")
    with pytest.raises(ValueError, match="interference"):
        load.practical_s(1.5)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.55),
        ("llama-2-7b", 6.74),
        ("qwen-2.5-7b", 7.62),
        ("qwen-2.5-72b", 72.71),
        ("deepseek-67b", 67.42),
    ],
)
def test_preset_has_the_parameters_that_its_maker_prints(name: str, billions: float) -> None:
    assert preset(name).parameters / 1e9 == pytest.approx(billions, abs=0.01)


MIXTRAL: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
DEEPSEEK_V3: dict[str, Any] = {
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}


@pytest.mark.parametrize(
    ("config", "billions", "active", "kv_elements"),
    [(MIXTRAL, 46.7, 12.88, 32 * 2 * 1024), (DEEPSEEK_V3, 671.0, 37.55, 61 * 576)],
)
def test_mixture_of_experts_counts_what_a_token_uses(
    config: dict[str, Any], billions: float, active: float, kv_elements: int
) -> None:
    shape = shape_of(config)
    assert shape.parameters / 1e9 == pytest.approx(billions, abs=0.05)
    assert shape.active_parameters / 1e9 == pytest.approx(active, abs=0.05)
    assert shape.kv_elements == kv_elements


GPT_OSS_20B: dict[str, Any] = {
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
GEMMA_3_27B: dict[str, Any] = {  # as its config.json has it, inside that of the whole model
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 5376,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "intermediate_size": 21504,
        "sliding_window": 1024,
    }
}
QWEN_3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "intermediate_size": 5120,
    "vocab_size": 151936,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
LLAMA_4: dict[str, Any] = {
    "text_config": {
        "model_type": "llama4_text",
        "hidden_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "vocab_size": 202048,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 8192,
        "no_rope_layers": [1, 1, 1, 0] * 12,
    }
}
SCOUT = {"text_config": {**LLAMA_4["text_config"], "num_local_experts": 16, "interleave_moe_layer_step": 1}}
MAVERICK = {"text_config": {**LLAMA_4["text_config"], "num_local_experts": 128, "interleave_moe_layer_step": 2}}


@pytest.mark.parametrize(
    ("config", "billions", "active", "full", "windows", "window"),
    [
        (GPT_OSS_20B, 20.9, 4.19, 12, 12, 128),
        (GEMMA_3_27B, 27.0, 27.0, 10, 52, 1024),
        (QWEN_3_NEXT, 79.6, 3.9, 12, 0, 0),
        (SCOUT, 107.8, 17.2, 12, 36, 8192),
        (MAVERICK, 400.7, 17.2, 12, 36, 8192),
    ],
)
def test_layers_of_several_kinds_are_counted(
    config: dict[str, Any], billions: float, active: float, full: int, windows: int, window: int
) -> None:
    """Parameters as their makers print them; `active` includes the embedding, which these do not count."""
    shape = shape_of(config)
    text = config.get("text_config", config)
    per_layer = 2 * text["num_key_value_heads"] * text["head_dim"]
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.active_parameters / 1e9 == pytest.approx(active, rel=0.02)
    assert (shape.kv_elements, shape.window_kv_elements) == (full * per_layer, windows * per_layer)
    assert shape.window == window


def test_linear_attention_keeps_a_state_of_one_size() -> None:
    shape = shape_of(QWEN_3_NEXT)
    assert shape.state_bytes == 36 * 32 * 128 * 128 * 4
    cost = CostModel(shape, Machine(hardware("h200"), tp=4))
    short, long = float(cost.memory_s(100, 1)), float(cost.memory_s(100_100, 1))
    state = 2 * shape.state_bytes / cost.machine.bandwidth
    assert short == pytest.approx(state + 100.5 * shape.kv_elements * 2 / cost.machine.bandwidth)
    assert long - short == pytest.approx(100_000 * shape.kv_elements * 2 / cost.machine.bandwidth)


@pytest.mark.parametrize(
    ("changes", "full", "windows"),
    [
        ({"sliding_window": 4096}, 0, 32),
        ({"sliding_window": 4096, "use_sliding_window": False}, 32, 0),
        ({"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}, 28, 4),
        ({"sliding_window": None}, 32, 0),
        ({"sliding_window": 4096, "model_type": "gemma2"}, 16, 16),
    ],
)
def test_which_layers_have_windows(changes: dict[str, Any], full: int, windows: int) -> None:
    shape = shape_of({**MIXTRAL, **changes})
    assert (shape.kv_elements / 2048, shape.window_kv_elements / 2048) == (full, windows)


@pytest.mark.parametrize(("prompt", "output"), [(0, 100), (100, 50), (1000, 200), (1000, 24), (5000, 300), (1024, 1)])
def test_windows_are_read_as_far_as_they_are_full(prompt: int, output: int) -> None:
    cost = CostModel(shape_of(GEMMA_3_27B), Machine(hardware("h200")))
    shape = cost.shape
    full = (prompt * output + output**2 / 2) * shape.kv_elements
    steps = np.arange(output) + 0.5 + prompt  # tokens before each output token, on average
    inside = np.minimum(steps, shape.window).sum() * shape.window_kv_elements
    assert float(cost.memory_s(prompt, output)) == pytest.approx(2 * (full + inside) / cost.machine.bandwidth, rel=1e-3)


def test_attention_to_a_window_grows_with_the_prompt_and_not_with_its_square() -> None:
    cost = CostModel(shape_of({**MIXTRAL, "num_local_experts": 0, "sliding_window": 1000}), Machine(hardware("h200")))
    attention = [float(cost.compute_s(p, 0)) - p * cost.gemm_s_per_token for p in (500, 1000, 3000, 5000)]
    assert attention[1] == pytest.approx(4 * attention[0])
    assert attention[3] - attention[2] == pytest.approx(2 * 1000 * 2000 / 1000**2 * attention[1])
    whole = float(cost.compute_s(5000, 0))
    assert float(cost.saved_s(3000, 0)) + float(cost.saved_s(2000, 3000)) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["conv"] * 32}, "conv"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window|attention_chunk_size"),
        ({"layer_types": ["linear_attention"] * 32}, "linear_num_value_heads"),
        ({"sliding_window": "wide"}, "sliding_window"),
        ({"sliding_window": 4096, "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"no_rope_layers": [1], "attention_chunk_size": 8}, "no_rope_layers"),
        ({"mlp_only_layers": 3}, "mlp_only_layers"),
        ({"first_k_dense_replace": 99}, "first_k_dense_replace"),
        ({"sliding_window": 4096, "max_window_layers": "x"}, "max_window_layers"),
    ],
)
def test_layers_that_cannot_be_read_are_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        shape_of({**MIXTRAL, **changes})


def test_kv_width_follows_the_attention_variant() -> None:
    grouped = {**MIXTRAL, "num_local_experts": 0}
    many = shape_of({key: value for key, value in grouped.items() if key != "num_key_value_heads"})
    one = shape_of({**grouped, "num_key_value_heads": 1})
    assert (many.kv_elements, shape_of(grouped).kv_elements, one.kv_elements) == (32 * 8192, 32 * 2048, 32 * 256)


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"]
)
def test_config_without_a_field_names_it(field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        shape_of({key: value for key, value in MIXTRAL.items() if key != field})
    with pytest.raises(ConfigError, match=field):
        shape_of({**MIXTRAL, field: 0})


def test_config_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads"):
        shape_of({**MIXTRAL, "num_key_value_heads": 5})
    with pytest.raises(ConfigError, match="num_experts_per_tok"):
        shape_of({**MIXTRAL, "num_experts_per_tok": 9})


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(UnknownHardware, match="a100-80gb"):
        hardware("abacus")
    with pytest.raises(ConfigError, match="llama-3-8b"):
        preset("parrot")
    with pytest.raises(ValueError, match="fp8"):
        CostModel(LLAMA_8B, Machine(hardware("a100-80gb")), dtype="fp8")


@pytest.mark.parametrize(
    "build",
    [
        lambda: Hardware("x", {"fp16": 0}, 1, 1),
        lambda: Hardware("x", {"fp7": 1}, 1, 1),
        lambda: Hardware("x", {}, 0, 1),
        lambda: Machine(PRESETS["h100"], tp=0),
    ],
)
def test_hardware_that_cannot_be_is_refused(build: Any) -> None:
    with pytest.raises(ValueError, match=r"x|tp"):
        build()
