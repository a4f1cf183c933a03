"""Entry points through which SGLang finds batchweave, in every process that it spawns."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from engine_ext.plugin import admission, attention_cpu, grammar_cpu


def gpu_is_present() -> bool:
    import torch

    return torch.cuda.is_available() or torch.xpu.is_available()


def hooks() -> list[tuple[str, Callable[..., Any], HookType]]:
    """Every hook that this machine needs, as (target, function, kind)."""
    if gpu_is_present():
        return admission.HOOKS
    return [*admission.HOOKS, *attention_cpu.HOOKS, *grammar_cpu.HOOKS]


def register() -> None:
    """`sglang.srt.plugins`: hook the scheduler, and on a CPU what SGLang has for GPUs only."""
    for target, hook, kind in hooks():
        HookRegistry.register(target, hook, kind)


def activate_cpu() -> str | None:
    """`sglang.srt.platforms`: the CPU platform, only where there is no GPU."""
    return None if gpu_is_present() else "engine_ext.plugin.platform_cpu.CpuPlatform"
