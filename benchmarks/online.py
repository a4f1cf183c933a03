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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import uuid4

import aiohttp
import numpy as np
import openai
import psutil
from redis.asyncio import Redis

from benchmarks import relay
from benchmarks.online_scene import Scene, scene
from benchmarks.online_service import START_S, STOCK, Service, service
from engine_ext.arrays import Floats
from engine_ext.coserve.slo import SloClass
from engine_ext.simulate.colocate import OURS
from engine_ext.simulate.line import DRAIN
from service.demo.tiny import NAME
from service.queue.progress import Heartbeat
from service.queue.trust import deployment_token
from service.settings import load_settings
from tests.hostile.server import SECRET

COMPLETIONS = "/v1/completions"
FILE_REQUESTS = 4_000
STREAMS, STREAM_TOKENS, ROUNDS, APART_S = 50, 64, 6, 0.05
ALONE = "online alone"
SIMULATED = {ALONE: "online-only", STOCK: "fcfs", OURS: OURS}  # what the simulator calls them


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
    outputs, tokens, after_s = asyncio.run(_timed(here, url, running_service))
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
