"""Bounds the bytes of online requests, and of whole answers that nobody reads, in a process of the API."""

from collections import Counter

from service.errors import Unavailable

SMALL_BYTES = 64 * 1024  # up to which a body is never refused for those of others
MOST_BYTES = 512 * 1024 * 1024
SHARE = 2  # one project may have this fraction, 1 / SHARE, of MOST_BYTES


class BodyBytes:
    """Counts the bytes of large bodies, by project, until their answers begin, and of large answers until their end."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most = most_bytes
        self._of: Counter[str] = Counter()

    def body(self, project_id: str) -> "CountedBody":
        """Return the count of a body that will come."""
        return CountedBody(self, project_id)

    def move(self, project_id: str, more: int) -> None:
        """Count bytes that come, or go if `more` is below 0. Raises Unavailable for more than may come now."""
        is_full = self._of[project_id] + more > self._most // SHARE or self._of.total() + more > self._most
        if more > 0 and is_full:
            message = "The service holds as many large requests as it can. Try again when some are answered."
            raise Unavailable(message, code="overloaded")
        self._of[project_id] += more
        if not self._of[project_id]:
            del self._of[project_id]


class CountedBody:
    """Counts the bytes of one body while it comes, then those of its answer."""

    def __init__(self, body_bytes: BodyBytes, project_id: str) -> None:
        self._all = body_bytes
        self._project_id = project_id
        self._come = self._counted = 0

    def add(self, more: int) -> None:
        """Count a piece. Raises Unavailable if there is no room for it."""
        self._come += more
        if self._come > SMALL_BYTES:
            self._all.move(self._project_id, self._come - self._counted)
            self._counted = self._come

    def let_go(self) -> None:
        """Count the body no more; a second call changes nothing."""
        self._all.move(self._project_id, -self._counted)
        self._come = self._counted = 0
