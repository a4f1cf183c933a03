"""A store of the S3 class in this process, which counts what is asked of it: requests, and bytes that it sends."""

import re
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlparse
from xml.sax.saxutils import escape

import pytest

BUCKET = "bucket"
DATE = "Wed, 21 Oct 2026 07:28:00 GMT"


@dataclass
class StubStore:
    """`requests`: by method; `sent`: bytes by the first folder of the key; `parts`: the sizes of all parts."""

    objects: dict[str, bytes] = field(default_factory=dict[str, bytes])
    requests: Counter[str] = field(default_factory=Counter[str])
    sent: Counter[str] = field(default_factory=Counter[str])
    parts: list[int] = field(default_factory=list[int])
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict[str, dict[int, bytes]])

    def forget(self) -> None:
        """Count from here on."""
        self.requests.clear()
        self.sent.clear()
        self.parts.clear()


def handler(store: StubStore) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def say(self, status: int, body: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            for name, value in {
                "Content_Length": str(len(body)),
                "Last_Modified": DATE,
                "ETag": '"x"',
                **headers,
            }.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def asked(self) -> tuple[str, dict[str, list[str]]]:
            store.requests[self.command] += 1
            url = urlparse(self.path)
            return unquote(url.path).removeprefix(f"/{BUCKET}").lstrip("/"), parse_qs(url.query, keep_blank_values=True)

        def body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def do_GET(self) -> None:
            key, query = self.asked()
            if "list-type" in query:
                self.say(200, self.listed(query.get("prefix", [""])[0], "delimiter" in query).encode())
                return
            data = store.objects.get(key)
            if data is None:
                self.say(404, b"<Error><Code>NoSuchKey</Code></Error>")
                return
            found = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            first, last = (
                (int(found[1]), min(int(found[2] or len(data)), len(data) - 1)) if found else (0, len(data) - 1)
            )
            part = data[first : last + 1]
            store.sent[key.split("/")[0]] += len(part)
            if found:
                self.say(206, part, Content_Range=f"bytes {first}-{last}/{len(data)}")
            else:
                self.say(200, part)

        def do_HEAD(self) -> None:
            key, _ = self.asked()
            data = store.objects.get(key)
            self.say(404 if data is None else 200, Content_Length=str(len(data or b"")))

        def listed(self, prefix: str, by_folder: bool) -> str:
            keys = sorted(key for key in list(store.objects) if key.startswith(prefix))
            folders = sorted(
                {prefix + key[len(prefix) :].split("/")[0] + "/" for key in keys if "/" in key[len(prefix) :]}
            )
            shown = [key for key in keys if not by_folder or "/" not in key[len(prefix) :]]
            each = "".join(
                f"<Contents><Key>{escape(key)}</Key><LastModified>2026-10-21T07:28:00.000Z</LastModified>"
                f"<Size>{len(store.objects[key])}</Size><ETag>x</ETag></Contents>"
                for key in shown
            )
            if by_folder:
                each += "".join(f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in folders)
            return f"<ListBucketResult><IsTruncated>false</IsTruncated>{each}</ListBucketResult>"

        def do_PUT(self) -> None:
            (key, query), data = self.asked(), self.body()
            if "uploadId" in query:
                store.parts.append(len(data))
                store.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = data
            else:
                store.objects[key] = data
            self.say(200)

        def do_POST(self) -> None:
            (key, query), data = self.asked(), self.body()
            if "uploads" in query:
                name = str(len(store.uploads))
                store.uploads[name] = {}
                about = f"<Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><UploadId>{name}</UploadId>"
                self.say(200, f"<InitiateMultipartUploadResult>{about}</InitiateMultipartUploadResult>".encode())
            elif "delete" in query:
                keys = re.findall(r"<Key>(.*?)</Key>", data.decode())
                for each in keys:
                    store.objects.pop(each, None)
                gone = "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in keys)
                self.say(200, f"<DeleteResult>{gone}</DeleteResult>".encode())
            else:
                parts = store.uploads[query["uploadId"][0]]
                store.objects[key] = b"".join(parts[number] for number in sorted(parts))
                about = f"<Location>x</Location><Bucket>{BUCKET}</Bucket><Key>{escape(key)}</Key><ETag>x</ETag>"
                self.say(200, f"<CompleteMultipartUploadResult>{about}</CompleteMultipartUploadResult>".encode())

        def do_DELETE(self) -> None:
            store.objects.pop(self.asked()[0], None)
            self.say(204)

    return Handler


@contextmanager
def stub_store(monkeypatch: pytest.MonkeyPatch) -> Generator[StubStore, None, None]:
    """Run the store until the end of the block, as `s3://bucket` for this process."""
    store = StubStore()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(store))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    about = {"ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "ALLOW_HTTP": "true", "REGION": "here"}
    for name, value in {**about, "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
