"""Bounds what a process of the API holds for its clients: online requests, answers that nobody reads, and transfers."""

import math
from collections import Counter
from collections.abc import AsyncIterator, Generator
from contextlib import contextmanager

from service.errors import QuotaReached, Unavailable
from service.objects.storage import PART_BYTES

SMALL_BYTES = 64 * 1024  # up to which a body is never refused for those of others
MOST_BYTES = 512 * 1024 * 1024
DOWNLOAD_BYTES = 256 * 1024  # that a download holds: pieces here and in the connection, and what the store reads ahead
UPLOAD_BYTES = PART_BYTES  # that an upload holds: what comes is written in parts
SHARE = 2  # one project may have this fraction, 1 / SHARE, of MOST_BYTES


class BodyBytes:
    """Counts bytes by project: of large bodies until their answers begin, of answers and transfers until their end."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._of: Counter[str] = Counter()
        self._uploads: Counter[str] = Counter()  # what those that come have written

    def body(self, project_id: str, most: float = math.inf) -> "CountedBody":
        """Return the count of a body that will come, of which at most `most` bytes are held at once."""
        return CountedBody(self, project_id, most)

    @contextmanager
    def upload(self, project_id: str, room: int | None = None) -> Generator["CountedBody", None, None]:
        """Count an upload as it comes, up to UPLOAD_BYTES.

        All that come at once may have `room` bytes of the project's quota together; None is any number.
        """
        counted = CountedBody(self, project_id, UPLOAD_BYTES, room)
        try:
            yield counted
        finally:
            counted.let_go()

    @contextmanager
    def download(self, project_id: str) -> Generator[None, None, None]:
        """Count a download. Raises Unavailable."""
        self.move(project_id, DOWNLOAD_BYTES)
        try:
            yield
        finally:
            self.move(project_id, -DOWNLOAD_BYTES)

    def upload_more(self, project_id: str, more: int, room: int | None) -> None:
        """Count bytes that uploads have written, or the end of some if `more` is below 0. Raises QuotaReached."""
        self._uploads[project_id] += more
        if not self._uploads[project_id]:
            del self._uploads[project_id]
        if room is not None and more > 0 and self._uploads[project_id] > room:
            message = f"The project's uploads that come now take more than the {room} bytes that are left of its quota."
            raise QuotaReached(f"{message} Send one after the other, or delete files.", 60, code="bytes_quota")

    def move(self, project_id: str, more: int) -> None:
        """Count bytes that come, or go if `more` is below 0. Raises Unavailable for more than may come now."""
        is_full = self._of[project_id] + more > self._most // SHARE or self._of.total() + more > self._most
        if more > 0 and is_full:
            message = (
                "The service holds as many large requests and transfers as it can. Try again when some have ended."
            )
            raise Unavailable(message, code="overloaded")
        self._of[project_id] += more
        if not self._of[project_id]:
            del self._of[project_id]


class CountedBody:
    """Counts the bytes of one body while it comes, then those of its answer."""

    def __init__(self, body_bytes: BodyBytes, project_id: str, most: float, room: int | None = None) -> None:
        self._all = body_bytes
        self._project_id = project_id
        self._most = most
        self._room = room
        self._come = self._counted = self._written = 0

    def add(self, more: int) -> None:
        """Count a piece. Raises Unavailable if there is no room for it."""
        self._come = int(min(self._come + more, self._most))
        if self._come > SMALL_BYTES and self._come > self._counted:
            self._all.move(self._project_id, self._come - self._counted)
            self._counted = self._come

    async def stream(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield pieces, and count them."""
        async for piece in pieces:
            self.add(len(piece))
            yield piece

    def wrote(self, more: int) -> None:
        """Count what an upload has written. Raises QuotaReached if it and the project's others have no room for it."""
        self._written += more
        self._all.upload_more(self._project_id, more, self._room)

    def let_go(self) -> None:
        """Count the body no more; a second call changes nothing."""
        self._all.move(self._project_id, -self._counted)
        self._all.upload_more(self._project_id, -self._written, None)
        self._come = self._counted = self._written = 0
