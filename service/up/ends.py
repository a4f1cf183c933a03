"""What `up` says and notes of a part that has ended by itself."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import redis
import structlog

from service.queue.progress import note_exit
from service.settings import Settings
from service.up.last_words import how, last_words
from service.up.part import Part
from service.up.worker_rows import free_slices, is_drained

MOST_UNNOTED, NOTE_AGAIN_S = 100, 5.0  # deaths that wait for Redis, and how long it is then left alone
log = structlog.get_logger()


def clock() -> str:
    return time.strftime("%H:%M:%S")


@dataclass(slots=True)
class Ends:
    """Says how parts end, counts their deaths, and notes them where the dashboard finds them."""

    settings: Settings
    say: Callable[[str], None]
    _unnoted: list[tuple[Part, str, float]] = field(default_factory=list[tuple[Part, str, float]])  # deaths
    _note_at: float = 0.0

    def note(self, part: Part, code: int) -> None:
        """Say that a part has ended by itself, and count it as a death if nobody asked it to."""
        if part.worker is not None:
            if code == 0 and part.begun:
                part.is_stopped, part.exits = True, 0
                again = f"`batchweave workers resume {part.worker}` starts it" if self.is_held(part) else "it starts"
                self.say(f"{clock()} {part.name} has stopped; {again} again")
                return
            free_slices(self.settings.database, part.worker)
        words = last_words(part.log_path, part.log_from)
        if code == -signal.SIGKILL and not words:
            words = "by somebody, or by the kernel for lack of memory (dmesg says so)"
        ended = ": ".join(filter(None, (how(code), words)))
        part.exits = 1 if part.begun else part.exits + 1
        if part.begun:
            part.alike = 0
        else:
            part.alike = part.alike + 1 if ended == part.ended else 1
        part.ended, part.died_at = ended, time.time()
        self.say(f"{clock()} {part.name} died, {ended}; it is started again; log: {part.log_path}")
        self._unnoted = [*self._unnoted, (part, ended, part.died_at)][-MOST_UNNOTED:]
        self.write_down()

    def is_held(self, part: Part) -> bool:
        """Return whether a part stays stopped: a worker that was drained and then stopped, as for work on its GPU."""
        return part.is_stopped and is_drained(self.settings.database, part.worker or "") is not False

    def write_down(self) -> None:
        """Note the deaths that are not yet noted: Redis may be what died."""
        while self._unnoted and time.monotonic() >= self._note_at:
            part, ended, at = self._unnoted[0]
            is_gone = part.worker is not None and not part.running
            try:
                with redis.Redis.from_url(self.settings.redis, socket_connect_timeout=1, socket_timeout=1) as client:
                    note_exit(client, part.worker or part.name, ended, time.time() - at, is_gone)
            except (redis.RedisError, OSError) as error:
                log.warning("death not noted yet", part=part.name, error=repr(error))
                self._note_at = time.monotonic() + NOTE_AGAIN_S
                return
            self._unnoted = self._unnoted[1:]
