"""Gives the forward pass on a CPU its threads. The process starts with one, because it is forked."""

from typing import Any

import torch
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.plugin.options import mine


def use(result: Any, *_: Any, **__: Any) -> Any:
    if (threads := mine().cpu_threads) is not None:
        torch.set_num_threads(threads)
    return result


HOOKS = [("sglang.srt.model_executor.model_runner.ModelRunner.load_model", use, HookType.AFTER)]
