"""Reads what a request says about the length of its answer, for the planner, or lets it say another."""

from dataclasses import dataclass
from typing import Any

from service.endpoints import BY_PATH

MOST_TOKENS = (1 << 31) - 1
EXACT = 1 << 31
COMPLETION = 16  # tokens of a completion whose request does not say, in OpenAI's API and SGLang's
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # the first one counts


@dataclass(frozen=True, slots=True)
class AskedOutput:
    """The answer length that a request asks for.

    `most`: the most tokens that the answer can have, 0 if the request does not say; `exact`: it has exactly that many.
    """

    most: int
    exact: bool

    @property
    def packed(self) -> int:
        """Return it packed into 32 bits, as an index record holds it."""
        return self.most | (EXACT if self.exact else 0)


def asked_output(endpoint: str, body: dict[str, Any]) -> AskedOutput:
    """Read the answer length from a body that the engine has not checked yet. Invalid values are ignored."""
    if endpoint in BY_PATH and not BY_PATH[endpoint].generates:
        return AskedOutput(1, True)  # planned as the one step that it takes
    most = next((most for name in LIMITS if (most := _whole(body.get(name))) > 0), 0)
    most = min(most, MOST_TOKENS)
    exact = most > 0 and (body.get("ignore_eos") is True or body.get("min_tokens") == most or most == 1)
    return AskedOutput(most, exact)


def with_limit(endpoint: str, body: dict[str, Any], most: int | None, more: int = 0) -> dict[str, Any]:
    """Return the body with this limit in place of its own, which None leaves as it is, raised by `more` tokens."""
    limit = BY_PATH[endpoint].limit
    if more and most is None:
        most = asked_output(endpoint, body).most or (COMPLETION if endpoint == "/v1/completions" else None)
    if not most or limit is None:
        return body
    most = min(most + more, MOST_TOKENS)
    return {name: value for name, value in body.items() if name not in LIMITS} | {limit: most}


def _whole(value: Any) -> int:
    """Return a limit as a whole number, also if it is written as 100.0; 0 for any other value."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0
