"""Files to and from a service, by the remote commands, against the real API."""

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import update

from batchweave.errors import CommandError
from batchweave.remote import upload as uploads
from batchweave.remote.download import download
from batchweave.remote.session import connect
from service.db.tables import File
from tests.integration.command import run, write
from tests.integration.harness import Harness, line


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """One database is enough: the commands see the API alone."""
    return sqlite_url


async def test_a_download_goes_on_where_it_broke_off(harness: Harness, url: str, tmp_path: Path) -> None:
    path = write(tmp_path, [line(n) for n in range(50)])
    file_id = (await run(url, "files", "upload", path))[1].strip()
    whole, output = path.read_bytes(), tmp_path / "copy.jsonl"
    (tmp_path / f"copy.jsonl.{file_id}.part").write_bytes(whole[:1000])
    assert (await run(url, "files", "download", file_id, "-o", output))[0] == 0
    assert output.read_bytes() == whole
    assert not list(tmp_path.glob("*.part"))
    assert file_id in (await run(url, "files", "list"))[1]
    assert (await run(url, "files", "delete", file_id))[0] == 0
    code, _, said = await run(url, "files", "show", file_id)
    assert (code, "No such File object" in said) == (1, True)


@pytest.mark.slow
async def test_a_download_without_a_name_takes_the_files_own(harness: Harness, url: str, tmp_path: Path) -> None:
    path = write(tmp_path, [line(1)])
    file_id = (await run(url, "files", "upload", path))[1].strip()
    here = tmp_path / "here"
    here.mkdir()
    for name in ("in.jsonl", "/tmp/../in/2.jsonl"):
        async with harness.database.write() as session:
            await session.execute(update(File).values(filename=name))
        assert (await run(url, "files", "download", file_id, folder=here))[0] == 0
        assert (here / Path(name).name).read_bytes() == path.read_bytes()
    (here / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("in.jsonl", "link", ".bashrc", "-x", "..", "\x1b[2J", 150 * "x", 400 * "x"):
        async with harness.database.write() as session:
            await session.execute(update(File).values(filename=name))
        code, _, said = await run(url, "files", "download", file_id, folder=here)
        assert (code, "use --output FILE" in said) == (1, True)
    assert sorted(each.name for each in here.iterdir()) == ["2.jsonl", "in.jsonl", "link"]
    with connect(url, "none") as client, pytest.raises(CommandError, match="exists now"):
        await asyncio.to_thread(download, client, file_id, here / "in.jsonl", is_new=True)


@pytest.mark.parametrize("left", [b"G" * 1_000_000, b""])
async def test_what_is_left_of_another_download_does_no_harm(url: str, tmp_path: Path, left: bytes) -> None:
    path = write(tmp_path, [line(n) for n in range(50)])
    file_id = (await run(url, "files", "upload", path))[1].strip()
    (tmp_path / f"copy.jsonl.{file_id}.part").write_bytes(left)
    assert (await run(url, "files", "download", file_id, "-o", tmp_path / "copy.jsonl"))[0] == 0
    assert (tmp_path / "copy.jsonl").read_bytes() == path.read_bytes()


async def test_a_large_file_goes_in_parts(
    harness: Harness, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "PART_BYTES", 1000)
    path = write(tmp_path, [line(n) for n in range(50)])
    client = connect(url, "none")
    file = await asyncio.to_thread(uploads.upload, client, path)
    assert file.bytes > 3 * 1000
    await asyncio.to_thread(download, client, file.id, tmp_path / "copy.jsonl")
    assert (tmp_path / "copy.jsonl").read_bytes() == path.read_bytes()
