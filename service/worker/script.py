"""What a scripted engine answers: rules, read from a file."""

from collections import Counter
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from service.errors import StartError

MOST_BYTES = 1024 * 1024
MOST_COUNTED = 100_000  # prompts whose attempts are counted for one rule

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Status = Annotated[int, msgspec.Meta(ge=200, le=599)]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are answered whose prompt fits."""

    # The last message, the prompt or the input, where * stands for any text.
    prompt: str = "*"
    # The text of the answer, in which {prompt} and {model} are replaced.
    answer: str = "{prompt}"
    # Until the answer is whole; a stream sends its words evenly over this time.
    delay_s: Seconds = 0.0
    # From 400 on, the answer is an error of this status.
    status: Status = 200
    # None: `length` if max_tokens cuts the answer off, a word being a token, else `stop`.
    finish_reason: Literal["stop", "length", "content_filter"] | None = None
    # The rule is for the first so many attempts at each such prompt alone; None: for all.
    times: Annotated[int, msgspec.Meta(ge=1)] | None = None
    # hang: no answer comes until the request is aborted. die: the worker is killed.
    fault: Literal["hang", "die"] | None = None


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The rules of a scripted engine: of those that fit a prompt, the first counts. None fitting, it is echoed."""

    rules: tuple[Rule, ...] = ()
    # How many requests run at once; the others wait.
    at_once: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    # The most tokens that a prompt and its answer may have together, by the model's tokenizer.
    context_length: Annotated[int, msgspec.Meta(ge=1)] = 131_072

    @cached_property
    def _attempts(self) -> list[Counter[str]]:
        return [Counter() for _ in self.rules]

    def rule_for(self, prompt: str) -> Rule:
        """Return the rule for the next attempt at a prompt, and count the attempt."""
        for rule, attempts in zip(self.rules, self._attempts, strict=True):
            if not fnmatchcase(prompt, rule.prompt):
                continue
            if rule.times is None:
                return rule
            if attempts[prompt] < rule.times and len(attempts) < MOST_COUNTED:
                attempts[prompt] += 1
                return rule
        return ECHO


ECHO = Rule()


def read_script(path: Path | None) -> Script:
    """Read a script, or return that which echoes. Raises StartError, which names the file and the field."""
    if path is None:
        return Script()
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise StartError(f"BATCHWEAVE_SCRIPT {path}: more than {MOST_BYTES} bytes")
        return msgspec.json.decode(raw, type=Script)
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise StartError(f"BATCHWEAVE_SCRIPT {path}: {error}") from error
