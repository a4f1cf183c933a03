"""Holds requests back whose prefix is just being computed for another one, so that it is computed once."""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_ext.plan.tree import common_prefix
from engine_ext.scan.members import Member
from engine_ext.scan.tuning import TWIN_TOKENS


@dataclass(slots=True)
class Twins:
    """The admitted requests whose prompts are not yet in the cache, and the one that each end admitted last."""

    _computing: list[Member] = field(default_factory=list[Member])
    _from_before: list[Member] = field(default_factory=list[Member])  # those admitted in earlier steps
    _latest: "list[Member | None]" = field(default_factory=lambda: [None, None])

    def step_begins(self) -> None:
        self._computing = [each for each in self._computing if each.runs and not each.stored]
        self._from_before = list(self._computing)

    def has_to_wait(self, member: Member, side: int, cached: Callable[[int], int]) -> bool:
        """Return whether the request had better wait until a prefix is in the cache.

        `cached`: returns how many prompt tokens of the request with this key are in the cache.
        """
        latest = self._latest[side]
        member.ready = common_prefix(latest.prompt, member.prompt) if latest else 0
        if latest is not None and latest.runs and not latest.stored and member.ready > latest.ready + TWIN_TOKENS:
            shared, member.ready = member.ready, cached(member.key)
            if shared > member.ready + TWIN_TOKENS:
                return True
        unfinished = max((common_prefix(each.prompt, member.prompt) for each in self._from_before), default=0)
        return unfinished > TWIN_TOKENS and unfinished > cached(member.key) + TWIN_TOKENS

    def admit(self, member: Member, side: int) -> None:
        self._computing.append(member)
        member.before, self._latest[side] = self._latest[side], member

    def put_back(self, member: Member) -> None:
        """Note that the engine did not take a request that was just admitted."""
        if member in self._latest:
            self._latest[self._latest.index(member)] = member.before
