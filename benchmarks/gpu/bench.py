"""The stages of a comparison that need an engine: equal answers, calibration, runs of policies, online requests."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from benchmarks.engine.bench_engine import RETUNE, RUNNING, Arriving, BenchEngine, Streamed
from benchmarks.engine.tuning import MOST_TOKENS, Tuning
from benchmarks.engine.tuning import PRIORITY as BY_PRIORITY
from benchmarks.gpu import workloads
from benchmarks.gpu.agreement import compare
from benchmarks.gpu.plan import ALONE, ENGINE, OURS, PRIORITY, RUNS, Group, Stage
from benchmarks.gpu.records import CALIBRATION, OVERLAP, STEPS, Asked, Folder
from benchmarks.gpu.shapes import CONTEXT, SHAPES, model_folder
from engine_ext import warm_up
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Hardware, Machine
from engine_ext.costs.model_shape import ModelShape
from engine_ext.errors import EngineError
from engine_ext.plugin.options import Emulation, Options, Overlap
from engine_ext.plugin.platform_entry import accelerator_memory, gpu_is_present, machine_name
from engine_ext.plugin.worker import overlap as overlaps
from engine_ext.plugin.worker.cpu_defaults import CPU_DEFAULTS
from service.estimates.model_costs import read_hardware, read_shape
from service.settings import load_settings
from service.worker.calibration import calibrated

CLOSING_S = 4.0  # for a row of a run that is cut off
LONGEST = 8192  # tokens of a request in the calibration, which would take a minute longer with 16,384
ONLINE_SHARE = 0.3  # of the machine's work that online requests ask for
ONLINE_CAP = 256  # tokens of an online answer
WARM_UP = 128  # requests, and tokens of their answers
AGREE = 56  # requests whose answers are compared, besides LONG ones
LONG = 8
# Graphs for these sizes take 8 to 10 s, where SGLang's own lists take 25 to 40 s (calculated). The last ones are the
# largest batch and the largest chunk, so that no step runs without a graph.
GRAPHS = {
    "cuda_graph_bs_decode": [1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 1024],
    "cuda_graph_bs_prefill": [128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192],
}
AT_ONCE = 1024  # requests
SPLITS = 3  # of a GPU's SMs for PD-multiplexing; each captures all decode graphs
SPLIT_GRAPHS = {"cuda_graph_bs_decode": [8, 32, 64, 128, 256, 512, 768, 1024]}
CPU_TOKENS = 1 << 15


class Bench:
    """One engine and the stages that run on it."""

    def __init__(self, asked: Asked, folder: Folder, group: Group) -> None:
        self._asked, self._folder, self._group = asked, folder, group
        self._model = model_folder(asked.model, folder.path) if asked.model in SHAPES else asked.model
        self._started_with = self._hardware()
        self._loaded: dict[str, workloads.Workload] = {}
        self._warm = set[str]()  # policies
        self._engine: BenchEngine | None = None

    @property
    def engine(self) -> BenchEngine:
        assert self._engine is not None
        return self._engine

    def start(self) -> dict[str, Any]:
        """Start the engine."""
        asked, overlap = self._asked, Overlap(self._group)
        warm_up.ensure()
        if asked.slower:
            self._engine = self._emulated()
        else:
            steps = str(self._folder.path / STEPS) if self._group is Group.MIXED else None
            margin = self._sm_margin() if self._group is Group.NANO else 0
            self._engine = BenchEngine.real(
                str(self._model), self._cost(), overlap, self._arguments(), steps, sm_margin=margin
            )
        state = asyncio.get_event_loop().run_until_complete(self.engine.state())
        return {name: state.get(name) for name in ("kv_capacity", "overlap", "device")} | {"machine": machine_name()}

    def close(self) -> None:
        self.engine.close()

    async def do(self, stage: Stage, ends: float) -> dict[str, Any]:
        """Run a stage, and leave the engine without requests however it ends.

        A run that is not over shortly before the time `ends` of the monotonic clock has a row that says so.
        """
        try:
            if stage.mix is not None:
                return await self._row(stage, ends - CLOSING_S)
            return await self._stages[stage.name](self)
        except BaseException:
            await self.engine.abort_all()
            raise

    async def _smoke(self) -> dict[str, Any]:
        """Compare answers: SGLang's, ours, and ours with prompts parked and decodes resting beside online requests."""
        found = self._workload(self._asked.rows[-1][0])
        prompts = [prompt[:600] for prompt in found.prompts[:AGREE]]
        prompts += [(prompt * 3000)[:3000] for prompt in found.prompts[:LONG]]
        outputs = [64] * AGREE + [8] * LONG
        outputs = outputs[: len(prompts)]
        asks = {} if self._asked.slower else {"return_logprob": True, "top_logprobs_num": 2}
        theirs = await self.engine.run(RUNS["fcfs"].tuning, prompts, outputs, **asks)
        ours = await self.engine.run(Tuning(), prompts, outputs)
        disturbed = await self._disturbed(prompts, outputs)
        counted = {"parked", "left_out", "preempted", "retractions"}
        return {
            "requests": len(prompts),
            "ours": compare(theirs, ours["answers"]),
            "disturbed": compare(theirs, disturbed["answers"]) | {name: disturbed.get(name) for name in counted},
        }

    async def _disturbed(self, prompts: list[list[int]], outputs: list[int]) -> dict[str, Any]:
        running = asyncio.create_task(self.engine.run(Tuning(chunk=512, limit_s=1e-5), prompts, outputs))
        try:
            for number in range(2 * LONG):
                while not running.done() and (await self.engine.state()).get("admitted", 0) < 1 + 3 * number:
                    await asyncio.sleep(0.005)
                if running.done():
                    break
                await self.engine.ask(f"online-{number}", prompts[number][:300], 16)
            return await running
        finally:
            running.cancel()

    async def _calibrate(self) -> dict[str, Any]:
        """Measure steps on this engine, and plan by them from now on."""
        steps = self._folder.path / STEPS
        await self.engine.retune(Tuning())
        async for part in self.engine.measure_steps(steps, LONGEST // 4 if self._asked.slower else LONGEST):
            print(f"calibration: {part}", flush=True)
        settings = load_settings(model=self._shape_of, gpu=self._asked.gpu, engine_args=self._asked.engine_args)
        output = self._folder.path / CALIBRATION
        calibration = calibrated(settings, steps, output, machine_name(), accelerator_memory())
        steps.rename(self._folder.path / f"measured-{STEPS}")
        self._loaded.clear()
        fitted = {name: getattr(calibration, name) for name in ("gemm_s", "read_s", "weights_s", "overhead_s")}
        return fitted | {"misfit": {name: round(each.mean, 4) for name, each in calibration.errors.items()}}

    async def _row(self, stage: Stage, ends: float) -> dict[str, Any]:
        assert stage.mix is not None
        assert stage.policy is not None
        workload, run, cost = self._workload(stage.mix), RUNS[stage.policy], self._cost()
        clock = Clock.MIXED if run.tuning.mixed else Clock.SEQUENTIAL  # of an emulated device
        tuning = replace(run.tuning, measured=cost.machine.hardware, clock=clock)
        more: dict[str, Any] = {"sampling": {"ignore_eos": False}} if self._asked.file else {}
        if stage.policy not in self._warm:  # what compiles at the first use must not count in any run
            self._warm.add(stage.policy)
            few = range(min(WARM_UP, len(workload.prompts)))
            asks = [workload.prompts[k] for k in few], [min(workload.outputs[k], WARM_UP) for k in few]
            await self.engine.run(tuning, *asks, within_s=(ends - time.monotonic()) / 4, **more)
        order = workload.sorted_order if run.is_sorted else range(len(workload.prompts))
        prompts, outputs = [workload.prompts[k] for k in order], [workload.outputs[k] for k in order]
        found = await self.engine.run(tuning, prompts, outputs, within_s=ends - time.monotonic(), **more)
        expected = Overlap(self._group) if run.tuning.mixed or self._group is Group.PDMUX else Overlap.NONE
        if found["overlap"] != expected:
            raise EngineError(f"it ran with overlap {found['overlap']}, not {expected}")
        got = [meta.get("completion_tokens", 0) for meta in found["metas"]]
        prompt_tokens = sum(len(prompt) for prompt, tokens in zip(prompts, got, strict=True) if tokens)
        seconds, done = found["wall_s"], sum(tokens > 0 for tokens in got)
        bound = workloads.bound_s(workload.work, cost)
        row = {
            "mix": stage.mix,
            "policy": stage.policy,
            "complete": found["complete"],
            "machine": (found.get("device") or machine_name()).partition(",")[0],  # not an emulated device's clock
            "model": self._asked.model,
            "attention": self._attention,
            "engine_args": self._asked.engine_args,
            "calibrated": (self._folder.path / CALIBRATION).exists(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "requests": len(prompts),
            "answered": done,
            "seconds": seconds,
            "tokens_per_s": (prompt_tokens + sum(got)) / seconds,
            "output_tokens_per_s": sum(got) / seconds,
            "decoded_tokens": found["output_tokens"],
            "practical_s": bound,
            "share_of_practical": bound / seconds if found["complete"] and not self._asked.file else None,
            "sharing": found["cached_tokens"] / max(1, prompt_tokens),
            "retractions": found["retractions"],
            "dollars_per_million": self._dollars(seconds, prompt_tokens + sum(got)),
            **{name: found.get(name) for name in ("overlap", "kv_capacity", "engine_steps", "step_s", "plans")},
            **{name: found.get(name) for name in ("predicted_step_s", "nano_steps", "nano_turns")},
            "deciding_ms": 1e3 * found.get("deciding_s", 0.0) / max(1, found.get("decisions", 1)),
            "series": found["series"],
        }
        self._folder.add_row(row)
        said = ("complete", "answered", "tokens_per_s", "share_of_practical", "sharing", "overlap")
        return {"run_s": seconds} | {name: row[name] for name in said}

    def _dollars(self, seconds: float, tokens: int) -> float | None:
        if self._asked.price is None or not tokens:
            return None
        return self._asked.price * seconds / 3600 / tokens * 1e6

    async def _online(self, tuning: Tuning, has_batch: bool) -> dict[str, Any]:
        """Send online requests in real time at a share of the machine's work, alone or beside a batch."""
        seconds, cost = self._asked.seconds, self._cost()
        workload = self._workload(self._asked.rows[-1][0])
        work_s = workloads.bound_s(workload.work, cost) / len(workload.prompts)
        generator = np.random.default_rng(0)
        gaps = generator.exponential(work_s / ONLINE_SHARE, int(2 * seconds * ONLINE_SHARE / work_s) + 1)
        times = [float(at) for at in np.cumsum(gaps) if at < seconds]
        asked = [workload.more[k % len(workload.more)] for k in range(len(times))]
        online = [
            Arriving(at, prompt, min(output, ONLINE_CAP)) for at, (prompt, output) in zip(times, asked, strict=True)
        ]
        batch = (workload.prompts, workload.outputs) if has_batch else ([], [])
        found = await self.engine.run_live(replace(tuning, measured=cost.machine.hardware), *batch, online, seconds)
        return _of_clients(found["online"]) | {
            "offered": len(online),
            "batch_tokens_per_s": found["batch_tokens"] / found["wall_s"],
            **{name: found.get(name) for name in ("parked", "left_out", "preempted")},
        }

    _stages: ClassVar[dict[str, Callable[["Bench"], Coroutine[Any, Any, dict[str, Any]]]]] = {
        "smoke": _smoke,
        "calibrate": _calibrate,
        ALONE: lambda self: self._online(Tuning(), has_batch=False),
        OURS: lambda self: self._online(Tuning(), has_batch=True),
        PRIORITY: lambda self: self._online(Tuning(BY_PRIORITY), has_batch=True),
    }

    def _workload(self, mix: str) -> workloads.Workload:
        if mix not in self._loaded:
            seconds = self._asked.seconds
            if self._asked.file is not None:
                found = workloads.of_file(Path(self._asked.file), str(self._model), self._cost(), seconds)
            else:
                found = workloads.read(Path(self._asked.data), mix, self._cost(), seconds, more=512)
            self._loaded = {mix: found}
        return self._loaded[mix]

    @property
    def _shape_of(self) -> str:
        """The model whose steps count; an emulated device runs another."""
        return "llama-3-8b" if self._asked.slower else str(self._model)

    @property
    def _shape(self) -> ModelShape:
        return read_shape(self._shape_of)

    def _hardware(self) -> Hardware:
        """Return the datasheet's machine, or the emulated one."""
        found = read_hardware(self._asked.gpu)
        slower = self._asked.slower
        if not slower:
            return found
        flops = {dtype: each / slower for dtype, each in found.flops.items()}
        return replace(found, flops=flops, bandwidth=found.bandwidth / slower)

    def _cost(self) -> CostModel:
        """Return the calibrated costs once there are any."""
        calibration = self._folder.path / CALIBRATION
        hardware = read_hardware(str(calibration)) if calibration.exists() else self._started_with
        return CostModel(self._shape, Machine(hardware))

    def _arguments(self) -> dict[str, Any]:
        """Return the server arguments for SGLang, except those of the overlap."""
        is_dummy = self._asked.model in SHAPES
        found: dict[str, Any] = {"schedule_policy": "fcfs", "random_seed": 0, "log_level": "info"}
        if is_dummy:
            found |= {"load_format": "dummy", "context_length": CONTEXT, "sampling_backend": "pytorch"}
        if gpu_is_present():
            found |= {**GRAPHS, "max_running_requests": AT_ONCE, "watchdog_timeout": 60}
            found |= {"dtype": "bfloat16"} if is_dummy else {}
            if self._group is Group.PDMUX:
                found |= {**SPLIT_GRAPHS, "pdmux_config_path": str(self._pdmux_config())}
                del found["cuda_graph_bs_prefill"]  # it computes whole prompts
        else:
            found |= {**CPU_DEFAULTS, "max_total_tokens": CPU_TOKENS, "chunked_prefill_size": MOST_TOKENS}
            found |= {"context_length": CPU_TOKENS} if is_dummy else {}
        if attention := self._attention:
            found["attention_backend"] = attention
        if gpu_is_present() and self._group is Group.MIXED and "failed" in self._folder.ended.get(ENGINE, {}):
            found["disable_prefill_cuda_graph"] = True
            found.pop("cuda_graph_bs_prefill", None)
        return found | self._asked.engine_args

    @property
    def _attention(self) -> str:
        """SGLang's attention backend; empty for its default, which is FA3 on Hopper."""
        is_off = any("failed" in self._folder.ended.get(stage, {}) for stage in ("kernels", ENGINE))
        return self._asked.attention or ("triton" if is_off and gpu_is_present() else "")

    def _pdmux_config(self) -> Path:
        """Write SGLang's file for PD-multiplexing: JSON is YAML too. Two groups more give one side all SMs."""
        path = self._folder.path / "pdmux.json"
        path.write_text(json.dumps({"sm_group_num": SPLITS + 2}))
        return path

    def _emulated(self) -> BenchEngine:
        cost = CostModel(self._shape, Machine(self._started_with))
        steps = str(self._folder.path / STEPS)
        options = Options(cost, overlap=Overlap.MIXED, emulated=Emulation.REAL, extra_hooks=(RETUNE,), steps_file=steps)
        arguments = {
            **CPU_DEFAULTS,
            **overlaps.ARGUMENTS[Overlap.MIXED],
            "load_format": "dummy",
            "max_total_tokens": EngineModel.of(cost).capacity,
            "max_running_requests": RUNNING,
            "chunked_prefill_size": MOST_TOKENS,
            "max_prefill_tokens": MOST_TOKENS + RUNNING,
            "context_length": CONTEXT,
        }
        return BenchEngine(str(model_folder("tiny", self._folder.path)), options, arguments | self._asked.engine_args)

    def _sm_margin(self) -> int:
        """Return the SMs that attention should leave to the GEMM beside it, if the stage `overlap` has found out."""
        found = self._folder.path / OVERLAP
        return int(json.loads(found.read_text()).get("best_margin", 0)) if found.exists() else 0


def _of_clients(streams: Sequence[Streamed]) -> dict[str, float]:
    """Return TTFT and TPOT in seconds as clients saw them: the median and the 99th percentile."""
    ttft = [each.first_s - each.arrives_s for each in streams]
    tpot = [(each.last_s - each.first_s) / (each.generated - 1) for each in streams if each.generated > 1]
    found: dict[str, float] = {}
    for name, values in (("ttft_s", ttft), ("tpot_s", tpot)):
        for share in (0.5, 0.99):
            found[f"{name}_p{100 * share:.0f}"] = round(float(np.quantile(values, share)), 4) if values else 0.0
    return found
