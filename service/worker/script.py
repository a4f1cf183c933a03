"""What a scripted engine answers: rules, read from a file."""

from collections import Counter
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from service.errors import StartError

MOST_BYTES = 1024 * 1024
MOST_COUNTED = 100_000  # prompts whose attempts are counted for one rule

Seconds = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Status = Annotated[int, msgspec.Meta(ge=200, le=599)]


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rule says how to answer the requests whose prompt matches."""

    # The last message, the prompt or the input, where * stands for any text.
    prompt: str = "*"
    # The text of the answer, in which {prompt} and {model} are replaced.
    answer: str = "{prompt}"
    # Until the answer is whole; a stream sends its words evenly over this time.
    delay_s: Seconds = 0.0
    # 200, or the status of an error, from 400 on.
    status: Status = 200
    # None: `length` if max_tokens cuts the answer off, a word being a token, else `stop`.
    finish_reason: Literal["stop", "length", "content_filter"] | None = None
    # The rule is for the first so many attempts at each such prompt, as a worker counts them from its start; None: for
    # all.
    times: Annotated[int, msgspec.Meta(ge=1)] | None = None
    # hang: no answer comes until the request is aborted. die: the worker is killed.
    fault: Literal["hang", "die"] | None = None


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules of a scripted engine: the first that matches a prompt decides; without one the prompt is echoed."""

    rules: tuple[Rule, ...] = ()
    # How many requests run at once; the others wait.
    at_once: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    # The most tokens of a batch's prompt, by the model's tokenizer; online requests are not counted.
    context_length: Annotated[int, msgspec.Meta(ge=1)] = 131_072


class Rules:
    """The rules of a script, and the attempts that each has answered."""

    def __init__(self, script: Script) -> None:
        self._rules = [(rule, Counter[str]()) for rule in script.rules]

    def rule_for(self, prompt: str) -> Rule:
        """Return the rule for the next attempt at a prompt, and count the attempt."""
        for rule, attempts in self._rules:
            if not matches(rule.prompt, prompt):
                continue
            if rule.times is None:
                return rule
            if attempts[prompt] < rule.times and (prompt in attempts or len(attempts) < MOST_COUNTED):
                attempts[prompt] += 1
                return rule
        return ECHO


ECHO = Rule()


def matches(pattern: str, text: str) -> bool:
    """Return whether a text is the pattern, in which * stands for any text. It takes time linear in the text."""
    if "*" not in pattern:
        return text == pattern
    first, *middle, last = pattern.split("*")
    if len(text) < len(first) + len(last) or not (text.startswith(first) and text.endswith(last)):
        return False
    at, end = len(first), len(text) - len(last)
    for part in middle:
        at = text.find(part, at, end)
        if at < 0:
            return False
        at += len(part)
    return True


def _check(script: Script) -> None:
    """Raises ValueError for what msgspec cannot see."""
    for number, rule in enumerate(script.rules):
        if 200 < rule.status < 400:
            raise ValueError(f"$.rules[{number}].status is {rule.status}: say 200, or an error from 400 on")
        if rule.fault == "die" and rule.times is not None:
            raise ValueError(f"$.rules[{number}] has times and the fault die: a worker that died has counted nothing")


def read_script(path: Path | None) -> Script:
    """Read a script, or return that which echoes. Raises StartError, which names the file and the field."""
    if path is None:
        return Script()
    if path.exists() and not path.is_file():
        raise StartError(f"BATCHWEAVE_SCRIPT {path} is not a file; each start of a worker reads it again")
    try:
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            raise StartError(f"BATCHWEAVE_SCRIPT {path}: more than {MOST_BYTES} bytes")
        script = msgspec.json.decode(raw, type=Script)
        _check(script)
        return script
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        raise StartError(f"BATCHWEAVE_SCRIPT {path}: {error}") from error
