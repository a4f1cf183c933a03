"""Run the stages of one group in this process: `python -m benchmarks.gpu.stages GROUP FOLDER ENDS OWNER`.

`benchmarks.gpu` starts it, and kills it if it hangs.
"""

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.gpu import probe
from benchmarks.gpu.plan import ANOTHER, Group, Stage, plan_of
from benchmarks.gpu.records import Folder
from benchmarks.owner import end_with

ANSWERS_S = 10.0  # for an engine to say how it is


def main() -> None:
    threading.Thread(target=end_with, args=(int(sys.argv[4]),), daemon=True).start()
    group, folder, ends = Group(sys.argv[1]), Folder(Path(sys.argv[2])), float(sys.argv[3])
    asked = folder.asked
    assert asked is not None
    ended = folder.ended
    stages = [stage for stage in plan_of(asked) if stage.group is group and stage.name not in ended]
    if group is Group.PROBE:
        for stage in stages:
            _sync(stage, folder, ends, lambda stage=stage: probe.STAGES[stage.name](folder))
        return
    from benchmarks.gpu.bench import Bench  # the probes need no SGLang

    bench = Bench(asked, folder, group)
    if not stages[0].is_start:  # the process before has died, and its engine with it
        first = next(each for each in plan_of(asked) if each.group is group)
        stages.insert(0, replace(first, name=f"{ANOTHER}{first.name}"))
    if not _sync(stages[0], folder, ends, bench.start):
        return
    loop = asyncio.get_event_loop()  # SGLang's, which it makes at its start
    for stage in stages[1:]:
        loop.run_until_complete(_async(stage, folder, ends, lambda ends, stage=stage: bench.do(stage, ends)))
        try:
            loop.run_until_complete(asyncio.wait_for(bench.engine.state(), ANSWERS_S))
        except Exception:  # it hangs; another process starts another engine for the stages that are left
            traceback.print_exc()
            os._exit(1)
    bench.close()


def _sync(stage: Stage, folder: Folder, ends: float, do: Callable[[], dict[str, Any]]) -> bool:
    began = time.monotonic()
    if began + stage.least_s > ends:
        return False
    folder.begins(stage.name, stage.limit_s)
    try:
        folder.ends(stage.name, began, **do())
    except Exception as error:
        traceback.print_exc()
        folder.ends(stage.name, began, failed=f"{type(error).__name__}: {error}"[:500])
        return False
    return True


async def _async(stage: Stage, folder: Folder, ends: float, do: Callable[[float], Awaitable[dict[str, Any]]]) -> None:
    began = time.monotonic()
    if began + stage.least_s > ends:
        return
    limit_s = min(stage.limit_s, ends - began)
    folder.begins(stage.name, limit_s)
    try:
        async with asyncio.timeout(limit_s):
            found = await do(began + limit_s)
        is_cut = limit_s < stage.limit_s and not found.get("complete", True)
        folder.ends(stage.name, began, **found, **({"cut": True} if is_cut else {}))
    except Exception as error:
        traceback.print_exc()
        is_cut = limit_s < stage.limit_s and isinstance(error, TimeoutError)
        why = f"{type(error).__name__}: {error}"[:500]
        folder.ends(stage.name, began, failed=why, **({"cut": True} if is_cut else {}))


if __name__ == "__main__":
    main()
