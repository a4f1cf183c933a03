"""What a batch file may look like: every reader understands what the service takes."""

import gzip
import json
from pathlib import Path

import pytest

from batchweave.files import opened
from batchweave.remote.submit import _endpoint_of  # pyright: ignore[reportPrivateUsage]
from service.api.plain_text import PlainText
from service.dashboard.lines import parsed
from service.objects.json_lines import line_of
from service.workloads.workload import lines_of

BOM = b"\xef\xbb\xbf"
LINE = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {}}).encode()
KINDS = {"plain": LINE, "mark": BOM + LINE, "gzip": gzip.compress(LINE), "both": gzip.compress(BOM + LINE)}


@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
def test_a_file_on_disk_is_read_as_the_service_reads_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    with opened(path) as file:
        assert file.read() == LINE
    assert _endpoint_of(path) == "/v1/completions"
    assert list(lines_of(path)) == [(1, LINE)]


@pytest.mark.parametrize("step", [1, 2, 7, 10**6])
@pytest.mark.parametrize("data", KINDS.values(), ids=KINDS)
async def test_what_is_stored_has_no_mark_and_no_packing(data: bytes, step: int) -> None:
    found = bytearray()

    async def sink(part: bytes) -> None:
        found.extend(part)

    text = PlainText(sink, 10**6)
    for at in range(0, len(data), step):
        await text.write(data[at : at + step])
    await text.end()
    assert bytes(found) == LINE
    assert text.size_bytes == len(LINE)
    assert text.named("in.jsonl.gz") == ("in.jsonl" if data[:2] == b"\x1f\x8b" else "in.jsonl.gz")


async def test_a_short_file_arrives_whole() -> None:
    found = bytearray()

    async def sink(part: bytes) -> None:
        found.extend(part)

    text = PlainText(sink, 10**6)
    await text.write(b"{}")
    await text.end()
    assert bytes(found) == b"{}"


@pytest.mark.parametrize("end", ["\u2028", "\u2029", "\x85", "\n", "\r", "\x0b", "\x0c", "\x1c", "\x1e"])
def test_no_character_of_an_answer_ends_its_line(end: str) -> None:
    value = {"text": f"é{end}一\u0085".replace("\u0085", end)}
    found = line_of(value)
    assert len(found.decode().splitlines()) == 1
    assert json.loads(found) == value
    assert parsed(found) == value
