"""Lets SGLang run LoRA adapters on a CPU, where it asks for pinned memory, which only a GPU's driver can give."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType
from torch.overrides import TorchFunctionMode

_MANAGER = "sglang.srt.lora.lora_manager.LoRAManager"


class Pageable(TorchFunctionMode):
    """Makes PyTorch ignore, inside its block, that a tensor is to be in pinned memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def pageable(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of SGLang's that would pin memory."""
    with Pageable():
        return original(*args, **kwargs)


HOOKS = [
    (f"{_MANAGER}.{name}", pageable, HookType.AROUND)
    for name in ("__init__", "load_lora_adapter", "prepare_lora_batch")
]
