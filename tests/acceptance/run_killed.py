"""Kills `batchweave run` at random moments and starts it again, until it has ended.

    python -m tests.acceptance.run_killed --kills 50 --seed 1

Prints how often it was killed and how many answers were durable then. One line for each request must come out, and no
answer that was durable at a kill may be another one at the end. The engine is scripted.
"""

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from service.demo.prompts import CHAT
from tests.acceptance.service import Up

ENDS_S = 300.0


def run_killed(folder: Path, lines: int, kills: int, seed: int) -> tuple[int, int]:
    """Return the number of kills, and the number of answers that were durable at the last one."""
    chance = random.Random(seed)
    file, output, data = folder / "requests.jsonl", folder / "results.jsonl", folder / "data"
    file.write_text("".join(f"{json.dumps(_request(number))}\n" for number in range(lines)))
    (folder / "rules.json").write_text('{"rules": [{"prompt": "*", "delay_s": 0.4}]}')
    command = [sys.executable, "-m", "batchweave", "run", str(file), "-o", str(output), "--data-dir", str(data)]
    command += ["--model", "demo", "--engine", "scripted", "--script", str(folder / "rules.json")]
    durable, killed, at_last = dict[str, str](), 0, 0
    while True:
        with (folder / "run.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        if killed == kills:
            break
        with suppress(subprocess.TimeoutExpired):
            # Most of it is the start; the rest is a window of answers.
            code = process.wait(chance.uniform(1.0, 9.0))
            assert code == 0, (folder / "run.log").read_text()
            break
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for each in family if chance.random() < 0.5 else family[:1]:  # as a power loss, or it alone
            with suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGKILL)
        process.wait()
        killed += 1
        found = Up(data, 0).answers_on_disk()
        assert all(found.get(key) == name for key, name in durable.items()), "a durable answer was computed again"
        durable, at_last = durable | found, len(found)
    assert process.wait(ENDS_S) == 0, (folder / "run.log").read_text()
    results: list[Any] = [json.loads(line) for line in output.read_text().splitlines()]
    assert sorted(int(each["custom_id"]) for each in results) == list(range(lines)), "a line is lost or doubled"
    assert durable.items() <= {each["custom_id"]: each["id"] for each in results}.items(), "an answer is another one"
    assert [each.name for each in folder.glob("*.part")] == []
    return killed, at_last


def _request(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number}"}]
    return {"custom_id": str(number), "method": "POST", "url": CHAT, "body": {"model": "m", "messages": messages}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--lines", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="batchweave-run-") as place:
        times, there = run_killed(Path(place), given.lines, given.kills, given.seed)
    print(
        f"killed {times} times in {time.monotonic() - began:.0f} s, {there} of {given.lines} answers were durable then"
    )
    print("one line for each request, and no durable answer computed twice")
