"""Runs one SGLang engine for one benchmark run after another: a list of requests in, the figures of the run out."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput, SetInternalStateReq

from benchmarks.engine.arrivals import ARRIVES
from benchmarks.engine.tuning import MOST_TOKENS, PRIORITY, Tuning
from engine_ext.coserve.slo import DEFAULT
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import EngineModel
from engine_ext.errors import EngineError, InputError
from engine_ext.plugin.marks import KIND, UNTOLD, online_marks
from engine_ext.plugin.options import Emulation, Options, Overlap
from engine_ext.plugin.platform_entry import gpu_is_present
from engine_ext.plugin.worker import overlap
from engine_ext.plugin.worker.calibration_load import measure_steps
from engine_ext.plugin.worker.cpu_defaults import CPU_DEFAULTS
from engine_ext.plugin.worker.forking import ForkingEngine
from engine_ext.plugin.worker.shutdown import shut_down

RETUNE, ARRIVALS, LIVELY_WEIGHTS, MOST = (
    f"benchmarks.engine.{name}" for name in ("retune", "arrivals", "lively_weights", "most")
)
CONTEXT = 1 << 18  # tokens
RUNNING = 2048
ABORTED_S = 2.0  # for requests that were aborted to say so
FIRST = 100  # priority of online requests, where the batch's is 0
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Arriving(NamedTuple):
    """Describes an online request: when it comes, its token ids, its output tokens, and its class."""

    at_s: float
    prompt: list[int]
    output: int
    slo: str = DEFAULT


class Streamed(NamedTuple):
    """Says when an online request came and got its tokens, in seconds since the run began, by its client's clock.

    `gap_s` is the longest time between two of its tokens.
    """

    arrives_s: float
    first_s: float
    last_s: float
    generated: int
    gap_s: float


class BenchEngine:
    """An SGLang engine for benchmarks. Its requests are token ids, so it needs no tokenizer.

    Create it in the main thread before the event loop runs.
    """

    def __init__(self, model_path: str, options: Options, arguments: dict[str, Any]) -> None:
        options.hand_over()
        on_gpu = gpu_is_present()
        if not on_gpu:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        ours = {"skip_tokenizer_init": True, "skip_server_warmup": True, "sleep_on_idle": True, "log_level": "error"}
        self._engine = (Engine if on_gpu else ForkingEngine)(model_path=model_path, **{**ours, **arguments})
        self._manager: Any = self._engine.tokenizer_manager

    @classmethod
    def emulated(
        cls,
        model_path: str,
        cost: CostModel,
        capacity: int | None = None,
        context: int = CONTEXT,
        emulation: Emulation = Emulation.VIRTUAL,
        steps_file: str | None = None,
        more_hooks: tuple[str, ...] = (),
    ) -> "BenchEngine":
        """Start an engine on an emulated machine with `capacity` tokens of KV cache.

        `model_path`: any small model; it never runs. `steps_file`: where to write each step. `more_hooks`: modules
        whose hooks run beside those of benchmarks.
        """
        hooks = ((RETUNE, ARRIVALS) if emulation is Emulation.VIRTUAL else (RETUNE,)) + more_hooks
        return cls(
            model_path,
            Options(cost, emulated=emulation, extra_hooks=hooks, steps_file=steps_file),
            {
                **CPU_DEFAULTS,
                "max_total_tokens": capacity or EngineModel.of(cost).capacity,
                "max_running_requests": RUNNING,
                "chunked_prefill_size": MOST_TOKENS,
                "enable_mixed_chunk": True,
                "max_prefill_tokens": MOST_TOKENS + RUNNING,
                "context_length": context,
                "json_model_override_args": json.dumps({"max_position_embeddings": context}),
                "disable_overlap_schedule": True,
            },
        )

    @classmethod
    def real(
        cls,
        model_path: str,
        cost: CostModel,
        wanted: Overlap,
        arguments: dict[str, Any],
        steps_file: str | None = None,
        sm_margin: int = 0,
    ) -> "BenchEngine":
        """Start an engine on this machine; one with mixed chunks can also run without them.

        Raises InputError if `wanted` is not possible here.
        """
        reason = overlap.against(wanted, model_path, arguments)
        if reason is not None:
            raise InputError(f"overlap {wanted.value!r} is not possible here: {reason}")
        hooks = RETUNE, LIVELY_WEIGHTS, MOST
        options = Options(cost, overlap=wanted, extra_hooks=hooks, steps_file=steps_file, sm_margin=sm_margin)
        ours = {"max_running_requests": RUNNING, "max_prefill_tokens": MOST_TOKENS + RUNNING}
        return cls(model_path, options, {**ours, **overlap.ARGUMENTS[wanted], **arguments})

    def measure_steps(self, steps: Path, longest: int | None = None) -> AsyncIterator[str]:
        """See EngineHost.measure_steps; `steps` is the file that the engine was started with."""
        self._manager.auto_create_handle_loop()
        return measure_steps(self._engine, steps, longest)

    async def retune(self, tuning: Tuning) -> None:
        """Set how requests are scheduled from now on. Raises EngineError if SGLang does not accept the tuning."""
        self._manager.auto_create_handle_loop()
        if not all(await self._manager.set_internal_state(SetInternalStateReq(server_args=tuning.numbers()))):
            raise EngineError(f"SGLang did not accept {tuning}")

    async def state(self) -> dict[str, Any]:
        """Return batchweave's part of the scheduler's state."""
        [state] = await self._manager.get_internal_state()
        return state["batchweave"] | state.get("batchweave_arrivals", {}) | state.get("batchweave_most", {})

    async def ask(self, rid: str, prompt: list[int], output: int) -> dict[str, Any]:
        """Run one online request, which has no mark of a batch; return the token ids of its `answer` and `retractions`.

        Retractions are counted as SGLang does, with parked prefills.
        """
        found: Any = await self._generate(rid, prompt, output, None, {})
        return {"answer": found["output_ids"], "retractions": found["meta_info"].get("num_retractions", 0)}

    async def run(
        self,
        tuning: Tuning,
        prompts: Sequence[list[int]],
        outputs: Sequence[int],
        within_s: float | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Run all requests, given in this order; return the run's figures, `wall_s`, and the token ids of `answers`.

        SGLang's policies know the output lengths in advance, by max_tokens; the dual scan does not. All requests wait
        before the first step. What has not ended `within_s` seconds after it is aborted, and has no answer; then the
        run is not `complete`. `more`: arguments of SGLang's async_generate for each request; `sampling` has more of its
        sampling parameters. Raises EngineError if SGLang does not accept the tuning.
        """
        await self._begin(tuning)
        tasks = await self._send_batch(tuning, prompts, outputs, more)
        await self._until_waiting(len(prompts), tasks)
        started = time.perf_counter()
        await self._manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
        _, late = await asyncio.wait(tasks, timeout=within_s)
        wall_s = time.perf_counter() - started
        found = await self.state()
        if late:
            self._manager.abort_request(abort_all=True)
            await asyncio.wait(late, timeout=ABORTED_S)
        answers = [{} if task in late else task.result() for task in tasks]
        metas = [answer.get("meta_info", {}) for answer in answers]
        return found | {
            "complete": not late,
            "metas": metas,
            "wall_s": wall_s,
            "answers": [answer.get("output_ids", []) for answer in answers],
            "cached": [meta.get("cached_tokens", 0) for meta in metas],
            "cached_tokens": sum(meta.get("cached_tokens", 0) for meta in metas),
            "retractions": sum(meta.get("num_retractions", 0) for meta in metas),
        }

    async def run_beside(
        self, tuning: Tuning, prompts: Sequence[list[int]], outputs: Sequence[int], online: Sequence[Arriving]
    ) -> dict[str, Any]:
        """Run a batch, as `run` does, beside online requests; return what each side got (`arrivals.py`).

        They come by the device's virtual clock. `batch` holds the output tokens of the batch's requests, in their
        order, when `until_s` is over. The run ends when all online requests have, and not before `until_s`. What is
        left of the batch is aborted then. Raises EngineError if the batch ends before.
        """
        await self._begin(tuning)
        batch = await self._send_batch(tuning, prompts, outputs)
        first = {"priority": FIRST} if tuning.policy == PRIORITY else {}
        waited_for = list[asyncio.Task[Any]]()
        for number, each in enumerate(online):
            marks = {ARRIVES: each.at_s, **online_marks(each.slo)}
            asked = self._generate(f"online-{number}", each.prompt, each.output, marks, first)
            waited_for.append(asyncio.create_task(asked))
        await self._until_waiting(len(prompts) + len(online), [*batch, *waited_for])
        started = time.perf_counter()
        await self._manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
        await asyncio.gather(*waited_for)
        while (state := await self.state())["virtual_s"] < tuning.until_s and batch:
            if all(task.done() for task in batch):
                raise EngineError("the batch ended before the arrivals; give it more requests")
            await asyncio.sleep(0.1)
        self._manager.abort_request(abort_all=True)
        await asyncio.gather(*batch, return_exceptions=True)
        generated = [state["batch"].get(f"bench-{number}", 0) for number in range(len(prompts))]
        return state | {"batch": generated, "wall_s": time.perf_counter() - started}

    async def run_live(
        self,
        tuning: Tuning,
        prompts: Sequence[list[int]],
        outputs: Sequence[int],
        online: Sequence[Arriving],
        seconds: float,
    ) -> dict[str, Any]:
        """Run a batch in real time, for so many seconds at least, beside online requests that are streamed to clients.

        Returns the scheduler's figures with `online`, one Streamed for each request, and `batch_tokens`: the output
        tokens of the batch that decodes brought until then. What is left of the batch is aborted. Raises EngineError if
        the batch ends before.
        """
        await self._begin(tuning)
        batch = await self._send_batch(tuning, prompts, outputs)
        first = {"priority": FIRST} if tuning.policy == PRIORITY else {}
        await self._until_waiting(len(prompts), batch)
        began = time.perf_counter()
        await self._manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
        streams = [self._stream(f"online-{number}", each, began, first) for number, each in enumerate(online)]
        streamed = await asyncio.gather(*streams)
        await asyncio.sleep(began + seconds - time.perf_counter())
        if batch and all(task.done() for task in batch):
            raise EngineError("the batch ended before its time; give it more requests")
        found = await self.state()
        wall_s = time.perf_counter() - began
        self._manager.abort_request(abort_all=True)
        await asyncio.gather(*batch, return_exceptions=True)
        batch_tokens = found["output_tokens"] - sum(each.generated - 1 for each in streamed)
        return found | {"online": streamed, "batch_tokens": batch_tokens, "wall_s": wall_s}

    async def _stream(self, rid: str, online: Arriving, began: float, how: dict[str, Any]) -> Streamed:
        await asyncio.sleep(began + online.at_s - time.perf_counter())
        arrives_s, times, marks = time.perf_counter() - began, list[float](), online_marks(online.slo)
        generated = 0
        async for chunk in await self._generate(rid, online.prompt, online.output, marks, {**how, "stream": True}):
            times.append(time.perf_counter() - began)
            generated = int(chunk["meta_info"]["completion_tokens"])
        gap_s = max((after - before for before, after in pairwise(times)), default=0.0)
        return Streamed(arrives_s, times[0], times[-1], generated, gap_s)

    async def _begin(self, tuning: Tuning) -> None:
        """Set how the next run is scheduled, and let it wait until all requests are there."""
        self._manager.auto_create_handle_loop()
        if not (await self._manager.flush_cache(timeout_s=30)).success:
            raise EngineError("SGLang did not empty its cache between two runs")
        await self.retune(tuning)
        await self._manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))

    async def _send_batch(
        self, tuning: Tuning, prompts: Sequence[list[int]], outputs: Sequence[int], more: Mapping[str, Any] = NOTHING
    ) -> list[asyncio.Task[Any]]:
        ours = {KIND: "run", UNTOLD: True} if tuning.policy is None else None
        last = {**more, **({"priority": 0} if tuning.policy == PRIORITY else {})}
        tasks: list[asyncio.Task[Any]] = []
        for number, prompt in enumerate(prompts):
            asked = self._generate(f"bench-{number}", prompt, outputs[number], ours, last)
            tasks.append(asyncio.create_task(asked))
            if number % 64 == 0:
                await asyncio.sleep(0)
        return tasks

    async def _generate(
        self, rid: str, prompt: list[int], output: int, marks: dict[str, Any] | None, how: dict[str, Any]
    ) -> Any:
        sampling = {"max_new_tokens": output, "ignore_eos": True, "temperature": 0, "custom_params": marks}
        how = dict(how)
        sampling |= how.pop("sampling", {})
        return await self._engine.async_generate(input_ids=prompt, sampling_params=sampling, rid=rid, **how)

    async def _until_waiting(self, count: int, tasks: list[asyncio.Task[Any]]) -> None:
        """Wait until the scheduler has all requests; raises the error of a request that was refused."""
        while True:
            await asyncio.sleep(0.2)
            for task in tasks:
                if task.done():
                    task.result()
            state = await self.state()
            if state["queued"] + state.get("waiting", 0) + state.get("held", 0) >= count:
                return

    def abort(self, rid: str) -> None:
        """End the request with this id, or those whose ids begin with it."""
        self._manager.abort_request(rid)

    async def abort_all(self) -> None:
        """End all requests, after a run that was given up; a run that still waited to begin is let go."""
        await self._manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
        self._manager.abort_request(abort_all=True)

    def close(self) -> None:
        shut_down(self._engine)
