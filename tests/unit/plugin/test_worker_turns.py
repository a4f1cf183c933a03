"""Projects take turns in front of what few may use at once."""

import asyncio

from engine_ext.plugin.worker.turns import Turns

LONG = 100


class Lists:
    """Requests that stay inside until they are let out."""

    def __init__(self, most: int) -> None:
        self.turns, self.inside = Turns(most), list[str]()
        self.tasks = dict[str, asyncio.Task[None]]()
        self._out = dict[str, asyncio.Event]()

    async def come(self, name: str, project: str, answers: int = LONG) -> None:
        self._out[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, project, answers))
        await settle()

    async def _stay(self, name: str, project: str, answers: int) -> None:
        async with self.turns.turn(project, answers):
            self.inside.append(name)
            await self._out[name].wait()
            self.inside.remove(name)

    async def leave(self, name: str) -> None:
        self._out[name].set()
        await settle()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_projects_take_turns_in_front_of_the_engine() -> None:
    lists = Lists(2 * LONG)
    for name in ("a1", "a2", "a3", "a4", "b1"):
        await lists.come(name, name[0])
    assert lists.inside == ["a1", "a2"]
    await lists.leave("a1")
    await lists.leave("a2")
    assert lists.inside == ["a3", "b1"], "one of each"


async def test_a_list_larger_than_all_room_runs_alone() -> None:
    lists = Lists(LONG)
    await lists.come("large", "a", 5 * LONG)
    await lists.come("next", "b")
    assert lists.inside == ["large"]
    await lists.leave("large")
    assert lists.inside == ["next"]


async def test_who_leaves_while_it_waits_holds_nobody_up() -> None:
    lists = Lists(LONG)
    for name in ("a1", "a2", "b1"):
        await lists.come(name, name[0])
    lists.tasks["a2"].cancel()
    await settle()
    await lists.leave("a1")
    assert lists.inside == ["b1"]
    lists.tasks["b1"].cancel()
    await settle()
    await lists.come("c1", "c")
    assert "c1" in lists.inside
