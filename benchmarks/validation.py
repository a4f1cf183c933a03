"""Measure how fast a batch's file is validated, and how much memory that takes.

python -m benchmarks.validation DATA --lines 21000000           checks every line (10 GB), one core
python -m benchmarks.validation DATA --lines 1000000 --whole    the whole validator: counts tokens, writes the index

Lines are GSM8K's real questions as chat requests, each with its own custom_id; the tokenizer is the demo model's.
"""

import argparse
import asyncio
import json
import resource
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import select

from service.db.migrate import upgrade
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, File, Model
from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model
from service.jobs.validator import Validator
from service.objects.storage import Storage, file_key
from service.queue.connection import open_redis
from service.queue.progress import Heartbeat
from service.requests.lines import MAX_ERRORS, LineChecker
from service.settings import Settings

ENDPOINT = "/v1/chat/completions"
FILE = "file-benchmark"
AT_ONCE = 1000  # lines per write


def requests(data: Path) -> Iterator[bytes]:
    """Yield lines without end: the questions over and over, in OpenAI's form."""
    questions = [json.loads(line)["question"] for line in (data / "text" / "gsm8k_train.jsonl").open()]
    number = 0
    while True:
        for question in questions:
            messages = [{"role": "system", "content": "Solve it step by step."}, {"role": "user", "content": question}]
            body = {"model": "demo", "messages": messages, "max_tokens": 256, "temperature": 0}
            line = {"custom_id": f"gsm8k-{number}", "method": "POST", "url": ENDPOINT, "body": body}
            yield json.dumps(line, ensure_ascii=False).encode() + b"\n"
            number += 1


async def make_file(storage: Storage, data: Path, lines: int) -> int:
    """Write the input file, and return its size in bytes."""
    made, size = requests(data), 0
    async with storage.writer(file_key(FILE)) as writer:
        for _ in range(0, lines, AT_ONCE):
            part = b"".join(next(made) for _ in range(AT_ONCE))
            size += len(part)
            await writer.write(part)
    return size


async def check(storage: Storage, settings: Settings) -> None:
    """Check every line as the validator does, without the tokenizer and without an index."""
    checker, number = LineChecker(ENDPOINT), 0
    async for _, raw in storage.lines(file_key(FILE), settings.max_line_bytes):
        number += 1
        checker.check(number, raw)
    assert checker.requests == number
    assert not checker.errors
    assert not checker.custom_ids.suspects(MAX_ERRORS)


async def validate(storage: Storage, settings: Settings, folder: Path, size: int) -> None:
    await asyncio.to_thread(upgrade, settings.database)
    database = Database(settings.database)
    async with database.write() as session:
        tokenizer = ensure_tiny_model(folder / "model", corpus())
        session.add(Model(name="demo", source=str(tokenizer), created_at=0))
        session.add(File(id=FILE, filename="f", purpose="batch", size_bytes=size, created_at=0))
        await session.flush()
        session.add(
            Batch(
                id="batch_b",
                endpoint=ENDPOINT,
                input_file_id=FILE,
                status=BatchStatus.VALIDATING,
                completion_window="24h",
                created_at=0,
                expires_at=1 << 40,
            )
        )
    await Validator(database, storage, settings, time.time, Heartbeat(open_redis(settings.redis))).run_once()
    async with database.read() as session:
        batch = (await session.scalars(select(Batch))).one()
        assert batch.status == BatchStatus.IN_PROGRESS, batch.errors
        print(f"{batch.total} requests, {batch.prompt_tokens} prompt tokens")
    await database.close()


def memory_mib() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def measure(data: Path, folder: Path, lines: int, whole: bool) -> None:
    settings = Settings.model_validate({"data_dir": folder, "max_lines": lines})
    storage = Storage.open((folder / "objects").as_uri())
    size = await make_file(storage, data, lines)
    print(f"{lines} lines, {size / 1e9:.2f} GB; peak memory before: {memory_mib():.0f} MiB")
    started, busy = time.perf_counter(), time.process_time()
    await (validate(storage, settings, folder, size) if whole else check(storage, settings))
    seconds, busy = time.perf_counter() - started, time.process_time() - busy
    print(f"{lines / busy:,.0f} lines per second of CPU time, {lines / seconds:,.0f} of wall time")
    print(f"peak memory: {memory_mib():.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with text/gsm8k_train.jsonl")
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--whole", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/batchweave-validation"), help="created, then deleted")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    try:
        asyncio.run(measure(given.data, given.folder.resolve(), given.lines, given.whole))
    finally:
        shutil.rmtree(given.folder)


if __name__ == "__main__":
    main()
