"""What a request says about the length of its answer, which the planner takes into account."""

from dataclasses import dataclass
from typing import Any

from service.endpoints import BY_PATH

MOST_TOKENS = (1 << 31) - 1
EXACT = 1 << 31


@dataclass(frozen=True, slots=True)
class AskedOutput:
    """`most`: tokens that the answer cannot exceed, 0 when the request does not say; `exact`: it has just so many."""

    most: int
    exact: bool

    @property
    def packed(self) -> int:
        """As 32 bits of a record."""
        return self.most | (EXACT if self.exact else 0)


def asked_output(endpoint: str, body: dict[str, Any]) -> AskedOutput:
    """Read from a body that the engine has yet to check; what makes no sense says nothing."""
    if endpoint in BY_PATH and not BY_PATH[endpoint].generates:
        return AskedOutput(1, True)  # planned as the one step that it takes
    given = (body.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"))
    most = next((value for value in given if isinstance(value, int) and not isinstance(value, bool) and value > 0), 0)
    most = min(most, MOST_TOKENS)
    exact = most > 0 and (body.get("ignore_eos") is True or body.get("min_tokens") == most or most == 1)
    return AskedOutput(most, exact)
