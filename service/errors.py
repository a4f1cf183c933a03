"""The error tree of the service. Each message says what is wrong and, where it can, what to do.

BatchweaveError (engine_ext/errors.py)
├── ServiceError               ends a command with one line
│   ├── SettingsError              a setting's value
│   ├── StartError                 the service cannot start
│   ├── WorkloadError              a file cannot be planned
│   ├── CostsError                 the model or the hardware is unknown
│   ├── CalibrationError           the costs cannot be derived from measured steps
│   ├── TenantError                a project or key is unknown, taken or invalid
└── ApiError                   answers an HTTP request; a class is one status and one OpenAI error type
    ├── BadRequest          400    invalid_request_error
    ├── Unauthorized        401    authentication_error
    ├── Forbidden           403    permission_error
    ├── NotFound            404    invalid_request_error
    ├── MethodNotAllowed    405    invalid_request_error
    ├── PayloadTooLarge     413    invalid_request_error
    ├── RangeNotSatisfiable 416    invalid_request_error
    ├── QuotaReached        429    rate_limit_error, with Retry-After
    ├── Unavailable         503    server_error, with Retry-After
    │   └── NotRetried             that clients are told not to retry
    └── StorageFull         507    server_error; clients are told not to retry

Clients retry 408, 409, 429 and 5xx, so a permanent error never uses one of those without `x-should-retry: false`.
Exceptions that never leave their module, such as a job's signal to roll back, stand beside the code that raises them.
"""

from typing import Any

from engine_ext.errors import BatchweaveError


class ServiceError(BatchweaveError):
    """Ends a command with the message as its one line."""


class SettingsError(ServiceError):
    """The service cannot start with a setting's value; the message names the setting."""


class StartError(ServiceError):
    """The service cannot start, or a part of it keeps dying; the message says what to do."""


class WorkloadError(ServiceError):
    """The file cannot be planned; the message names the line and the field."""


class CostsError(ServiceError):
    """The model or the hardware is unknown; the message says what is available."""


class CalibrationError(ServiceError):
    """The costs cannot be derived from the measured steps; the message says what to do."""


class TenantError(ServiceError):
    """A name or id of a project or key is unknown, taken or invalid; the message says which."""


class ApiError(BatchweaveError):
    """Answers the HTTP request with OpenAI's error envelope."""

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
        """Take `about`, the headers that a satisfiable range would have received."""
        super().__init__(message)
        self._headers = {**about, "Content-Range": f"bytes */{size_bytes}"}

    @property
    def headers(self) -> dict[str, str]:
        return self._headers


class QuotaReached(ApiError):
    """Raised when a quota is used up for now; a request that can never fit raises another error."""

    status_code = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after_s: int, *, code: str) -> None:
        super().__init__(message, code=code)
        self._retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        # If a client retried a create by itself, it would look like a retry after a lost response.
        own = {} if self.code == "rate_limit_exceeded" else {"x-should-retry": "false"}
        return {"Retry-After": str(self._retry_after_s), **own}


class StorageFull(ApiError):
    """Raised when the free disk space left is reserved for running batches, deletes and cancels."""

    status_code = 507

    def __init__(self, free_bytes: int, reserve_bytes: int) -> None:
        message = (
            f"The service's disk is nearly full: {free_bytes // 2**20} MiB are free, and {reserve_bytes // 2**20} MiB "
            "are reserved for running batches. Delete files (DELETE /v1/files/{id}), or ask the service's operator "
            "to free up space."
        )
        super().__init__(message, code="insufficient_storage")

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}


class Unavailable(ApiError):
    status_code = 503

    @property
    def headers(self) -> dict[str, str]:
        return {"Retry-After": "2"}


class NotRetried(Unavailable):
    """Raised where a client's own retry would change nothing, or do harm."""

    @property
    def headers(self) -> dict[str, str]:
        return {"x-should-retry": "false"}
