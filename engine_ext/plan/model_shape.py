"""Model shapes: parameters and KV cache counted from a Hugging Face config, dense and MoE, MHA, GQA, MQA and MLA."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


class ConfigError(ValueError):
    """A model config lacks a field or has one that makes no sense; the message names it."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost model needs of a model.

    `parameters` are all that must be in memory, `active_parameters` those that one token multiplies (MoE: the chosen
    and shared experts). `kv_elements` is KV cache per token over all layers; `attention_flops` is what scores and
    values cost for one pair of a query and a key token, over all layers and heads.
    """

    name: str
    layers: int
    hidden: int
    parameters: float
    active_parameters: float
    kv_elements: float
    attention_flops: float

    def weight_bytes(self, dtype_bytes: int) -> float:
        return self.parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> float:
        return self.kv_elements * dtype_bytes


def shape_of(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Count a config.json. Raises ConfigError that names the field."""
    config = config.get("text_config") or config  # a multimodal model keeps its language model's config inside
    hidden, layers = _count(config, "hidden_size"), _count(config, "num_hidden_layers")
    vocabulary = _count(config, "vocab_size")
    attention, kv_elements, attention_flops = _attention(config, hidden)
    dense = _mlp(hidden, _count(config, "intermediate_size"))
    expert_layers, experts, active_experts = _experts(config, hidden, layers)
    mlp = (layers - expert_layers) * dense + expert_layers * experts
    active_mlp = (layers - expert_layers) * dense + expert_layers * active_experts
    norms = layers * 2 * hidden + hidden
    embedding = vocabulary * hidden
    head = 0 if config.get("tie_word_embeddings") else embedding
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        parameters=embedding + head + layers * attention + mlp + norms,
        # The output projection multiplies; looking an embedding up does not.
        active_parameters=embedding + layers * attention + active_mlp + norms,
        kv_elements=layers * kv_elements,
        attention_flops=layers * attention_flops,
    )


def _attention(config: Mapping[str, Any], hidden: int) -> tuple[float, float, float]:
    """Parameters, KV elements per token and FLOPs per query-key pair, of one layer."""
    heads = _count(config, "num_attention_heads")
    if config.get("kv_lora_rank"):  # MLA caches one compressed vector, and its rotary part, for all heads
        rank, rope = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
        nope, value = _count(config, "qk_nope_head_dim"), _count(config, "v_head_dim")
        query_rank = config.get("q_lora_rank")
        query = heads * (nope + rope)
        queries = query_rank * (hidden + query) if query_rank else hidden * query
        keys_values = hidden * (rank + rope) + rank * heads * (nope + value)
        return queries + keys_values + heads * value * hidden, rank + rope, 2 * heads * (nope + rope + value)
    kv_heads = _count(config, "num_key_value_heads") if "num_key_value_heads" in config else heads
    size = _count(config, "head_dim") if config.get("head_dim") else hidden // heads
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    parameters = hidden * size * (heads + 2 * kv_heads) + heads * size * hidden
    return parameters, 2 * kv_heads * size, 4 * heads * size


def _experts(config: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, float, float]:
    """How many layers have experts, and what such a layer holds and what of it a token multiplies."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number = next((_count(config, each) for each in names if config.get(each)), 0)
    if number == 0:
        return 0, 0.0, 0.0
    chosen = _count(config, "num_experts_per_tok")
    if chosen > number:
        raise ConfigError(f"num_experts_per_tok {chosen} is more than the {number} experts")
    width = _count(config, "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size")
    shared_width = config.get("shared_expert_intermediate_size") or (config.get("n_shared_experts") or 0) * width
    router = hidden * number
    shared = _mlp(hidden, shared_width)
    dense_layers = config.get("first_k_dense_replace") or 0
    one = _mlp(hidden, width)
    return layers - dense_layers, router + shared + number * one, router + shared + chosen * one


def _mlp(hidden: int, width: int) -> float:
    return 3.0 * hidden * width  # gate, up and down


def _count(config: Mapping[str, Any], field: str) -> int:
    if field not in config:
        raise ConfigError(f"the model config has no {field!r}")
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{field!r} of the model config must be a whole number above zero, not {value!r}")
    return value


def _preset(name: str, hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocabulary: int) -> ModelShape:
    return shape_of(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": width,
            "vocab_size": vocabulary,
        },
        name,
    )


PRESETS: Mapping[str, ModelShape] = MappingProxyType(
    {
        each.name: each
        for each in (
            _preset("llama-3-8b", 4096, 32, 32, 8, 14336, 128256),
            _preset("llama-3-70b", 8192, 80, 64, 8, 28672, 128256),
            _preset("llama-2-7b", 4096, 32, 32, 32, 11008, 32000),
            _preset("qwen-2.5-7b", 3584, 28, 28, 4, 18944, 152064),
            _preset("qwen-2.5-72b", 8192, 80, 64, 8, 29568, 152064),
            _preset("deepseek-67b", 8192, 95, 64, 8, 22016, 102400),
        )
    }
)


def preset(name: str) -> ModelShape:
    """The preset of this name. Raises ConfigError."""
    if name not in PRESETS:
        raise ConfigError(f"no model {name!r}; there are {', '.join(PRESETS)}, or give a config.json")
    return PRESETS[name]
