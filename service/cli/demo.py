"""`batchweave demo`: runs real requests with a small model, and prints some of the answers."""

import json
import logging
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import typer

from batchweave.files import opened
from batchweave.terminal import CONTROL, said
from service.cli.run import failing_clearly, first_request, run_file
from service.cli.start import ModelOption, log_to, settings_of

if TYPE_CHECKING:
    from service.up.child import Service

SHOWN = 3  # answers
MOST_SHOWN = 300  # characters of each, and of its question
LOOK_S = 0.5


def demo(
    file: Annotated[
        Path | None, typer.Option("--file", help="Your own JSONL file instead of the built-in requests.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the service running until Ctrl-C.")] = False,
    online: Annotated[
        bool, typer.Option("--online", help="Stream answers too, and compare them alone and beside the batch.")
    ] = False,
    model: ModelOption = None,
    data_dir: Annotated[Path, typer.Option("--data-dir", help="Folder for the service's data.")] = Path(".demo"),
) -> None:
    """Run a file of real requests from nothing each time, and print some of the answers.

    The built-in requests label, extract, summarize and answer questions; SmolLM2-135M answers them, also on a CPU.
    Examples:

    - `batchweave demo`
    - `batchweave demo --file requests.jsonl --keep`
    - `batchweave demo --online`
    """
    log_to(sys.stderr, logging.WARNING)
    with failing_clearly("Stopped."):
        path = file or _written(data_dir)
        endpoint, named = first_request(path)
        settings = settings_of(model=model, model_name=named, data_dir=data_dir)
        if file is not None:
            said.print(f"{file} asks for {named}: {settings.model} is served under that name")
        results = data_dir / "results.jsonl"
        results.unlink(missing_ok=True)  # of an earlier run, whose ids are the same
        show = _Show(path, results, named, keep, online)
        code = run_file(path, results, endpoint, settings, again=True, around=show.around)
    said.print(f"Next: `{sys.argv[0]} up --data-dir ./data` runs a service that stays. README.md says how to use it.")
    raise typer.Exit(code)


def _written(data_dir: Path) -> Path:
    """Write the built-in requests, and return their file."""
    from service.demo.tasks import tasks
    from service.settings import DEMO_NAME

    data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = data_dir / "requests.jsonl"
    path.write_text("".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in tasks(DEMO_NAME)))
    return path


@dataclass(frozen=True)
class _Show:
    """What the demo does around the run: streams beside it, answers after it, and a service that stays."""

    requests: Path
    results: Path
    model: str
    keep: bool
    online: bool

    @contextmanager
    def around(self, service: "Service") -> Generator[None, None, None]:
        compared = self._compared(service) if self.online else None
        yield
        self._print_answers()
        if compared is not None:
            said.print(compared.table())
        if self.keep:
            said.print(f"API: {service.url}/v1, its reference: {service.url}/docs. The service runs until Ctrl-C.")
            with suppress(KeyboardInterrupt):
                while True:
                    service.check()
                    time.sleep(LOOK_S)

    def _compared(self, service: "Service") -> Any:
        from service.demo import online

        with said.status("starts the engine"):
            while not httpx.get(f"{service.url}/readyz", timeout=10, trust_env=False).json()["workers"]:
                service.check()
                time.sleep(LOOK_S)
        said.print(f"a client streams answers for {online.ALONE_S:.0f} s, and then beside the batch")
        return online.Comparison.begun(service.url, self.model)

    def _print_answers(self) -> None:
        """Print the first answer of each kind, below what was asked; ids that begin alike are of a kind."""
        if not self.results.exists():
            return
        with self.results.open() as results:
            texts = {answer["custom_id"]: _text(answer["response"]["body"]) for answer in map(json.loads, results)}
        shown = set[str]()
        with opened(self.requests) as lines:
            for line in filter(bytes.strip, lines):
                request = json.loads(line.decode("utf-8-sig"))
                kind = request["custom_id"].partition("-")[0]
                if kind in shown or not texts.get(request["custom_id"]):
                    continue
                shown.add(kind)
                said.print(f"\n{request['custom_id']}: {_question(request['body'])}", style="dim")
                said.print(texts[request["custom_id"]])
                if len(shown) == SHOWN:
                    break
        said.print()


def _question(body: dict[str, Any]) -> str:
    messages = body.get("messages") or []
    found = messages[-1].get("content") if messages else body.get("prompt") or body.get("input")
    return _short(found if isinstance(found, str) else json.dumps(found))


def _text(body: dict[str, Any]) -> str:
    """Return the answer's text; empty for those that have none, as embeddings."""
    choice = (body.get("choices") or [{}])[0]
    return _short((choice.get("message") or {}).get("content") or choice.get("text") or "")


def _short(text: str) -> str:
    text = CONTROL.sub("?", " ".join(text.split()))
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]} …"
