"""Registers batchweave's hooks into SGLang, in every process that SGLang spawns."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from engine_ext.plugin.cpu import adapters as adapters_cpu
from engine_ext.plugin.cpu import attention as attention_cpu
from engine_ext.plugin.cpu import chunks as chunks_cpu
from engine_ext.plugin.cpu import grammar as grammar_cpu
from engine_ext.plugin.cpu import groups as groups_cpu
from engine_ext.plugin.cpu import host_kv as host_kv_cpu
from engine_ext.plugin.cpu import threads as threads_cpu
from engine_ext.plugin.options import Overlap, Scheduling, handed_over
from engine_ext.plugin.platform_entry import gpu_is_present
from engine_ext.plugin.scheduler import (
    admission_hooks,
    blanks,
    depth,
    emulated,
    grammars,
    loopback,
    looping,
    nano,
    pdmux,
    pulse_hooks,
    report,
    sampling,
    spaces,
    steps,
    withdrawals,
)


def hooks() -> list[tuple[str, Callable[..., Any], HookType]]:
    """Return every hook that this machine and these options need, as (target, function, kind).

    None in an SGLang that batchweave did not start, though it is installed there.
    """
    options = handed_over()
    if options is None:
        return []
    found = [*report.HOOKS, *loopback.HOOKS, *steps.HOOKS, *pulse_hooks.HOOKS, *grammars.HOOKS, *blanks.HOOKS]
    found += depth.HOOKS
    found += [*sampling.HOOKS, *looping.HOOKS, *(spaces.SHARED if options.shares_cache else spaces.APART)]
    if options.scheduling is Scheduling.DUAL_SCAN:
        found += admission_hooks.HOOKS
        if options.overlap is Overlap.PDMUX:
            found += pdmux.HOOKS
    else:
        found += withdrawals.HOOKS
    if options.overlap is Overlap.NANO and not options.emulated:
        found += nano.HOOKS
    if options.emulated:
        found += emulated.HOOKS
    if not gpu_is_present():
        for module in (adapters_cpu, attention_cpu, chunks_cpu, grammar_cpu, groups_cpu, host_kv_cpu, threads_cpu):
            found += module.HOOKS
    for name in options.extra_hooks:
        found += import_module(name).HOOKS
    return found


def register() -> None:
    """Hook the scheduler and, on a CPU, what SGLang has for GPUs only; the entry point in `sglang.srt.plugins`."""
    for target, hook, kind in hooks():
        HookRegistry.register(target, hook, kind)
