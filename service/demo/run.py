"""`make demo`: runs the whole service and uses it as a person would, through the official openai client."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from openai.types import Batch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from service.demo import online
from service.demo.prompts import requests
from service.endpoints import ENDPOINTS
from service.errors import DemoError
from service.settings import Settings

START_S, STOP_S = 60.0, 60.0
ENDED = ("completed", "failed", "expired", "cancelled")
_http = httpx.Client(trust_env=False)  # shared by all calls: no proxy reaches this machine's loopback
console = Console(highlight=False, markup=False)


def run_demo(settings: Settings, file: Path | None, keep: bool, with_online: bool = False) -> None:
    """Start the service, run the batches, print the summary, and stop the service. Raises DemoError.

    `with_online`: a client streams answers before and while the batches run.
    """
    inputs, model_name = _inputs(settings, file)
    port = settings.port if _is_free(settings.host, settings.port) else _free_port(settings.host)
    url = f"http://{settings.host}:{port}"
    with _service(settings, model_name, port) as process:
        _wait_until_up(url, process, settings.data_dir)
        console.print(f"batchweave is up: API {url}/v1, docs {url}/docs")
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none-needed", max_retries=5, http_client=_http)
        waited_s, streaming = 0.0, None
        if with_online:
            waited_s = _wait_for_engine(url, process)
            console.print(f"a client streams answers for {online.ALONE_S:.0f} s, and then beside the batches")
            streaming = online.Comparison.begun(url, model_name)
        batches = [_submit(client, path, endpoint) for endpoint, path in inputs.items()]
        engine_s, run_s, batches = _follow(client, url, process, batches)
        compared = streaming.table() if streaming is not None else None
        _summary(client, settings.data_dir / "results", batches, waited_s + engine_s, run_s)
        if compared is not None:
            console.print(compared)
        if keep:
            console.print(f"dashboard  {url}/dashboard\nAPI        {url}/v1\nAPI docs   {url}/docs")
            console.print("The service keeps running until Ctrl-C.")
            _wait_for_interrupt(process)
    console.print(f"Next: `{sys.argv[0]} up --data-dir ./data` runs one that stays. README.md says how to use it.")
    if any(batch.status != "completed" for batch in batches):
        raise DemoError("not every batch completed; the table above says why")


def _inputs(settings: Settings, file: Path | None) -> tuple[dict[str, Path], str]:
    """Return the input files by endpoint, and the name under which to serve the model."""
    if file is None:
        folder = settings.data_dir / "inputs"
        folder.mkdir(parents=True, exist_ok=True)
        inputs: dict[str, Path] = {}
        for endpoint, lines in requests(settings.served_model).items():
            inputs[endpoint] = folder / f"{endpoint.removeprefix('/v1/').replace('/', '-')}.jsonl"
            inputs[endpoint].write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines))
        return inputs, settings.served_model
    try:
        first = next(line for line in file.read_text(encoding="utf-8-sig").splitlines() if line.strip())
        request = json.loads(first)
        endpoint, model = request["url"], request["body"]["model"]
    except OSError as error:
        raise DemoError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, StopIteration) as error:
        raise DemoError(
            f'{file} does not begin with a batch request: it needs "url" and "body" with a "model"'
        ) from error
    if endpoint not in ENDPOINTS:
        raise DemoError(f"{file}, line 1: url must be one of {', '.join(ENDPOINTS)}, not {endpoint!r}")
    console.print(f"{file} requests {model!r}: {settings.model_source} is served under that name.")
    return {str(endpoint): file}, str(model)


@contextmanager
def _service(settings: Settings, model_name: str, port: int) -> Generator[subprocess.Popen[bytes], None, None]:
    """Run `batchweave up` as a child process, and stop it cleanly at the end, also after an error or Ctrl-C."""
    command = [sys.executable, "-m", "service.cli", "up", "--data-dir", str(settings.data_dir), "--port", str(port)]
    command += ["--model", settings.model, "--model-name", model_name, "--host", settings.host]
    settings.data_dir.mkdir(parents=True, exist_ok=True)
    log = settings.data_dir / "up.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.kill(process.pid, signal.SIGTERM)
        try:
            process.wait(STOP_S)
            console.print("The service has stopped.")
        except subprocess.TimeoutExpired:
            process.kill()
            console.print(f"The service did not stop within {STOP_S:.0f} s and was killed; see {log}.")


def _wait_until_up(url: str, process: subprocess.Popen[bytes], data_dir: Path) -> None:
    deadline = time.monotonic() + START_S
    with console.status("Starting the service"):
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise DemoError(f"the service did not start:\n{(data_dir / 'up.log').read_text().strip()}")
            try:
                if _http.get(f"{url}/readyz", timeout=2).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)
    raise DemoError(f"the service was not ready after {START_S:.0f} s; see {data_dir / 'logs'}")


def _submit(client: openai.OpenAI, path: Path, endpoint: str) -> Batch:
    with path.open("rb") as opened:
        file = client.files.create(file=opened, purpose="batch")
    arguments: Any = {"input_file_id": file.id, "endpoint": endpoint, "completion_window": "24h"}
    batch = client.batches.create(**arguments)
    console.print(f"{path} ({file.bytes:,} bytes) is uploaded as {file.id} and runs as {batch.id}")
    return batch


def _follow(
    client: openai.OpenAI, url: str, process: subprocess.Popen[bytes], batches: list[Batch]
) -> tuple[float, float, list[Batch]]:
    """Poll the batches under a progress bar until they finish.

    Returns the seconds until the engine was up, the seconds after that, and the batches.
    """
    started = time.monotonic()
    engine_up: float | None = None
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = [progress.add_task("waiting", total=None) for _ in batches]
        while True:
            if process.poll() is not None:
                raise DemoError("the service stopped too early; start the demo again to continue")
            batches = [client.batches.retrieve(batch.id) for batch in batches]
            stage = "" if engine_up is not None else _stage(url)
            if engine_up is None and not stage:
                engine_up = time.monotonic()
            for bar, batch in zip(bars, batches, strict=True):
                counts = batch.request_counts
                assert counts is not None
                state = stage if stage and batch.status == "in_progress" else batch.status
                done = counts.completed + counts.failed
                progress.update(
                    bar, description=f"{batch.endpoint:<22} {state}", total=counts.total or None, completed=done
                )
            if all(batch.status in ENDED for batch in batches):
                break
            time.sleep(0.5)
    ended = time.monotonic()
    engine_up = engine_up or started
    return engine_up - started, ended - engine_up, batches


def _wait_for_engine(url: str, process: subprocess.Popen[bytes]) -> float:
    """Return how many seconds it took until the engine was up."""
    began = time.monotonic()
    with console.status("Starting the engine") as status:
        while stage := _stage(url):
            if process.poll() is not None:
                raise DemoError("the service stopped too early; start the demo again to continue")
            status.update(stage)
            time.sleep(0.5)
    return time.monotonic() - began


def _stage(url: str) -> str:
    """Return what the worker is doing while it starts; empty once it is alive."""
    found = _http.get(f"{url}/v1/workers", timeout=10).json().get("data", [])
    if any(worker["state"] != "starting" for worker in found):
        return ""
    stages = [f"the worker {worker['stage']}" for worker in found if worker.get("stage")]
    return stages[0] if stages else "the worker is starting"


def _summary(client: openai.OpenAI, folder: Path, batches: list[Batch], engine_s: float, run_s: float) -> None:
    """Download the results and print what came back."""
    folder.mkdir(parents=True, exist_ok=True)
    columns: list[tuple[str, ...]] = [
        ("", "status", "completed", "failed", "tokens in", "  of them cached", "tokens out")
    ]
    tokens = 0
    for batch in batches:
        counts, usage = batch.request_counts, batch.usage
        assert counts is not None
        assert usage is not None
        tokens += usage.total_tokens
        cached = usage.input_tokens_details.cached_tokens
        numbers = (counts.completed, counts.failed, usage.input_tokens, cached, usage.output_tokens)
        columns.append((batch.endpoint, batch.status, *(f"{number:,}" for number in numbers)))
    table = Table(title="batchweave demo", show_header=False)
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    console.print(table)
    if run_s < 1:  # polling saw the engine only after the requests were done: too short to time
        console.print(f"engine start {engine_s:.1f} s, then less than a second for the requests")
    else:
        speed = f"{tokens / run_s:,.0f} tokens/s in and out"
        console.print(f"engine start {engine_s:.1f} s, then {run_s:.1f} s for the requests: {speed}")
    for batch in batches:
        for error in (batch.errors.data if batch.errors else None) or []:
            console.print(f"line {error.line}: {error.code}: {error.message}", style="red", markup=False)
        for kind, file_id in (("output", batch.output_file_id), ("errors", batch.error_file_id)):
            if file_id:
                path = folder / f"{batch.id}_{kind}.jsonl"
                client.files.content(file_id).write_to_file(path)
                console.print(f"{kind:<10} {path}", soft_wrap=True)


def _wait_for_interrupt(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait()
    except KeyboardInterrupt:
        console.print("Stopping.")


def _is_free(host: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
