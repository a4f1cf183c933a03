"""The error tree of the HTTP API; each class is one HTTP code and one OpenAI error type.

ApiError
├── BadRequest          400  invalid_request_error
├── Unauthorized        401  authentication_error
├── Forbidden           403  permission_error
├── NotFound            404  invalid_request_error
├── MethodNotAllowed    405  invalid_request_error
├── PayloadTooLarge     413  invalid_request_error
├── RangeNotSatisfiable 416  invalid_request_error
├── QuotaReached        429  rate_limit_error, with Retry-After
└── Unavailable         503  server_error, with Retry-After

Clients retry 408, 409, 429 and 5xx, so a fault that stays is never one of those.
"""

from typing import Any


class ApiError(Exception):
    status_code = 500
    type = "server_error"

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param

    @property
    def headers(self) -> dict[str, str]:
        return {}

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class BadRequest(ApiError):
    status_code = 400
    type = "invalid_request_error"


class Unauthorized(ApiError):
    status_code = 401
    type = "authentication_error"

    @property
    def headers(self) -> dict[str, str]:
        return {"WWW-Authenticate": "Bearer"}


class Forbidden(ApiError):
    status_code = 403
    type = "permission_error"


class NotFound(ApiError):
    status_code = 404
    type = "invalid_request_error"


class MethodNotAllowed(ApiError):
    status_code = 405
    type = "invalid_request_error"


class PayloadTooLarge(ApiError):
    status_code = 413
    type = "invalid_request_error"


class RangeNotSatisfiable(ApiError):
    status_code = 416
    type = "invalid_request_error"

    def __init__(self, message: str, size_bytes: int, about: dict[str, str]) -> None:
        """`about`: headers that a range inside would have got."""
        super().__init__(message)
        self._headers = {**about, "Content-Range": f"bytes */{size_bytes}"}

    @property
    def headers(self) -> dict[str, str]:
        return self._headers


class QuotaReached(ApiError):
    """There is room again after a while; what never has room is another error."""

    status_code = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int, *, code: str) -> None:
        super().__init__(message, code=code)
        self._retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        # The client's own retry of a create would look like one whose answer was lost.
        own = {} if self.code == "rate_limit_exceeded" else {"x-should-retry": "false"}
        return {"Retry-After": str(self._retry_after_s), **own}


class Unavailable(ApiError):
    status_code = 503

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "2"}
