"""Remote commands that cannot do what they are asked end with one line that says why."""

import asyncio
import signal
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.integration.command import run, start


@pytest.fixture
def database_url(sqlite_url: str) -> str:
    """One database is enough: the commands see the API alone."""
    return sqlite_url


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("batches", "show", "batch_none"), "No such Batch object: batch_none"),
        (("submit", "/nowhere/in.jsonl"), "/nowhere/in.jsonl: No such file"),
        (("submit", "/dev/null"), "is empty"),
        (("submit", __file__), 'not a request with a "url"'),
        (("submit", __file__, "-o", "/"), "/ is not a regular file"),
        (("submit", __file__, "-o", "/nowhere/out.jsonl"), "cannot write to /nowhere"),
        (("batches", "list", "--api-key", "bw-\u2026"), "The API key is malformed"),
        (("batches", "list", "--url", "http://[::1"), "is not the URL of a service"),
    ],
)
async def test_what_cannot_be_done_is_said_in_a_line(url: str, arguments: tuple[str, ...], problem: str) -> None:
    code, printed, said = await run(url, *arguments)
    assert (code, printed, said.count("\n")) == (1, "", 1)
    assert problem in said


@pytest.mark.parametrize("command", [("batches", "list"), ("batches", "show", "b"), ("workers", "list")])
async def test_something_else_at_the_url_is_said_in_a_line(command: tuple[str, ...]) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<p>Welcome</p>")

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code, _, said = await run(f"http://127.0.0.1:{server.server_port}", *command)
        server.shutdown()
    assert (code, said.count("\n")) == (1, 1)
    assert "batchweave service" in said


async def test_a_service_that_is_not_there_is_said_in_a_line() -> None:
    code, _, said = await run("http://127.0.0.1:9", "batches", "list")
    assert (code, said.count("\n")) == (1, 1)
    assert "http://127.0.0.1:9 is not responding" in said


async def test_ctrl_c_while_the_service_does_not_answer_ends_with_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = start(f"http://127.0.0.1:{silent.getsockname()[1]}", "files", "list")
        connection, _ = await asyncio.to_thread(silent.accept)
        await asyncio.to_thread(connection.recv, 1)  # the request is there
        command.send_signal(signal.SIGINT)
        printed, said = await asyncio.to_thread(command.communicate, None, 60)
        connection.close()
    assert (command.returncode, printed, said) == (130, "", "interrupted\n")
