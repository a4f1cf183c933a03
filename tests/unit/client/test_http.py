"""The client of the remote commands against a server that fails: what it tries again, and under which key."""

import datetime
import ssl
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from batchweave.errors import CommandError
from batchweave.remote.client import AnswerError, Client
from batchweave.remote.session import connect


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


def by_own_authority(folder: Path) -> Path:
    """Write a key and a certificate of 127.0.0.1 that no authority but its own has signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "own")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    signed = made.add_extension(address, False).sign(key, hashes.SHA256())
    plain = serialization.NoEncryption(), serialization.PrivateFormat.PKCS8
    file = folder / "own.pem"
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, plain[1], plain[0])
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return file


def test_a_certificate_of_ones_own_authority_is_trusted_once_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = by_own_authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    Failing.answers, Failing.seen = [(200, {})], []
    monkeypatch.setenv("HTTPS_PROXY", "socks5://127.0.0.1:9")  # which no call to this machine reads
    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"https://localhost:{server.server_port}/v1"
        with Client(url, "k") as client, pytest.raises(CommandError, match="localhost is not trusted: self-signed"):
            client.post("/batches")
        monkeypatch.setenv("SSL_CERT_FILE", str(file))
        with Client(url, "k") as client:
            client.post("/batches")
        server.shutdown()
    assert Failing.answers == []


def test_a_proxy_that_cannot_be_used_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "ftp://127.0.0.1:9")
    with pytest.raises(CommandError, match="ALL_PROXY or NO_PROXY cannot be used"):
        Client("http://batchweave.example/v1", "k")
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere.pem")
    monkeypatch.delenv("ALL_PROXY")
    with pytest.raises(CommandError, match="SSL_CERT_FILE or SSL_CERT_DIR cannot be used"):
        Client("https://batchweave.example/v1", "k")
