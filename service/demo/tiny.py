"""Makes a tiny Llama of random weights with its own tokenizer, for tests and for the scripted engine.

Its answers are noise, and end by themselves as a real model's do: most after some tens of tokens, a few never.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

NAME = "batchweave-demo"
EDITION = 2  # of what is made here; a folder with an older one is made again
SEED = 20261121
EOS_SEED, EOS_SPREAD = 1, 1.9  # how far EOS logits spread, times that of others: it wins about once in 50 tokens
VOCAB = 4096
HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 128, 2, 4, 2, 256
CONTEXT = 8192

BOS_ID, EOS_ID = 0, 1
BOS, EOS, SYSTEM, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{{ '<|begin|>' }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)


def ensure_tiny_model(folder: Path, corpus: Iterable[str]) -> Path:
    """Create the model in `folder`, if it is not there, and return its path. The same corpus gives the same files."""
    config = folder / "config.json"
    if config.exists() and json.loads(config.read_text()).get("batchweave_demo") == EDITION:
        return folder
    making = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    making.mkdir(parents=True)
    _write_tokenizer(making, corpus)
    save_file(_weights(), making / "model.safetensors", metadata={"format": "pt"})
    (making / "config.json").write_text(json.dumps(_config(), indent=1))
    shutil.rmtree(folder, ignore_errors=True)
    making.rename(folder)
    return folder


def _write_tokenizer(folder: Path, corpus: Iterable[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, EOS, SYSTEM, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": BOS,
                "eos_token": EOS,
                "pad_token": EOS,
                "clean_up_tokenization_spaces": False,
                "model_max_length": CONTEXT,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        )
    )


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "batchweave_demo": EDITION,
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "torch_dtype": "bfloat16",
    }


def _weights() -> dict[str, NDArray[np.float32]]:
    """Return float32 tensors by Hugging Face names, spread widely enough that greedy answers depend on the prompt."""
    rng = np.random.default_rng(SEED)

    def normal(rows: int, columns: int) -> NDArray[np.float32]:
        return rng.normal(0.0, 1.5 / np.sqrt(columns), (rows, columns)).astype(np.float32)

    kv = KV_HEADS * HIDDEN // HEADS
    tensors = {"model.embed_tokens.weight": rng.normal(0.0, 1.0, (VOCAB, HIDDEN)).astype(np.float32)}
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        tensors[f"{at}.input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        tensors[f"{at}.self_attn.q_proj.weight"] = normal(HIDDEN, HIDDEN)
        tensors[f"{at}.self_attn.k_proj.weight"] = normal(kv, HIDDEN)
        tensors[f"{at}.self_attn.v_proj.weight"] = normal(kv, HIDDEN)
        tensors[f"{at}.self_attn.o_proj.weight"] = normal(HIDDEN, HIDDEN)
        tensors[f"{at}.post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        tensors[f"{at}.mlp.gate_proj.weight"] = normal(FFN, HIDDEN)
        tensors[f"{at}.mlp.up_proj.weight"] = normal(FFN, HIDDEN)
        tensors[f"{at}.mlp.down_proj.weight"] = normal(HIDDEN, FFN)
    tensors["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    head = normal(VOCAB, HIDDEN)
    # With its own seed, chosen because no answer to the demo's requests is empty.
    row = np.random.default_rng(EOS_SEED).normal(0.0, EOS_SPREAD * 1.5 / np.sqrt(HIDDEN), HIDDEN)
    head[EOS_ID] = row.astype(np.float32)
    tensors["lm_head.weight"] = head
    return tensors
