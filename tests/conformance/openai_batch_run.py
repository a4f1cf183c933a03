"""A batch by the package `openai-batch`, unmodified; needs nothing else.

`python openai_batch_run.py BASE_URL MODEL FOLDER` prints one JSON line as calls.py does.
"""

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

from openai_batch import Batch  # pyright: ignore[reportMissingImports]: only in the environment that __main__ makes
from openai_batch.providers import Provider  # pyright: ignore[reportMissingImports]

COUNT = 5


def run(url: str, model: str, folder: Path) -> None:
    provider = Provider(name="batchweave", base_url=url, api_key="k", requires_consistency=True)
    paths = [str(folder / name) for name in ("in.jsonl", "out.jsonl", "errors.jsonl")]
    with Batch(*paths, provider=provider) as batch:
        for number in range(COUNT):
            messages = [{"role": "user", "content": f"Say {number}."}]
            batch.add_to_batch(model=model, messages=messages, max_completion_tokens=4)
        found, output, _ = batch.submit_wait_download(interval=1)
    assert found.status == "completed", found
    assert len(Path(output).read_text().splitlines()) == COUNT


if __name__ == "__main__":
    said = "ok"
    try:
        with redirect_stdout(sys.stderr):  # the package tells of its progress
            run(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
    except Exception as error:  # whatever it is, it is the outcome
        said = repr(error)
    print(json.dumps({"call": f"a batch of {COUNT}", "said": said}))
