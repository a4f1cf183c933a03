"""Creates the engine of a worker as its settings say."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from service.errors import StartError
from service.estimates.model_costs import assumed_gpu, measured_overlap, planning_costs
from service.estimates.slo_file import read_slo_file
from service.requests.model_check import faults
from service.requests.weights import weight_faults
from service.settings import Settings, source_of
from service.worker import compilers
from service.worker.nodes import Nodes
from service.worker.script import read_script
from service.worker.scripted import ScriptedEngine

LEAST_SHARE = 1 / 8  # of the engine's time, for batches beside online requests of which no SLO is known


def check_version(settings: Settings) -> None:
    """Raise EngineStartError for an installed SGLang that this was not tested with, unless the settings allow it."""
    from engine_ext.plugin import versions

    versions.check(settings.sglang)


def make_engine(
    settings: Settings, say: Callable[[str], None] = lambda _: None, on_fault: Callable[..., None] | None = None
) -> Any:
    """Create the engine in this process. Call it in the main thread, before the event loop.

    `say` gets each stage. `on_fault`: what to do when a rank fails, instead of ending this process at once. Raises
    StartError.
    """
    from engine_ext import warm_up

    if settings.engine == "scripted":
        if not warm_up.is_done():  # which the first plan waits for: say it, instead of "planning" for minutes
            say("compiles the planner, which takes one or two minutes the first time")
            warm_up.ensure()
        return ScriptedEngine(read_script(settings.script))
    from engine_ext.plugin.worker.cpu_defaults import sleep_soon

    sleep_soon()
    say("loads SGLang")
    check_version(settings)
    compilers.put_on_path()
    from engine_ext.plugin.options import Emulation, Options, Overlap, Scheduling
    from engine_ext.plugin.worker.host import EngineHost

    cost = planning_costs(settings.model_source, assumed_gpu(settings), settings.replica)
    steps_file = None
    if settings.steps_file is not None:
        settings.steps_file.parent.mkdir(parents=True, exist_ok=True)
        steps_file = str(settings.steps_file.resolve())
    emulated = Emulation.REAL if settings.emulated_device else None
    options = Options(cost, Scheduling(settings.scheduling), emulated=emulated, steps_file=steps_file)
    options = replace(options, shares_cache=settings.shared_cache)
    if settings.slo_file is not None:
        online, limits = read_slo_file(settings.slo_file)
        options = replace(options, online=online, sheds=True, limits=limits)
    else:  # nobody has said what online requests must get
        options = replace(options, least_share=LEAST_SHARE)
    wanted = settings.overlap or measured_overlap(assumed_gpu(settings), settings.model_source)
    overlap = Overlap(wanted) if wanted else None
    source = Path(settings.model_source)
    loads = source.is_dir() and not settings.emulated_device and "load_format" not in settings.engine_args
    if loads and (wrong := weight_faults(source)):
        raise StartError(f"{source}: {wrong[0]}")
    for fault in faults(source):
        structlog.get_logger().warning("answers will be spoilt", model=settings.model_source, fault=fault)
    say(
        "starts the engine"
        if warm_up.is_done()
        else "starts the engine and compiles the scan, which takes one or two minutes the first time"
    )
    nodes = Nodes.of(settings)
    arguments = {**settings.engine_args, **_parsers(settings), **({} if nodes is None else nodes.engine_args)}
    arguments = with_adapters(settings, arguments)
    if on_fault is not None:
        arguments["custom_sigquit_handler"] = on_fault
    args = (settings.model_source, settings.served_model, arguments)
    return EngineHost(*args, options, overlap, settings.step_limit_s)


def _parsers(settings: Settings) -> dict[str, Any]:
    """Return SGLang's arguments that name its parsers."""
    named = {"reasoning_parser": settings.reasoning_parser, "tool_call_parser": settings.tool_parser}
    return {argument: name for argument, name in named.items() if name != "none"}


def parsers_of(settings: Settings) -> tuple[str | None, str | None]:
    """Return what finds tool calls and reasoning in the model's answers; None for nothing. Raises EngineStartError."""
    from engine_ext.plugin.worker import parsers

    logging.getLogger("sglang.srt.parser.template_detection").setLevel(logging.ERROR)  # the caller says what was found
    return parsers.chosen(settings.model_source, {**settings.engine_args, **_parsers(settings)})


def with_adapters(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's arguments with those that load the model's adapters, if it has any."""
    if not settings.adapters:
        return arguments
    named = [
        {"lora_name": name, "lora_path": source_of(given), "pinned": False} for name, given in settings.adapters.items()
    ]
    return {**arguments, "enable_lora": True, "lora_paths": named}


def overlap_to_measure(settings: Settings) -> str:
    """Return the overlap under which a calibration measures: mixed chunks on a GPU, so that it has mixed steps."""
    from engine_ext.plugin.worker.overlap import choose

    return choose(None, settings.model_source, with_adapters(settings, settings.engine_args)).value


def possible_overlaps(settings: Settings) -> list[str]:
    """Return the ways to overlap prefill and decodes that this machine and model allow; the log explains the rest."""
    from engine_ext.plugin.options import Overlap
    from engine_ext.plugin.platform_entry import gpu_is_present
    from engine_ext.plugin.worker.overlap import choose

    # Without a GPU nothing runs beside anything, so halves could only cost time.
    ways = [each for each in Overlap if each is not Overlap.NANO or gpu_is_present()]
    arguments = with_adapters(settings, settings.engine_args)
    return [each.value for each in ways if choose(each, settings.model_source, arguments) is each]
