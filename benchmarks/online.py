"""Measure online requests through the whole service: alone, beside a batch with SGLang's scheduling, and with ours.

python -m benchmarks.online DATA [--batch code] [--load 0.3] [--seconds 240] [--slowed 5] [--output results/online.json]

Redis, API, planner and two workers are processes of their own. Each worker runs real SGLang on an emulated H200 with
Llama-3-8B's costs, in real time; no answer is real. SGLang's benchmark client sends Azure's conversations at their real
times, whether or not earlier ones are answered. A small machine cannot schedule so many steps a second, so the device
is `--slowed` times slower, and so are arrivals and bounds; what the service costs is not, so it weighs more here.

Each row says what share of the online requests kept the bounds of TTFT and TPOT, where one that is refused or does not
end kept none, and how many tokens of finished answers and their prompts a batch got per second, beside what the
simulator says of the same requests. `sglang` serves in order of arrival and refuses nobody. At last 50 streams at a
time go through the API and to the workers' own ports in turn.
"""

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import Any
from uuid import uuid4

import aiohttp
import httpx
import numpy as np
import openai
import psutil
from prometheus_client.parser import text_string_to_metric_families
from redis.asyncio import Redis

from benchmarks import online_traffic, relay
from benchmarks.colocate import FLOOD_S, MACHINES
from benchmarks.emulated import tokens_of
from benchmarks.loop_lag import free_port
from benchmarks.online_traffic import Online, batch_rows
from benchmarks.traces import Row
from engine_ext.arrays import Floats, column
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine
from engine_ext.simulate.arrivals import Arrivals, at_rate
from engine_ext.simulate.colocate import OURS
from engine_ext.simulate.colocate import play as simulate
from engine_ext.simulate.contest import online_capacity
from engine_ext.simulate.line import DRAIN
from engine_ext.simulate.measured import Settings, measured
from engine_ext.simulate.shared_engine import DONE
from engine_ext.simulate.traffic import Traffic
from service.db.migrate import upgrade
from service.demo.model import NAME, ensure_demo_model
from service.demo.prompts import corpus
from service.estimates.model_costs import planning_costs, read_hardware
from service.queue.progress import Heartbeat
from service.queue.trust import deployment_token
from service.settings import load_settings
from tests.hostile.server import SECRET, Role, redis_server, running

COMPLETIONS = "/v1/completions"
CHUNK = 2048  # prompt tokens of a step
LONGEST = 16_384  # tokens of a request; longer ones are left out
RUNNING = 1024
START_S = 600.0
WARM_UP = 0.2  # of the arrivals' time
FILE_REQUESTS = 4_000
STREAMS, STREAM_TOKENS, ROUNDS, APART_S = 50, 64, 6, 0.05
ALONE, STOCK = "online alone", "sglang"
SIMULATED = {ALONE: "online-only", STOCK: "fcfs", OURS: OURS}  # what the simulator calls them


@dataclass(frozen=True)
class Scene:
    """Holds the traffic of a run on `workers` machines like `cost`, all of them `slowed` times."""

    cost: CostModel
    model: EngineModel
    online: Online
    arrivals: Arrivals
    rows: list[Row]
    workers: int
    slowed: float

    @cached_property
    def outputs(self) -> list[int]:
        """The output tokens of the batch's requests."""
        return [row.output_tokens for row in self.rows]

    @cached_property
    def prompts(self) -> tuple[list[list[int]], list[list[int]]]:
        """The token ids of the batch's prompts, and of those of online requests."""
        ids = tokens_of([*(row.segments for row in self.rows), *self.online.named(self.arrivals)])
        return ids[: len(self.rows)], ids[len(self.rows) :]

    @property
    def duration_s(self) -> float:
        return self.arrivals.duration_s * self.slowed

    def slo(self, slowed: float) -> SloClass:
        return SloClass(ttft_s=1.0 * slowed, tpot_s=0.05 * slowed)

    def simulated(self, policy: str) -> dict[str, float]:
        """Return what the simulator says of engines among which the online requests are dealt out in turn.

        The batch's tokens are counted as those of the service: of answers that end while online requests come, without
        the first part of that time, because these engines begin empty.
        """
        found = [self._simulated(policy, number) for number in range(self.workers)]
        return {
            "attained": 1.0 - mean(attained for attained, _ in found),
            "batch_tokens_per_s": sum(tokens for _, tokens in found) / self.slowed,
        }

    def _simulated(self, policy: str, number: int) -> tuple[float, float]:
        """Return the share of one engine's online requests that were late, and the batch's tokens per second."""
        part = slice(number, None, self.workers)
        all_of = self.arrivals
        arrivals = Arrivals(all_of.arrives_s[part], all_of.number[part], all_of.copy[part], all_of.duration_s)
        prompts, output, _ = online_traffic.together(self.rows, self.online, arrivals)
        caps = np.array(self.outputs, dtype=np.int64)  # as max_tokens in the batch's file say
        traffic, settings, slo = Traffic.of(prompts, output, caps, arrivals), Settings(chunk=CHUNK), self.slo(1.0)
        played = simulate(traffic, self.cost, self.model, policy, settings, slo)
        batch, requests = slice(0, traffic.batch), played.engines[0].requests
        until_s, since_s = arrivals.duration_s, WARM_UP * arrivals.duration_s
        last_s = np.where(column(requests, "state") == DONE, column(requests, "last_s"), np.inf)[batch]
        ended = (last_s > since_s) & (last_s <= until_s)
        tokens = (traffic.lengths + traffic.output)[batch][ended].sum()
        late = measured(policy, settings, [played], slo, self.cost).violations
        return late, float(tokens) / (until_s - since_s)


def scene(given: argparse.Namespace) -> Scene:
    """Return online requests at a share of what the workers can do of them, and a batch."""
    place = MACHINES["h200"]
    cost, model = place.engine()
    online = online_traffic.conversations(given.data, LONGEST)
    own_rate = len(online.arrives_s) / online.arrives_s[-1]
    generator = np.random.default_rng(given.seed)
    flood = at_rate(online.arrives_s, own_rate, FLOOD_S, generator)
    rate = given.load * given.workers * online_capacity(*online.at(flood), cost, model)
    arrivals = at_rate(online.arrives_s, rate, given.seconds / given.slowed, generator)
    rows = batch_rows(given.data, given.batch, given.seed, LONGEST, given.requests)
    return Scene(cost, model, online, arrivals, rows, given.workers, given.slowed)


def stand_in(source: Path, wanted: CostModel, slowed: float) -> dict[str, Any]:
    """Return hardware on which the model in `source` costs what `wanted` says, times `slowed`.

    So a small model stands for a large one. Its links do not count, because it has one accelerator.
    """
    plain = Machine(read_hardware("h200"))
    mine = CostModel(planning_costs(str(source), "h200", 1).shape, plain)
    capacity = wanted.kv_capacity_tokens(0.9)
    weights = mine.shape.weight_bytes(2)
    flops = plain.flops("bf16") * mine.gemm_s_per_token / wanted.gemm_s_per_token / slowed
    return {
        "name": f"h200 slowed {slowed:g} times, as for {wanted.shape.name}",
        "flops": {"bf16": flops},
        "bandwidth": plain.bandwidth * mine.read_s_per_token / wanted.read_s_per_token / slowed,
        "weight_bandwidth": plain.weight_bandwidth * mine.weights_s / wanted.weights_s / slowed,
        "attention_flops": plain.attention_flops("bf16") * mine.quadratic_s / wanted.quadratic_s / slowed,
        "memory_bytes": (weights + (capacity + 0.5) * mine.kv_bytes_per_token) / 0.9,
    }


def check(source: Path, described: Path, wanted: CostModel, slowed: float) -> None:
    """Check that the emulated machine's steps take as long as they should."""
    found = EngineModel.of(planning_costs(str(source), str(described), 1), Clock.MIXED)
    model = EngineModel.of(wanted, Clock.MIXED)
    for name in ("gemm_s", "read_s", "quadratic_s", "weights_s"):
        assert np.isclose(getattr(found, name), getattr(model, name) * slowed), name
    assert abs(found.capacity - model.capacity) <= 1


@dataclass(frozen=True)
class Service:
    """Is a running service: its API and workers, and the ports on which the workers serve metrics."""

    api: Role
    workers: list[Role]
    metrics_ports: list[int]
    redis_url: str

    def tokens(self) -> float:
        """Return the prompt and output tokens of the answers of batches so far."""
        return sum(self._read("batchweave_answer_tokens_total", kind=kind) for kind in ("input", "output"))

    def lag(self) -> float:
        """Return the share of looks at the workers' event loops at which they were at most 5 ms late."""
        name = "batchweave_loop_lag_seconds_bucket"
        return self._read(name, le="0.005") / max(1.0, self._read(name, le="+Inf"))

    def cpu_s(self) -> float:
        """Return the CPU seconds of API, workers and their engines so far."""
        processes = [self.api.process, *(worker.process for worker in self.workers)]
        every = [each for process in processes for each in (process, *process.children(recursive=True))]
        return sum(sum(each.cpu_times()[:2]) for each in every)

    def _read(self, name: str, **labels: str) -> float:
        total = 0.0
        for port in self.metrics_ports:
            text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=30).text
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    if sample.name == name and labels.items() <= sample.labels.items():
                        total += sample.value
        return total


@contextmanager
def service(here: Scene, scheduling: str, folder: Path) -> Generator[Service, None, None]:
    """Start the service, and wait until its workers can be asked."""
    source = ensure_demo_model(folder / "model", corpus())
    described, slo = folder / "machine.json", folder / "slo.json"
    described.write_text(json.dumps(stand_in(source, here.cost, here.slowed)))
    check(source, described, here.cost, here.slowed)
    bounds = here.slo(here.slowed)
    slo.write_text(json.dumps({"slo": {"ttft_s": bounds.ttft_s, "tpot_s": bounds.tpot_s}}))
    arguments = {
        "max_total_tokens": here.model.capacity,
        "max_running_requests": RUNNING,
        "chunked_prefill_size": CHUNK,
        "context_length": LONGEST,
        "json_model_override_args": json.dumps({"max_position_embeddings": LONGEST}),
    }
    variables = {
        "BATCHWEAVE_MODEL": str(source),
        "BATCHWEAVE_MODEL_NAME": NAME,
        "BATCHWEAVE_ENGINE_ARGS": json.dumps(arguments),
        "BATCHWEAVE_EMULATED_DEVICE": "no answer is real",
        "BATCHWEAVE_GPU": str(described),
        "BATCHWEAVE_OVERLAP": "mixed",
        "BATCHWEAVE_SCHEDULING": scheduling,
        "BATCHWEAVE_ONLINE_HOST": "127.0.0.1",
        "BATCHWEAVE_CONNECTIONS_PER_ADDRESS": "0",  # SGLang's client opens one for each request
        **({} if scheduling == STOCK else {"BATCHWEAVE_SLO_FILE": str(slo)}),
    }
    database_url = f"sqlite:///{folder / 'batchweave.db'}"
    upgrade(load_settings(database_url=database_url).database)
    with ExitStack() as stack:
        redis_url = stack.enter_context(redis_server(folder))
        api = stack.enter_context(running("api", folder, database_url, redis_url, variables=variables))
        stack.enter_context(running("planner", folder, database_url, redis_url, variables=variables))
        ports, workers = [free_port() for _ in range(here.workers)], list[Role]()
        for number, port in enumerate(ports):
            own = {"BATCHWEAVE_WORKER_NAME": f"worker-{number}", "BATCHWEAVE_METRICS_PORT": str(port), **variables}
            workers.append(stack.enter_context(running("worker", folder, database_url, redis_url, variables=own)))
        deadline = time.monotonic() + START_S
        while httpx.get(f"{api.url}/readyz", timeout=30).json().get("workers") != here.workers:
            if time.monotonic() > deadline or any(each.process.status() == psutil.STATUS_ZOMBIE for each in workers):
                raise SystemExit(f"the workers did not start:\n{workers[0].log.read_text()[-4000:]}")
            time.sleep(0.5)
        yield Service(api, workers, ports, redis_url)


def start_batches(client: openai.OpenAI, here: Scene, folder: Path) -> list[str]:
    """Send the batch's requests, in as many batches as files may hold, and return their ids."""
    prompts, _ = here.prompts
    path, ids = folder / "requests.jsonl", list[str]()
    for begin in range(0, len(prompts), FILE_REQUESTS):
        with path.open("w") as file:
            for number in range(begin, min(begin + FILE_REQUESTS, len(prompts))):
                asked = {"prompt": prompts[number], "max_tokens": here.outputs[number], "ignore_eos": True}
                body = {"model": NAME, **asked}
                line = {"custom_id": str(number), "method": "POST", "url": COMPLETIONS, "body": body}
                file.write(json.dumps(line) + "\n")
        uploaded = client.files.create(file=path, purpose="batch")
        batch = client.batches.create(input_file_id=uploaded.id, endpoint=COMPLETIONS, completion_window="24h")
        ids.append(batch.id)
    return ids


async def play(here: Scene, url: str) -> list[Any]:
    """Send the online requests at their times with SGLang's client, and return its outputs.

    It waits for as long again for those that have not ended, as the simulator does.
    """
    from sglang.benchmark import serving
    from sglang.benchmark.datasets.common import DatasetRow

    serving.set_global_args(argparse.Namespace(disable_stream=False, disable_ignore_eos=False, return_logprob=False))
    outputs = here.online.output[here.arrivals.number].tolist()
    rows = [
        DatasetRow(prompt=ids, prompt_len=len(ids), output_len=tokens, timestamp=1e3 * at_s)
        for ids, tokens, at_s in zip(here.prompts[1], outputs, here.arrivals.arrives_s.tolist(), strict=True)
    ]
    tasks: list[asyncio.Task[Any]] = []
    async for row in serving.get_request(rows, 0.0, use_trace_timestamps=True, slowdown_factor=here.slowed):
        asked = serving.RequestFuncInput(
            row.prompt, url + COMPLETIONS, row.prompt_len, row.output_len, NAME, "", None, {}
        )
        tasks.append(asyncio.create_task(serving.async_request_openai_completions(asked)))
    await asyncio.wait(tasks, timeout=(DRAIN - 1.0) * here.duration_s)
    left = serving.RequestFuncOutput(error="not ended in time")
    return [task.result() if task.done() else left for task in tasks]


def figures(outputs: Sequence[Any], slo: SloClass) -> dict[str, Any]:
    """Return what the online requests got, in seconds; those that failed kept no bound."""
    answered = [each for each in outputs if each.success and each.ttft > 0]
    ttft = np.array([each.ttft for each in answered])
    tpot = np.array([(each.latency - each.ttft) / max(1, each.output_len - 1) for each in answered])
    bounds = slo.bounds
    kept = np.count_nonzero((ttft <= bounds.ttft_s) & (tpot <= bounds.tpot_s))
    return {
        "online_requests": len(outputs),
        "failed": len(outputs) - len(answered),
        "failures": sorted({each.error[:200] for each in outputs if not each.success}),
        "attained": float(kept) / len(outputs),
        **{f"ttft_p{point}_s": _percentile(ttft, point) for point in (50, 99)},
        **{f"tpot_p{point}_s": _percentile(tpot, point) for point in (50, 99)},
    }


def _percentile(seconds: Floats, point: int) -> float | None:
    return float(np.percentile(seconds, point)) if len(seconds) else None


def measure(here: Scene, name: str, running_service: Service, folder: Path) -> dict[str, Any]:
    """Play the online requests, beside a batch unless they are to be alone, and return a row."""
    url = running_service.api.url
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=20)
    ids = [] if name == ALONE else start_batches(client, here, folder)
    deadline = time.monotonic() + START_S
    while ids and running_service.tokens() < here.workers * here.model.capacity / 8:  # the batch is in full swing
        if time.monotonic() > deadline:
            raise SystemExit(f"the batch did not start: {client.batches.retrieve(ids[0])}")
        time.sleep(0.5)
    before, cpu_s, began = running_service.tokens(), running_service.cpu_s(), time.monotonic()
    play_for = asyncio.run(_timed(here, url, running_service))
    outputs, tokens, after_s = play_for
    row: dict[str, Any] = {"policy": name, **figures(outputs, here.slo(here.slowed))}
    if ids:
        if tokens > 0.95 * sum(here.outputs) + 0.95 * sum(map(len, here.prompts[0])):
            raise SystemExit("the batch ended before the online requests did; give more --requests")
        row |= {"batch_tokens_per_s": (tokens - before) / after_s, "loops_in_time": running_service.lag()}
    seconds = time.monotonic() - began
    # Of API, workers and engines, without the client; after the arrivals it waits for the last answers.
    row |= {"busy_cores": (running_service.cpu_s() - cpu_s) / seconds, "of_cores": psutil.cpu_count()}
    for each in ids:
        client.batches.cancel(each)
    return row


async def _timed(here: Scene, url: str, running_service: Service) -> tuple[list[Any], float, float]:
    """Play the online requests; return the outputs, and the batch's tokens when no more came, after how many s."""
    began = time.monotonic()
    playing = asyncio.create_task(play(here, url))
    await asyncio.sleep(here.duration_s)
    tokens, after_s = await asyncio.to_thread(running_service.tokens), time.monotonic() - began
    return await playing, tokens, after_s


async def streams(running_service: Service, token: str) -> dict[str, Any]:
    """Return TTFT in seconds of 50 streams at a time through the API, and of as many to the workers' own ports."""
    redis = Redis.from_url(running_service.redis_url)
    doors = [str(each["online"]) for each in await Heartbeat(redis).alive()]
    await redis.aclose()
    generator, found = np.random.default_rng(1), {"relayed": list[float](), "direct": list[float]()}

    async def one(session: aiohttp.ClientSession, way: str, number: int) -> None:
        url, headers = running_service.api.url, dict[str, str]()
        if way == "direct":
            url = doors[number % len(doors)]
            headers = {"Authorization": f"Bearer {token}", "X-Request-Id": f"req_{uuid4().hex}"}
        content = generator.integers(10, 900, 200).tolist()
        body = {"model": NAME, "prompt": content, "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True}
        first_s, _ = await relay.read(session, url + COMPLETIONS, headers, body)
        found[way].append(first_s)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for turn in range(ROUNDS + 1):
            for way in ("relayed", "direct") if turn % 2 else ("direct", "relayed"):
                tasks: list[asyncio.Task[None]] = []
                for number in range(STREAMS):
                    tasks.append(asyncio.create_task(one(session, way, number)))
                    await asyncio.sleep(APART_S)
                await asyncio.gather(*tasks)
            if turn == 0:  # what is slow only once
                found = {way: [] for way in found}
    percentiles = {f"{way}_ttft_p{p}_s": float(np.percentile(s, p)) for way, s in found.items() for p in (50, 99)}
    return {"policy": f"{STREAMS} streams", "rounds": ROUNDS, **percentiles}


def rows(here: Scene, policies: Sequence[str]) -> Iterator[Mapping[str, Any]]:
    """Yield a row for each policy, and one for streams through the API and past it."""
    for name in policies:
        with tempfile.TemporaryDirectory(prefix="batchweave-online-") as folder:
            scheduling = STOCK if name == STOCK else "dual-scan"
            with service(here, scheduling, Path(folder)) as started:
                row = measure(here, name, started, Path(folder))
                yield row | {"simulated": here.simulated(SIMULATED[name])}
                if name == ALONE:
                    token = deployment_token(load_settings(secret_key=SECRET, database_url="sqlite:///x"))
                    assert token is not None
                    yield asyncio.run(streams(started, token))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with lengths/ and text/")
    parser.add_argument("--batch", default="code", help="kind of the batch, as in benchmarks.colocate (default: code)")
    parser.add_argument("--requests", type=int, default=8_000, help="of the batch (default: 8,000)")
    parser.add_argument("--load", type=float, default=0.3, help="share of what the workers can do (default: 0.3)")
    parser.add_argument("--seconds", type=float, default=240.0, help="for which online requests come (default: 240)")
    parser.add_argument("--slowed", type=float, default=5.0, help="how many times slower the device is (default: 5)")
    parser.add_argument("--workers", type=int, default=2, help="(default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", default=f"{ALONE},{STOCK},{OURS}", help="default: %(default)s")
    parser.add_argument("--output", type=Path, default=Path("results/online.json"))
    given = parser.parse_args()
    given.output.parent.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    policies = given.policies.split(",")
    if unknown := set(policies) - set(SIMULATED):
        parser.error(f"unknown policies: {', '.join(sorted(unknown))}")
    here = scene(given)
    print(f"{len(here.arrivals)} online requests in {here.duration_s:.0f} s on {here.workers} workers", flush=True)
    said: list[Mapping[str, Any]] = []
    arguments = {name: each if isinstance(each, int | float) else str(each) for name, each in vars(given).items()}
    for row in rows(here, policies):
        said.append({**row, "arguments": arguments})
        given.output.write_text(json.dumps(said, indent=1) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
