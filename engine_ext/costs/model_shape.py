"""Counts a model's parameters and KV cache from its Hugging Face config.

Dense models and mixtures of experts; MHA, GQA, MQA and MLA; layers with sliding windows, and with linear attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from engine_ext.costs.layers import Kind, attention_kinds, expert_layers, window_of, with_implied
from engine_ext.errors import ConfigError

LARGEST = 10**9
STATE_BYTES = 4  # of an element of a linear layer's state, which engines keep in float32


@dataclass(frozen=True, slots=True)
class Matrix:
    """Describes `count` weight matrices [d_in, d_out] of a model; a token multiplies the share `active` of them."""

    d_in: int
    d_out: int
    count: int
    active: float = 1.0

    @property
    def parameters(self) -> float:
        return float(self.d_in) * self.d_out * self.count


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Holds what the cost model needs to know of a model.

    `matrices` multiply every token, `head` only tokens that an output is sampled from, and `other_parameters`
    (embedding, norms) are only looked up. `query_elements` is the width of all heads' queries over all layers. Over the
    layers that attend to everything, `kv_elements` is the KV cache per token, and `attention_flops` what scores and
    values cost for one pair of a query and a key token; `window_kv_elements` and `window_attention_flops` are the same
    over the layers that attend to the last `window` tokens. `state_bytes` is what linear attention keeps of a request.
    """

    name: str
    layers: int
    hidden: int
    matrices: tuple[Matrix, ...]
    head: Matrix
    other_parameters: float
    kv_elements: float
    query_elements: float
    attention_flops: float
    window: int = 0
    window_kv_elements: float = 0.0
    window_attention_flops: float = 0.0
    state_bytes: float = 0.0

    @property
    def parameters(self) -> float:
        """Return the number of parameters that must be in memory."""
        return sum(matrix.parameters for matrix in self.matrices) + self.head.parameters + self.other_parameters

    @property
    def active_parameters(self) -> float:
        """Return P of the cost model: all parameters, but of a mixture of experts only those that a token chooses.

        Like papers and model makers, it counts the embedding, though that is only looked up (a tenth of a small model).
        """
        chosen = sum(matrix.parameters * matrix.active for matrix in self.matrices)
        return chosen + self.head.parameters + self.other_parameters

    def weight_bytes(self, dtype_bytes: int) -> float:
        return self.parameters * dtype_bytes

    def kv_bytes_per_token(self, dtype_bytes: int) -> float:
        """Return the KV cache of a token that all windows still hold."""
        return (self.kv_elements + self.window_kv_elements) * dtype_bytes


@dataclass(frozen=True, slots=True)
class _Attention:
    """Describes attention: the matrices of all layers, and the widths of one layer per token."""

    matrices: tuple[Matrix, ...]
    kv_elements: int
    query_elements: int
    flops: int


def shape_of(config: Mapping[str, Any], name: str = "model") -> ModelShape:
    """Return the shape that a config.json describes. Raises ConfigError, which names the field."""
    config = with_implied(_language_part(config))
    hidden, layers = _count(config, "hidden_size"), _count(config, "num_hidden_layers")
    vocabulary, width = _count(config, "vocab_size"), _count(config, "intermediate_size")
    kinds = attention_kinds(config, layers)
    full, windows, linear = (kinds.count(kind) for kind in Kind)
    attention = _attention(config, hidden, full + windows)
    states, state_bytes = _linear_attention(config, hidden, linear)
    with_experts, experts = _experts(config, hidden, layers)
    # Llama 4's dense layers have a width of their own.
    dense_width = _count(config, "intermediate_size_mlp") if config.get("intermediate_size_mlp") else width
    # Gemma ties its embeddings, but its configs leave this field out.
    tied = config.get("tie_word_embeddings", str(config.get("model_type", "")).startswith("gemma"))
    if not isinstance(tied, bool):
        raise ConfigError(f"'tie_word_embeddings' of the model config must be true or false, not {tied!r}")
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        matrices=(
            *attention.matrices,
            *states,
            *_mlp(hidden, dense_width if with_experts else width, layers - with_experts),
            *experts,
        ),
        head=Matrix(hidden, vocabulary, 1),
        other_parameters=(0 if tied else vocabulary * hidden) + layers * 2 * hidden + hidden,
        kv_elements=full * attention.kv_elements,
        query_elements=(full + windows) * attention.query_elements,
        attention_flops=full * attention.flops,
        window=window_of(config) if windows else 0,
        window_kv_elements=windows * attention.kv_elements,
        window_attention_flops=windows * attention.flops,
        state_bytes=state_bytes,
    )


def _language_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the language model's config, which a multimodal model keeps inside its own. Raises ConfigError."""
    inside = config.get("text_config") or config
    if not isinstance(inside, Mapping):
        raise ConfigError(f"'text_config' of the model config must be an object, not {inside!r}")
    return inside


def _attention(config: Mapping[str, Any], hidden: int, layers: int) -> _Attention:
    heads = _count(config, "num_attention_heads")
    if config.get("kv_lora_rank"):  # MLA caches one compressed vector, and its rotary part, for all heads
        rank, rope = _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim")
        nope, value = _count(config, "qk_nope_head_dim"), _count(config, "v_head_dim")
        query = heads * (nope + rope)
        if config.get("q_lora_rank"):
            query_rank = _count(config, "q_lora_rank")
            queries = (Matrix(hidden, query_rank, layers), Matrix(query_rank, query, layers))
        else:
            queries = (Matrix(hidden, query, layers),)
        matrices = (
            *queries,
            Matrix(hidden, rank + rope, layers),
            Matrix(rank, heads * (nope + value), layers),
            Matrix(heads * value, hidden, layers),
        )
        return _Attention(matrices, rank + rope, query, 2 * heads * (nope + rope + value))
    kv_heads = _count(config, "num_key_value_heads") if config.get("num_key_value_heads") is not None else heads
    size = _count(config, "head_dim") if config.get("head_dim") else hidden // heads
    if size < 1:
        raise ConfigError(f"num_attention_heads {heads} is more than hidden_size {hidden}")
    if heads % kv_heads:
        raise ConfigError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    queries = heads * (2 if config.get("attn_output_gate") else 1)  # a gate is as wide as the queries
    matrices = (Matrix(hidden, size * (queries + 2 * kv_heads), layers), Matrix(heads * size, hidden, layers))
    return _Attention(matrices, 2 * kv_heads * size, heads * size, 4 * heads * size)


def _linear_attention(config: Mapping[str, Any], hidden: int, layers: int) -> tuple[tuple[Matrix, ...], float]:
    """Return the matrices of layers with gated delta rules (Qwen 3 Next), and the bytes of state of one request."""
    if not layers:
        return (), 0.0
    heads, key_heads = _count(config, "linear_num_value_heads"), _count(config, "linear_num_key_heads")
    key, value = _count(config, "linear_key_head_dim"), _count(config, "linear_value_head_dim")
    inward = 2 * key_heads * key + 2 * heads * value + 2 * heads  # queries, keys, values, output gate, two gates a head
    matrices = Matrix(hidden, inward, layers), Matrix(heads * value, hidden, layers)
    return matrices, float(layers * heads * key * value * STATE_BYTES)


def _experts(config: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, tuple[Matrix, ...]]:
    """Return how many layers have experts instead of one MLP, and the matrices of all these layers."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    number = next((_count(config, each) for each in names if config.get(each)), 0)
    if number == 0:
        return 0, ()
    chosen = _count(config, "num_experts_per_tok")
    if chosen > number:
        raise ConfigError(f"num_experts_per_tok {chosen} is more than the {number} experts")
    with_experts = expert_layers(config, layers)
    width = _count(config, "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size")
    if config.get("shared_expert_intermediate_size") is not None:
        shared_width = _count(config, "shared_expert_intermediate_size", least=0)
    else:
        implied = 1 if str(config.get("model_type", "")).startswith("llama4") else 0
        shared_width = width * _count({"n_shared_experts": implied, **config}, "n_shared_experts", least=0)
    return with_experts, (
        Matrix(hidden, number, with_experts),
        *(_mlp(hidden, shared_width, with_experts) if shared_width else ()),
        *_mlp(hidden, width, with_experts * number, chosen / number),
    )


def _mlp(hidden: int, width: int, count: int, active: float = 1.0) -> tuple[Matrix, ...]:
    """Return gate and up as one matrix, as engines run them, and down."""
    return (Matrix(hidden, 2 * width, count, active), Matrix(width, hidden, count, active))


def _count(config: Mapping[str, Any], field: str, least: int = 1) -> int:
    if field not in config:
        raise ConfigError(f"the model config has no {field!r}")
    value = config[field]
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
        raise ConfigError(f"{field!r} of the model config must be a whole number, at least {least}, not {value!r:.40}")
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
            _preset("qwen-2.5-14b", 5120, 48, 40, 8, 13824, 152064),
            _preset("qwen-2.5-72b", 8192, 80, 64, 8, 29568, 152064),
            _preset("deepseek-67b", 8192, 95, 64, 8, 22016, 102400),
        )
    }
)


def preset(name: str) -> ModelShape:
    """Return the preset with this name. Raises ConfigError."""
    if name not in PRESETS:
        raise ConfigError(f"no model {name!r}; choose from {', '.join(PRESETS)}, or give a config.json")
    return PRESETS[name]
