"""Speaks HTTP to the service for the remote commands.

It stands for the official client, whose import alone takes longer than a command may.
"""

import ssl
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar
from uuid import uuid4

import httpx
import msgspec

from batchweave.errors import CommandError

TIMEOUT = httpx.Timeout(600.0, connect=10.0)
TRIES = 3
PAUSE_S = 0.5
LONGEST_PAUSE_S = 60.0
LOOPBACK = ("127.0.0.1", "localhost", "::1")
UNKNOWN_AUTHORITY = (18, 19, 20, 21)  # OpenSSL's codes for certificates that nobody known has signed
DEEPEST = 8  # causes of an error that are looked at
PASSING = (408, 409, 429)  # statuses worth another try, beside those of 500 and more
Shape = TypeVar("Shape", bound=msgspec.Struct)


class AnswerError(Exception):
    """The service refuses a call: `status` and the message of its body, or, if that has none, `message` is empty."""

    def __init__(self, response: httpx.Response) -> None:
        self.status = response.status_code
        self.url = str(response.request.url)
        self.message = _message(response)
        super().__init__(self.message or f"{self.url} returned {self.status}")

    @property
    def may_pass(self) -> bool:
        return self.status in PASSING or self.status >= 500


class NotAService(Exception):
    """What answers is no such service: its answer has another form."""


class Away(Exception):
    """The service did not answer."""


class Client:
    """Calls the service, and tries again what may succeed then.

    Its methods raise AnswerError, NotAService, Away, and CommandError for what the machine's settings make impossible.
    `url`: up to /v1. `tries`: how often a call is made at most.
    """

    def __init__(self, url: str, key: str, tries: int = TRIES) -> None:
        # Reading certificates takes a tenth of a command's time. No redirect is followed, so http stays http.
        verify = not url.startswith("http://")
        headers = {"Authorization": f"Bearer {key}"}
        # No proxy reaches this machine's loopback, so its variables are not even read; those of certificates count.
        elsewhere = httpx.URL(url).host not in LOOPBACK
        try:
            trusted = ssl.create_default_context() if verify and not elsewhere else verify
            self._http = httpx.Client(
                base_url=url, headers=headers, timeout=TIMEOUT, verify=trusted, trust_env=elsewhere
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise CommandError(f"HTTP_PROXY, HTTPS_PROXY, ALL_PROXY or NO_PROXY cannot be used: {error}") from error
        except OSError as error:
            raise CommandError(f"SSL_CERT_FILE or SSL_CERT_DIR cannot be used: {error}") from error
        self._tries = tries

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    @contextmanager
    def trying_once(self, timeout_s: float) -> Generator[None, None, None]:
        """Make each call of the block once, and wait no longer for its answer."""
        before, self._tries, self._http.timeout = (self._tries, self._http.timeout), 1, httpx.Timeout(timeout_s)
        try:
            yield
        finally:
            self._tries, self._http.timeout = before

    def get(self, path: str, **params: Any) -> Any:
        return self._call("GET", path, params={name: each for name, each in params.items() if each is not None})

    def post(
        self,
        path: str,
        body: Any = None,
        files: Any = None,
        data: Mapping[str, str] | None = None,
        key: str | None = None,
    ) -> Any:
        # A call that is made again because its answer was lost is recognized by its key.
        headers = {"Idempotency-Key": key or str(uuid4())}
        return self._call("POST", path, json=body, files=files, data=data, headers=headers)

    def delete(self, path: str) -> Any:
        return self._call("DELETE", path)

    def every(self, path: str, **params: Any) -> Iterator[Any]:
        """Yield the objects of a list, page by page."""
        after: str | None = None
        while True:
            page = self.get(path, limit=100, after=after, **params)
            if not isinstance(page, dict) or not isinstance(page.get("data"), list):
                raise NotAService(path)
            yield from page["data"]
            if not page["data"] or not page.get("has_more"):
                return
            after = page["data"][-1]["id"]

    @contextmanager
    def content(self, file_id: str, headers: Mapping[str, str] | None = None) -> Generator[httpx.Response, None, None]:
        """Stream a file; reading it raises httpx.TransportError if the connection is lost."""
        path = f"/files/{file_id}/content"
        try:
            with self._http.stream("GET", path, headers=headers) as response:
                if response.status_code >= 400:
                    response.read()
                    raise AnswerError(response)
                yield response
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            _check_trust(error, self._http.base_url.host)
            raise Away(repr(error)) from error

    def _call(self, method: str, path: str, **how: Any) -> Any:
        for left in reversed(range(self._tries)):
            pause_s = PAUSE_S * 2 ** (self._tries - 1 - left)
            try:
                response = self._http.request(method, path, **how)
            except httpx.TransportError as error:
                _check_trust(error, self._http.base_url.host)
                if not left:
                    raise Away(repr(error)) from error
            else:
                if response.status_code < 400:
                    return _json(response)
                error = AnswerError(response)
                if not (left and error.may_pass and response.headers.get("x-should-retry") != "false"):
                    raise error
                pause_s = _asked_pause_s(response) or pause_s
            time.sleep(pause_s)
        raise AssertionError("the last try returns or raises")


def _check_trust(error: BaseException, host: str) -> None:
    """Raise CommandError if a connection failed because the service's certificate was refused."""
    under, depth = error, 0
    while under is not None and not isinstance(under, ssl.SSLCertVerificationError) and depth < DEEPEST:
        under, depth = under.__cause__ or under.__context__, depth + 1
    if isinstance(under, ssl.SSLCertVerificationError):
        own = " If your own authority signed it, name the authority's file in SSL_CERT_FILE."
        why = f"The certificate of {host} is not trusted: {under.verify_message.rstrip('.')}."
        raise CommandError(why + (own if under.verify_code in UNKNOWN_AUTHORITY else "")) from error


def shaped(told: Any, shape: type[Shape]) -> Shape:
    """Return an answer as a shape. Raises NotAService."""
    try:
        return msgspec.convert(told, shape)
    except msgspec.ValidationError as error:
        raise NotAService(str(error)) from error


def _json(response: httpx.Response) -> Any:
    try:
        return msgspec.json.decode(response.content)
    except msgspec.DecodeError as error:
        raise NotAService(f"{response.request.url} is not JSON") from error


def _message(response: httpx.Response) -> str:
    try:
        body = msgspec.json.decode(response.content)
        return str(body["error"]["message"])
    except (msgspec.DecodeError, LookupError, TypeError):
        return ""


def _asked_pause_s(response: httpx.Response) -> float:
    """Return the pause that the service asks for, or 0."""
    try:
        return min(float(response.headers.get("retry-after", 0)), LONGEST_PAUSE_S)
    except ValueError:
        return 0.0
