"""Holds the requests of an engine that wait or run, by their keys and by numbers that plans use."""

from dataclasses import dataclass, field

from engine_ext.plan.prompts import TokenIds


@dataclass(slots=True, eq=False)
class Member:
    """A request that waits or runs.

    `number`: its index in columns of all requests of which anything is known. `from_plan`: the first plan that has it.
    `tokens`: output tokens when it was retracted. `refused`: how often the engine did not take it.
    """

    key: int
    number: int
    prompt: TokenIds
    known: int
    from_plan: int = 0
    tokens: int = 0
    runs: bool = False
    stored: bool = False
    ready: int = 0  # prompt tokens that were in the cache at its admission, as far as is known
    before: "Member | None" = None  # the request that its end admitted before it
    refused: int = 0


@dataclass(slots=True)
class Members:
    """The requests of an engine.

    Numbers are small, because columns are indexed by them. One is given again only when a plan is followed that was
    begun after it was freed: until then, the plan in use or the one that is being made may still have it.
    """

    _by_key: dict[int, Member] = field(default_factory=dict[int, Member])
    _by_number: "list[Member | None]" = field(default_factory=list["Member | None"])
    _free: list[int] = field(default_factory=list[int])
    _before_plan: list[int] = field(default_factory=list[int])  # freed before the last plan was begun
    _since: list[int] = field(default_factory=list[int])  # freed since

    def __len__(self) -> int:
        return len(self._by_key)

    def __getitem__(self, key: int) -> Member:
        return self._by_key[key]

    def at(self, number: int) -> Member | None:
        """Return the request with this number; None if it neither waits nor runs any more."""
        return self._by_number[number]

    def add(self, key: int, prompt: TokenIds, known: int) -> Member:
        if self._free:
            number = self._free.pop()
        else:
            number = len(self._by_number)
            self._by_number.append(None)
        member = self._by_key[key] = self._by_number[number] = Member(key, number, prompt, known)
        return member

    def remove(self, key: int) -> Member:
        """Remove a request, which waits and runs no more; its number stays taken until it is freed."""
        member = self._by_key.pop(key)
        member.runs = False
        self._by_number[member.number] = None
        return member

    def free(self, number: int) -> None:
        self._since.append(number)

    def plan_begins(self) -> None:
        self._before_plan, self._since = self._since, []

    def plan_is_followed(self) -> None:
        self._free += self._before_plan
        self._before_plan = []
