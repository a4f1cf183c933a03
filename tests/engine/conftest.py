"""One SGLang for a module of tests. Its close() ends every child of this process, so nothing else may run beside it."""

import asyncio
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from service.demo.model import NAME, ensure_demo_model
from service.demo.prompts import corpus
from service.estimates.model_costs import planning_costs

Result = TypeVar("Result")


@dataclass(frozen=True)
class RealEngine:
    """An EngineHost and the event loop that it lives in."""

    host: Any
    loop: asyncio.AbstractEventLoop
    model: Path

    def do(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self.loop.run_until_complete(coroutine)


@contextmanager
def running_engine(
    model: Path, name: str, engine_args: dict[str, Any], scheduling: str = "dual-scan", **more: Any
) -> Generator[RealEngine, None, None]:
    from engine_ext.plugin.options import Options, Scheduling
    from engine_ext.plugin.worker.host import EngineHost

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    options = Options(planning_costs(str(model), "h200", 1), Scheduling(scheduling), **more)
    host = EngineHost(str(model), name, engine_args, options)
    loop.run_until_complete(host.start())
    yield RealEngine(host, loop, model)
    host.close()
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Generator[RealEngine, None, None]:
    model = ensure_demo_model(tmp_path_factory.mktemp("model") / "demo", corpus())
    with running_engine(model, NAME, {"max_running_requests": 32}) as running:
        yield running
