"""Real SGLang for tests, each engine in a process of its own: one that dies fails the tests that use it."""

import asyncio
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import pytest

from benchmarks.engine_process import EngineProcess
from service.demo.prompts import corpus
from service.demo.tiny import NAME, ensure_tiny_model
from service.estimates.model_costs import planning_costs

if TYPE_CHECKING:
    from benchmarks.engine.bench_engine import BenchEngine
    from engine_ext.plugin.options import Overlap
    from engine_ext.plugin.worker.host import EngineHost


def _make_host(
    model: str, engine_args: dict[str, Any], more: dict[str, Any], before: Callable[[], None] | None
) -> "EngineHost":
    from engine_ext.plugin.options import Options
    from engine_ext.plugin.worker.host import EngineHost

    if before is not None:
        before()
    exact = {"enable_deterministic_inference": True}
    return EngineHost(model, NAME, exact | engine_args, Options(planning_costs(model, "h200", 1), **more))


async def _start(host: "EngineHost") -> None:
    await host.start()


@contextmanager
def running_engine(
    model: Path,
    engine_args: dict[str, Any],
    log: Path,
    environment: Mapping[str, str] | None = None,
    before: Callable[[], None] | None = None,
    **more: Any,
) -> Generator["EngineProcess[Any]", None, None]:
    """Run an EngineHost until the end of the block. `before` runs in its process first; `more` are its options."""
    make = partial(_make_host, str(model), engine_args, more, before)
    with EngineProcess(make, log, environment) as engine:
        engine.do(_start)
        yield engine


@contextmanager
def held_aside() -> Generator[None, None, None]:
    """In an engine's event loop: let no long work of a batch's request begin until the end of the block."""
    from engine_ext.plugin.worker.aside import aside, is_online

    async def hold() -> None:
        is_online.set(False)
        await aside(gate.wait, is_large=True)

    gate = Event()
    holder = asyncio.ensure_future(hold())
    try:
        yield
    finally:
        gate.set()
        del holder  # which kept it from the collector


def _make_bench(model: str, overlap: "Overlap", arguments: dict[str, Any], steps_file: str | None) -> "BenchEngine":
    from benchmarks.engine.bench_engine import BenchEngine
    from engine_ext.plugin.worker.cpu_defaults import CPU_DEFAULTS

    return BenchEngine.real(model, planning_costs(model, "h200", 1), overlap, CPU_DEFAULTS | arguments, steps_file)


@contextmanager
def running_bench(
    model: Path,
    overlap: "Overlap",
    arguments: dict[str, Any],
    log: Path,
    environment: Mapping[str, str] | None = None,
    steps_file: Path | None = None,
) -> Generator["EngineProcess[BenchEngine]", None, None]:
    """Run a BenchEngine until the end of the block."""
    steps = str(steps_file) if steps_file else None
    make = partial(_make_bench, str(model), overlap, arguments, steps)
    with EngineProcess(make, log, environment) as engine:
        yield engine


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the demo's model."""
    return ensure_tiny_model(tmp_path_factory.mktemp("model") / "demo", corpus())


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engines of a module log."""
    return tmp_path_factory.mktemp("log") / "engine.log"


@pytest.fixture(scope="module")
def engine(demo: Path, log: Path) -> "Generator[EngineProcess[Any], None, None]":
    with running_engine(demo, {"max_running_requests": 32}, log) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the end of the engine's log with the failure of a test."""
    report = yield
    log = getattr(item, "funcargs", {}).get("log")
    if report.failed and isinstance(log, Path) and log.exists():
        report.sections.append((f"End of {log}", log.read_text(errors="replace")[-4000:]))
    return report
