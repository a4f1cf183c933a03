"""How the end of a process is said in one line."""

import json
from pathlib import Path

import pytest

from service.up.last_words import MOST, how, last_words


@pytest.mark.parametrize(
    ("code", "said"), [(0, "exit 0"), (3, "exit 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")]
)
def test_how_a_process_ended(code: int, said: str) -> None:
    assert how(code) == said


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], ""),
        (["starts", "works"], ""),
        (["error: BATCHWEAVE_GPU: no such file", "bye"], "BATCHWEAVE_GPU: no such file"),
        (["Traceback (most recent call last):", "torch.cuda.OutOfMemoryError: 3 GiB", ""], "OutOfMemoryError: 3 GiB"),
        ([json.dumps({"level": "error", "event": "x", "exception": "Traceback\nEr: y"}), "later"], "x: Er: y"),
        ([json.dumps({"level": "info", "event": "works"})], ""),
        (["[1, 2]", "error: \x1b[31mred\x07"], "[31mred"),
        (["error: " + "[" * 60_000], "[" * MOST + " …"),
        (["Fatal Python error: Segmentation fault", "Thread 1:"], "Fatal Python error: Segmentation fault"),
        (
            [
                json.dumps({"level": "error", "event": "Hit: Traceback …\n  x\nValueError: no backend foo\n"}),
                json.dumps({"level": "error", "event": "Received sigquit from a child process. It failed."}),
            ],
            "ValueError: no backend foo",
        ),
        ([json.dumps({"level": "error", "event": "a\x1b[2Jb\nc", "error": " "})], "a [2Jb c"),
        (["error: " + "a" * 1000], "a" * MOST + " …"),
    ],
)  # fmt: skip
def test_the_last_error_is_its_last_words(tmp_path: Path, lines: list[str], said: str) -> None:
    log = tmp_path / "log"
    log.write_text("error: of an earlier process\n")
    begin = log.stat().st_size
    with log.open("a") as opened:
        opened.writelines(f"{line}\n" for line in lines)
    assert last_words(log, begin) == said


def test_a_log_that_was_rotated_is_read_from_its_begin_and_one_that_is_gone_is_silent(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("error: new\n")
    assert last_words(tmp_path / "log", 1 << 20) == "new"
    assert last_words(tmp_path / "none") == ""
