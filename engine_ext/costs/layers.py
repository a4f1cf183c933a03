"""Reads from a Hugging Face config what kind each layer of a model is: its attention, and whether it has experts."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from engine_ext.errors import ConfigError

# Fields of layers that are not modelled.
UNKNOWN_LAYERS = ("expert_layer_period", "attn_layer_period", "mamba_d_state", "conv_L_cache")
# What these models' configs leave to the code that reads them.
IMPLIED: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "gemma2": {"sliding_window_pattern": 2},
        "gemma3_text": {"sliding_window_pattern": 6, "vocab_size": 262_208},
        "cohere2": {"sliding_window_pattern": 4},
        "qwen3_next": {"full_attention_interval": 4, "attn_output_gate": True},
    }
)


class Kind(StrEnum):
    """How a layer attends to what came before."""

    FULL = "full_attention"
    WINDOW = "sliding_attention"  # to the last tokens only
    LINEAR = "linear_attention"  # to a state of fixed size


NAMES = {"chunked_attention": Kind.WINDOW, **{kind.value: kind for kind in Kind}}


def with_implied(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with what its `model_type` implies where it says nothing."""
    implied = IMPLIED.get(str(config.get("model_type", "")), {})
    return {**implied, **{name: value for name, value in config.items() if value is not None}}


def attention_kinds(config: Mapping[str, Any], layers: int) -> list[Kind]:
    """Return the kind of each layer. Raises ConfigError, which names the field."""
    for field in UNKNOWN_LAYERS:
        if config.get(field) not in (None, 0, 1, []):
            raise ConfigError(f"models with {field!r} have layers of kinds that are not supported")
    named = config.get("layer_types")
    if named is not None:
        return _named(named, layers)
    if config.get("no_rope_layers") and config.get("attention_chunk_size"):
        rotary = config["no_rope_layers"]
        if not isinstance(rotary, list) or len(rotary) != layers:
            raise ConfigError(f"'no_rope_layers' of the model config must have {layers} entries")
        return [Kind.WINDOW if each else Kind.FULL for each in rotary]
    if interval := _period(config, "full_attention_interval"):
        return [Kind.LINEAR if (layer + 1) % interval else Kind.FULL for layer in range(layers)]
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [Kind.FULL] * layers
    if pattern := _period(config, "sliding_window_pattern"):
        return [Kind.WINDOW if (layer + 1) % pattern else Kind.FULL for layer in range(layers)]
    first = config.get("max_window_layers", 0)  # Qwen: the layers below it attend to everything
    if not isinstance(first, int):
        raise ConfigError(f"'max_window_layers' of the model config must be a whole number, not {first!r:.40}")
    return [Kind.WINDOW if layer >= first else Kind.FULL for layer in range(layers)]


def window_of(config: Mapping[str, Any]) -> int:
    """Return the tokens of a window. Raises ConfigError."""
    field = "sliding_window" if config.get("sliding_window") else "attention_chunk_size"
    window = config.get(field)
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise ConfigError(f"{field!r} of the model config must be a whole number, at least 1, not {window!r:.40}")
    return window


def expert_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return how many layers have experts in place of one MLP, if any has."""
    dense = config.get("first_k_dense_replace", 0)
    if not isinstance(dense, int) or not 0 <= dense <= layers:
        raise ConfigError(f"'first_k_dense_replace' must be a number of the {layers} layers, not {dense!r:.40}")
    every = _period(config, "decoder_sparse_step") or _period(config, "interleave_moe_layer_step") or 1
    without = config.get("mlp_only_layers", [])
    if not isinstance(without, list):
        raise ConfigError(f"'mlp_only_layers' of the model config must be a list, not {without!r:.40}")
    return sum(layer >= dense and (layer + 1) % every == 0 and layer not in without for layer in range(layers))


def _named(named: Any, layers: int) -> list[Kind]:
    if not isinstance(named, list) or len(named) != layers:
        raise ConfigError(f"'layer_types' of the model config must name {layers} layers")
    for each in named:
        if each not in NAMES:
            raise ConfigError(f"'layer_types' of the model config names {each!r:.40}, which is not supported")
    return [NAMES[each] for each in named]


def _period(config: Mapping[str, Any], field: str) -> int | None:
    value = config.get(field)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ConfigError(f"{field!r} of the model config must be a whole number, at least 1, not {value!r:.40}")
    return value
