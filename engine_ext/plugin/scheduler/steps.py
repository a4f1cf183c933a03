"""Records what a scheduler process's steps did and took, and what they should have taken by the cost model."""

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sglang.srt.plugins.hook_registry import HookType

from engine_ext.arrays import Floats
from engine_ext.coserve.predictor import Load
from engine_ext.costs.engine_model import Clock, EngineModel, StepModel, compute_time, step_time
from engine_ext.plugin.options import mine
from engine_ext.plugin.scheduler import emulated, pulse_hooks
from engine_ext.plugin.scheduler.step_load import load_of

log = logging.getLogger(__name__)
INTERVALS = 256  # rows of the series, each an interval of steps; when all are full, each pair is merged into one
WRITTEN_AT_ONCE = 32
MOST_WRITTEN = 100_000  # steps in one file
FORGETS = 0.99  # of the slowest step, with each later one: a machine that stood still once stays slow no longer
TELLING = 64  # prompt tokens of a step whose time says how fast the device is


class Lane(IntEnum):
    """A sequence of steps that follow each other; with PD-multiplexing, prefills run beside decodes."""

    STEPS = 0
    PREFILLS = 1


class Begun(NamedTuple):
    load: Load
    compute_s: float
    reads_s: float
    predicted_s: float


@dataclass(eq=False)
class StepBooks:
    """The steps of one scheduler. `model`: predicts how long they take.

    `series`: float64 [intervals, 6], one row per interval of steps: seconds, predicted seconds, seconds of compute and
    of KV reads by the cost model, prompt tokens, and output tokens. `file`: where each step is written too, in the
    format that `batchweave simulate --profile` reads. `slowness`: the most seconds that a step with prompts lately took
    for each second that was predicted.
    """

    model: StepModel
    file: Path | None = None
    totals: Floats = field(default_factory=lambda: np.zeros(6))
    steps: int = 0
    slowness: float = 1.0
    _series: Floats = field(default_factory=lambda: np.zeros((INTERVALS, 6)))
    _length: int = 0
    _every: int = 1
    _since: Floats = field(default_factory=lambda: np.zeros(6))
    _under_way: "tuple[deque[Begun], ...]" = field(default_factory=lambda: tuple(deque[Begun]() for _ in Lane))
    _is_begun: bool = False
    _busy: float = 0.0  # seconds with a step under way, since the last end
    _last_event: float = 0.0
    _lines: list[str] = field(default_factory=list[str])

    def begin(self, load: Load, now: float, lane: Lane = Lane.STEPS) -> float:
        """Note that a step begins; return how many seconds it should take, by the slowest steps so far."""
        compute = float(compute_time(self.model, load.prompt_tokens + load.decoding, load.quadratic))
        reads = load.kv_tokens * float(self.model.read_s)
        predicted = float(step_time(self.model, compute, reads))
        self._pass(now)
        self._under_way[lane].append(Begun(load, compute, reads, predicted))
        return self.slowness * predicted

    def end(self, now: float, lane: Lane = Lane.STEPS) -> None:
        """Note that the earliest step under way has ended. A step is launched while the one before it still runs.

        A step's seconds are those since the last end in which any step ran, so that all of them add up to the time that
        passed.
        """
        if not self._under_way[lane]:
            return
        self._pass(now)
        load, compute, reads, predicted = self._under_way[lane].popleft()
        seconds, self._busy = self._busy, 0.0
        self.steps += 1
        if load.prompt_tokens >= TELLING:
            self.slowness = max(seconds / predicted, FORGETS * self.slowness)
        self._since += (seconds, predicted, compute, reads, load.prompt_tokens, load.decoding)
        if self.steps % self._every == 0:
            self._keep()
        # A step that ran beside another does not show what it costs alone.
        if self.file is not None and self.steps <= MOST_WRITTEN and lane is Lane.STEPS and not self._is_beside():
            self._write(load, seconds)

    def _is_beside(self) -> bool:
        return bool(self._under_way[Lane.PREFILLS])

    def _pass(self, now: float) -> None:
        if any(self._under_way):
            self._busy += now - self._last_event
        self._last_event = now

    @property
    def series(self) -> Floats:
        return np.vstack([self._series[: self._length], self._since])

    def report(self) -> dict[str, Any]:
        self.flush()
        seconds, predicted, compute, reads, prompts, outputs = (self.totals + self._since).tolist()
        return {
            "engine_steps": self.steps,
            "step_s": seconds,
            "predicted_step_s": predicted,
            "compute_s": compute,
            "reads_s": reads,
            "prompt_tokens": int(prompts),
            "output_tokens": int(outputs),
            "series_every": self._every,
            "series": np.round(self.series, 6).tolist(),
        }

    def flush(self) -> None:
        """Write the buffered steps, at first into a new file. If this fails, the engine continues without the file."""
        if self.file is None or not self._lines:
            return
        try:
            with self.file.open("a" if self._is_begun else "w") as file:
                file.writelines(self._lines)
        except OSError as error:
            log.error("writing steps failed; no more steps are written: %s", error)
            self.file = None
        self._is_begun = True
        self._lines.clear()

    def _keep(self) -> None:
        self._series[self._length] = self._since
        self.totals += self._since
        self._since[:] = 0.0
        self._length += 1
        if self._length == INTERVALS:
            self._series[: INTERVALS // 2] = self._series[0::2] + self._series[1::2]
            self._length //= 2
            self._every *= 2

    def _write(self, load: Load, seconds: float) -> None:
        if seconds <= 0 or load.prompt_tokens + load.decoding == 0:
            return
        row = {
            "prefill_tokens": load.prompt_tokens,
            "quadratic": load.quadratic,
            "decoding": load.decoding,
            "kv_tokens": load.kv_tokens,
            "seconds": seconds,
        }
        self._lines.append(json.dumps(row) + "\n")
        if len(self._lines) >= WRITTEN_AT_ONCE or self.steps == MOST_WRITTEN:
            self.flush()


def books_of(scheduler: Any) -> StepBooks:
    found = getattr(scheduler, "batchweave_steps", None)
    if found is None:
        options = mine()
        ranks = scheduler.ps
        is_first = not (ranks.tp_rank or ranks.pp_rank or ranks.dp_rank)  # the other ranks run the same steps
        file = Path(options.steps_file) if options.steps_file and is_first else None
        found = StepBooks(EngineModel.of_steps(options.cost, Clock.MIXED).numbers, file)
        scheduler.batchweave_steps = found
    return found


def now() -> float:
    """Return the seconds of the device's virtual clock if there is one, or of the real clock."""
    return (emulated.clock() or time.perf_counter)()


def run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Note that a step begins, and that it ends where it is over when this returns."""
    books = books_of(scheduler)
    if not batch.forward_mode.is_split_prefill() or batch.split_index == 0:  # else it continues with more layers
        pulse_hooks.expects(scheduler, books.begin(load_of(batch), now(), lane_of(batch)))
    found = original(scheduler, batch, *args, **kwargs)
    if not emulated.outlasts_launch():
        books.end(now())
    return found


def process_batch_result(original: Callable[..., Any], scheduler: Any, batch: Any, result: Any, *args: Any) -> Any:
    """Note that a step has ended. On a GPU it still ran while the next one was launched, and this waits for it.

    The time is taken before SGLang handles the results, which takes milliseconds in which the next step already runs.
    """
    if emulated.outlasts_launch():
        emulated.wait_for(result)
        books_of(scheduler).end(now(), lane_of(batch))
    found = original(scheduler, batch, result, *args)
    pulse_hooks.stepped(scheduler)
    return found


def lane_of(batch: Any) -> Lane:
    return Lane.PREFILLS if batch.forward_mode.is_split_prefill() else Lane.STEPS


_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
HOOKS = [
    (f"{_SCHEDULER}.run_batch", run_batch, HookType.AROUND),
    (f"{_SCHEDULER}.process_batch_result", process_batch_result, HookType.AROUND),
]
