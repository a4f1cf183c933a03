"""LoRA adapters of the demo model, with random weights that change its answers."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from service.demo.tiny import HEADS, HIDDEN, KV_HEADS, LAYERS

RANK, ALPHA = 8, 16
ROWS = {"q_proj": HIDDEN, "k_proj": HIDDEN // HEADS * KV_HEADS, "v_proj": HIDDEN // HEADS * KV_HEADS, "o_proj": HIDDEN}


def _weights(seed: int) -> dict[str, tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Return A [RANK, HIDDEN] and B [rows, RANK] by the name of the module that they belong to."""
    generator = np.random.default_rng(seed)

    def normal(rows: int, columns: int) -> NDArray[np.float32]:
        return (0.1 * generator.standard_normal((rows, columns))).astype(np.float32)

    modules = [
        (f"model.layers.{layer}.self_attn.{name}", rows) for layer in range(LAYERS) for name, rows in ROWS.items()
    ]
    return {name: (normal(RANK, HIDDEN), normal(rows, RANK)) for name, rows in modules}


def make_adapter(folder: Path, seed: int) -> Path:
    """Write an adapter as PEFT does; return its folder."""
    folder.mkdir(parents=True)
    tensors: dict[str, NDArray[np.float32]] = {}
    for name, (a, b) in _weights(seed).items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(ROWS), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**about, "task_type": "CAUSAL_LM"}))
    return folder


def merged(model: Path, folder: Path, seed: int) -> Path:
    """Write the model with the adapter's weights added to its own; return its folder."""
    folder.mkdir(parents=True)
    tensors = load_file(model / "model.safetensors")
    for name, (a, b) in _weights(seed).items():
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"] + ALPHA / RANK * b @ a
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for each in model.glob("*.json"):
        (folder / each.name).write_bytes(each.read_bytes())
    return folder
