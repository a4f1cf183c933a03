"""A large upload streams through: the API's memory does not grow with the file."""

from pathlib import Path

import openai

from tests.hostile.server import Role

SIZE = 200 * 1024 * 1024
ALLOWED_GROWTH = 64 * 1024 * 1024


def test_upload_of_200_mb_grows_memory_by_less_than_64(tmp_path: Path, api: Role) -> None:
    path = tmp_path / "large.jsonl"
    with path.open("wb") as file:
        for _ in range(SIZE // 1024):
            file.write(b"x" * 1023 + b"\n")
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="k", max_retries=0)
    with path.open("rb") as small:  # warm: what the first upload of any size needs
        client.files.create(file=("small", small.read(1000)), purpose="batch")
    api.forget_peak()
    before = api.peak_rss
    with path.open("rb") as file:
        made = client.files.create(file=file, purpose="batch")
    assert made.bytes == SIZE
    assert api.peak_rss - before < ALLOWED_GROWTH
    with client.files.with_streaming_response.content(made.id) as response:
        assert sum(len(chunk) for chunk in response.iter_bytes(1 << 20)) == SIZE
    assert api.peak_rss - before < ALLOWED_GROWTH
