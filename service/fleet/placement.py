"""Chooses the machines for an engine, so that large engines find room too. Machines are known by id."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


def most_engines(machines: Mapping[str, int], gpus: int, nodes: int) -> int:
    """Return how many engines with `gpus` on each of `nodes` machines fit on these, if they have nothing else."""
    slots = [each // gpus for each in machines.values()]
    engines = sum(slots) // nodes
    while engines and sum(min(each, engines) for each in slots) < engines * nodes:
        engines -= 1
    return engines


def place(free: Mapping[str, int], gpus: int, nodes: int) -> list[str] | None:
    """Return the machines for an engine, those that have the fewest free GPUs left then; None if there is no room."""
    fit = sorted((left, machine) for machine, left in free.items() if left >= gpus)
    return [machine for _, machine in fit[:nodes]] if len(fit) >= nodes else None


class Room(NamedTuple):
    """Says which machines an engine can have once these engines are gone."""

    machines: list[str]
    engines: list[str]


def make_room(
    free: Mapping[str, int], movable: Mapping[str, Sequence[tuple[int, str]]], gpus: int, nodes: int
) -> Room | None:
    """Choose what to take away so that an engine has room, on the machines where that is least; None if none suffices.

    `movable`: by machine, the GPUs and the id of each engine that may go.
    """
    choices: list[tuple[int, str, list[tuple[int, str]]]] = []
    for machine, left in free.items():
        has, taken = left, list[tuple[int, str]]()
        for size, engine in sorted(movable.get(machine, ())):
            if has < gpus:
                has += size
                taken.append((size, engine))
        if has >= gpus:
            for each in list(taken):  # the last one may have made some before it needless
                if has - each[0] >= gpus:
                    has -= each[0]
                    taken.remove(each)
            choices.append((has - left, machine, taken))
    best = sorted(choices)[:nodes]
    if len(best) < nodes:
        return None
    return Room([machine for _, machine, _ in best], [engine for _, _, taken in best for _, engine in taken])
