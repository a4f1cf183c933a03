"""Starts the whole service for benchmarks.online, with workers on emulated machines in real time."""

import json
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.loop_lag import free_port
from benchmarks.online_scene import CHUNK, LONGEST, Machines
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.costs.hardware import Machine
from service.db.migrate import upgrade
from service.demo.prompts import corpus
from service.demo.tiny import NAME, ensure_tiny_model
from service.estimates.model_costs import planning_costs, read_hardware
from service.settings import load_settings
from tests.hostile.server import Role, redis_server, running

RUNNING = 1024  # requests at once on an engine
START_S = 600.0
STOCK = "sglang"


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


def check_stand_in(source: Path, described: Path, wanted: CostModel, slowed: float) -> None:
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


def variables_of(here: Machines, scheduling: str, folder: Path) -> dict[str, str]:
    """Return the variables of a service whose engines run on such machines; their files are in `folder`."""
    source = ensure_tiny_model(folder / "model", corpus())
    described, slo = folder / "machine.json", folder / "slo.json"
    described.write_text(json.dumps(stand_in(source, here.cost, here.slowed)))
    check_stand_in(source, described, here.cost, here.slowed)
    bounds = here.slo(here.slowed)
    slo.write_text(json.dumps({"slo": {"ttft_s": bounds.ttft_s, "tpot_s": bounds.tpot_s}}))
    arguments = {
        "max_total_tokens": here.model.capacity,
        "max_running_requests": RUNNING,
        "chunked_prefill_size": CHUNK,
        "context_length": LONGEST,
        "json_model_override_args": json.dumps({"max_position_embeddings": LONGEST}),
    }
    return {
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


@contextmanager
def service(here: Machines, scheduling: str, folder: Path) -> Generator[Service, None, None]:
    """Start the service, and wait until its workers can be asked."""
    variables = variables_of(here, scheduling, folder)
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
