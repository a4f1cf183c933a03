"""Reads multipart/form-data as it arrives: passes the file's bytes on at once, and limits the size of all else."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, parse_options_header

from service.errors import BadRequest, PayloadTooLarge

MAX_FIELD_BYTES = 4 * 1024  # for each field that is not the file
MAX_HEADER_BYTES = 8 * 1024
MAX_PARTS = 16
MAX_NAME = 100  # characters of a name that an error repeats


@dataclass(slots=True)
class Form:
    fields: dict[str, str] = field(default_factory=dict[str, str])
    filename: str | None = None
    size_bytes: int = 0


def form_body(required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    """Return a form's description for openapi.yaml, for a route that reads its stream itself."""
    schema = {"type": "object", "required": required, "properties": properties}
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}


class FormReader:
    """Feeds a form's bytes through the parser; the part named `field` streams to `sink`. `fields`: those beside it."""

    def __init__(
        self, content_type: str, max_file_bytes: int, field: str = "file", fields: Collection[str] = ()
    ) -> None:
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise BadRequest(f"Send the data as multipart/form-data, in a part named '{field}'.")
        self.form = Form()
        self._field = field
        self._fields = fields
        self._max_file_bytes = max_file_bytes
        self._header: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        self._disposition = b""
        self._name: str | None = None
        self._is_file = False
        self._value = bytearray()
        self._parts = 0
        self._finished = False
        self._file_data: list[bytes] = []
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._part_begin,
                "on_header_field": lambda data, start, end: self._add_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_header(1, data[start:end]),
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._part_data,
                "on_part_end": self._part_end,
                "on_end": self._end,
            },
        )

    async def read(self, chunks: AsyncIterator[bytes], sink: Callable[[bytes], Awaitable[object]]) -> Form:
        """Read the form to its end. Raises BadRequest if it is malformed, PayloadTooLarge if its file is too large."""
        try:
            async for chunk in chunks:
                self._parser.write(chunk)
                for data in self._file_data:
                    await sink(data)
                self._file_data.clear()
        except MultipartParseError as error:
            raise BadRequest(f"The multipart body is malformed: {error}.") from error
        if not self._finished:
            raise BadRequest("The multipart body ends before its closing boundary.")
        return self.form

    def _part_begin(self) -> None:
        self._parts += 1
        if self._parts > MAX_PARTS:
            raise BadRequest(f"The form has more than {MAX_PARTS} parts.")
        self._disposition, self._name, self._is_file = b"", None, False
        self._value.clear()

    def _add_header(self, side: int, data: bytes) -> None:
        self._header[side].extend(data)
        if len(self._header[side]) > MAX_HEADER_BYTES:
            raise BadRequest("A header of a part is too long.")

    def _header_end(self) -> None:
        name, value = self._header
        if bytes(name).lower() == b"content-disposition":
            self._disposition = bytes(value)
        name.clear()
        value.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._name = options.get(b"name", b"").decode(errors="replace")
        self._is_file = self._name == self._field
        if self._is_file:
            if self.form.filename is not None:
                raise BadRequest(f"The form has two parts named '{self._field}'.", param=self._field)
            self.form.filename = options.get(b"filename", b"").decode(errors="replace") or "upload.jsonl"
        elif self._name not in self._fields:
            name = self._name[:MAX_NAME]
            message = f"Unknown field {name!r}: the fields are {', '.join((*self._fields, self._field))}."
            if b"filename" in options:
                message = f"The file must be in a part named {self._field!r}, not {name!r}."
            raise BadRequest(message, code="unknown_parameter", param=name)
        elif self._name in self.form.fields:
            raise BadRequest(f"The form has the field {self._name!r} twice.", param=self._name)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.form.size_bytes += end - start
            if self.form.size_bytes > self._max_file_bytes:
                message = f"'{self._field}' is larger than {self._max_file_bytes} bytes. Split it."
                raise PayloadTooLarge(message, code="file_too_large", param=self._field)
            self._file_data.append(data[start:end])
            return
        self._value.extend(data[start:end])
        if len(self._value) > MAX_FIELD_BYTES:
            raise BadRequest(f"The field {self._name!r} is too long.", param=self._name)

    def _part_end(self) -> None:
        if self._name and not self._is_file:
            self.form.fields[self._name] = self._value.decode(errors="replace")

    def _end(self) -> None:
        self._finished = True
