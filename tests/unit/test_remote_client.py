"""The client of the remote commands against a server that fails: what it tries again, and under which key."""

import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from service.remote.client import AnswerError, Client
from service.remote.session import connect


class Failing(BaseHTTPRequestHandler):
    """Answers each request with the next of `answers`: a status and headers; 0 closes the connection."""

    answers: ClassVar[list[tuple[int, dict[str, str]]]] = []
    seen: ClassVar[list[str | None]] = []  # the idempotency keys that came

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.seen.append(self.headers.get("Idempotency-Key"))
        status, headers = self.answers.pop(0)
        if not status:
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "told so"}}')

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.mark.parametrize(
    ("answers", "tries"),
    [
        ([(503, {}), (0, {}), (200, {})], 3),
        ([(429, {"Retry-After": "0.1"}), (200, {})], 2),
        ([(503, {"x-should-retry": "false"}), (200, {})], 1),
        ([(400, {}), (200, {})], 1),
        ([(500, {})] * 4, 3),
    ],
)
def test_what_may_pass_is_tried_again_under_the_same_key(answers: list[tuple[int, dict[str, str]]], tries: int) -> None:
    Failing.answers, Failing.seen = list(answers), []
    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with connect(f"http://127.0.0.1:{server.server_port}", "k") as client:
            outcome = client.post if answers[tries - 1][0] == 200 else partial(_refused, client)
            outcome("/batches", {})
        server.shutdown()
    assert (len(Failing.seen), len(set(Failing.seen))) == (tries, 1)


def _refused(client: Client, path: str, body: Any) -> None:
    with pytest.raises(AnswerError, match="told so"):
        client.post(path, body)
