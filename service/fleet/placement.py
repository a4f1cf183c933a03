"""Chooses the machines for an engine, so that large engines find room too. Machines are known by id."""

from collections.abc import Mapping, Sequence


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


def make_room(
    free: Mapping[str, int], movable: Mapping[str, Sequence[tuple[int, str]]], gpus: int, nodes: int
) -> list[str] | None:
    """Return the engines to take away so that an engine has room, with as few GPUs as possible; None if none suffice.

    `movable`: by machine, the GPUs and the id of each engine that may go.
    """
    costs: list[tuple[int, str, list[str]]] = []
    for machine, left in free.items():
        has, taken = left, list[str]()
        for size, engine in sorted(movable.get(machine, ())):
            if has >= gpus:
                break
            has += size
            taken.append(engine)
        if has >= gpus:
            costs.append((has - left, machine, taken))
    if len(costs) < nodes:
        return None
    return [engine for _, _, taken in sorted(costs)[:nodes] for engine in taken]
