"""The objects of the API as far as the remote commands read them; `raw` is what the service said."""

from typing import Any, Self

import msgspec

from batchweave.remote.client import shaped


class Told(msgspec.Struct, kw_only=True):
    """An object as the service described it. `raw` is no field of it; its name here is one that no service uses."""

    raw: dict[str, Any] = msgspec.field(default_factory=dict[str, Any], name="-")

    @classmethod
    def of(cls, told: Any) -> Self:
        """Return what the service described. Raises NotAService."""
        found = shaped(told, cls)
        found.raw = told
        return found


class Model(Told, kw_only=True):
    id: str
    created: int


class RequestCounts(msgspec.Struct):
    total: int
    completed: int
    failed: int

    @property
    def not_run(self) -> int:
        """Return how many requests of a batch that has ended got no answer."""
        return self.total - self.completed - self.failed


class InputDetails(msgspec.Struct):
    cached_tokens: int = 0


class Usage(msgspec.Struct):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails = msgspec.field(default_factory=InputDetails)


class FileError(msgspec.Struct):
    """An error of an input file: of its line `line`, or of the whole file."""

    code: str | None = None
    message: str | None = None
    line: int | None = None


class FileErrors(msgspec.Struct):
    data: list[FileError] | None = None


class Batch(Told, kw_only=True):
    """A batch; times are in Unix seconds. `batchweave`: what it has beyond OpenAI's fields; None at another service."""

    id: str
    status: str
    endpoint: str
    input_file_id: str
    created_at: int
    model: str | None = None
    errors: FileErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    expires_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts | None = None
    usage: Usage | None = None
    metadata: dict[str, str] | None = None
    batchweave: dict[str, Any] | None = None


class File(Told, kw_only=True):
    """A file; `created_at` is in Unix seconds."""

    id: str
    purpose: str
    bytes: int
    created_at: int
    filename: str
