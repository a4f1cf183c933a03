"""How a request that kills its engine is found: each death halves what is tried, each success doubles it."""

import asyncio
import itertools
from typing import Any

import pytest

from engine_ext.plugin.marks import NO_TERMS, Terms
from engine_ext.plugin.worker.answers import Answer
from service.queue.leases import Lease, Leases
from service.worker.feed import Feed
from service.worker.slice_run import SliceRun
from tests.integration.harness import Harness, ScriptedEngine, jsonl, line
from tests.waiting import kill

pytestmark = pytest.mark.dialects

SIZE = 8


class MortalEngine(ScriptedEngine):
    """Says when it would die; from then on it answers nothing."""

    killers: frozenset[str] = frozenset()

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, kind: str, terms: Terms = NO_TERMS) -> Answer:
        if body["messages"][-1]["content"] in self.killers:
            assert self.hold is not None
            self.hold.set()
        if self.hold is not None and self.hold.is_set():
            await asyncio.Event().wait()
        return await super().run(endpoint, body, rid, kind, terms)


async def one_life(harness: Harness, leases: Leases, killers: frozenset[str]) -> tuple[list[int], bool]:
    """Run the slice until the engine dies of it or it is done: sizes of its trials, and whether it is done."""
    dead = asyncio.Event()
    engine = MortalEngine(hold=dead, hold_after=10**6)
    engine.killers = killers
    sizes = list[int]()
    lease = await leases.claim(1)
    assert lease is not None

    async def no_progress(*_: Any) -> None: ...

    class Noted(Leases):
        async def begin_trial(self, lease: Lease, size: int, place: int) -> bool:
            sizes.append(size)
            return await super().begin_trial(lease, size, place)

    noted = Noted(harness.database, "w", "test-model", harness.settings.lease_s)
    parts = (harness.database, harness.storage, engine, harness.settings, harness.clock, no_progress, noted, Feed())
    run = SliceRun(lease, *parts)
    task, died = asyncio.create_task(run.run()), asyncio.create_task(dead.wait())
    await asyncio.wait([task, died], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        died.cancel()
        assert await leases.finish(lease, run.counts, run.segments)
        return sizes, True
    await asyncio.sleep(0.05)  # what is answered is written; then the process ends
    await kill(task)
    assert await harness.expire_leases() == 1
    return sizes, False


async def test_a_killer_is_found_by_halving_and_the_rest_is_answered(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(SIZE)))
    await harness.plan()
    leases = Leases(harness.database, "w", "test-model", harness.settings.lease_s)
    lives = list[list[int]]()
    done = False
    while not done:
        sizes, done = await one_life(harness, leases, frozenset({"request 5"}))
        lives.append(sizes)
        assert len(lives) < 20
    assert lives[:2] == [[], []]  # two deaths may be chance
    assert len(lives[2]) == 1  # then all that is left of it is tried, alone
    assert all(sizes[0] <= max(before[-1] // 2, 1) for before, sizes in itertools.pairwise(lives[2:-1]))
    assert [sizes[-1] for sizes in lives[-3:-1]] == [1, 1]  # alone in the engine at two deaths
    [batch] = await harness.until_ended(batch_id)
    output, errors = await harness.results(batch)
    assert set(errors) == {"id-5"}
    assert "died" in errors["id-5"]["error"]["message"]
    assert len(output) == SIZE - 1


async def test_two_killers_side_by_side_are_both_found(harness: Harness) -> None:
    """The line of the first must be kept before the second kills the process."""
    harness.settings = harness.settings.model_copy(update={"flush_s": 30.0})
    batch_id = await harness.submit(jsonl(line(n) for n in range(4)))
    await harness.plan()
    leases = Leases(harness.database, "w", "test-model", harness.settings.lease_s)
    lives = 1
    while not (await one_life(harness, leases, frozenset({"request 0", "request 1", "request 2", "request 3"})))[1]:
        lives += 1
        assert lives < 40
    [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[1]) == 4


async def test_a_slice_that_only_waited_is_not_blamed(harness: Harness) -> None:
    await harness.submit(jsonl(line(n) for n in range(SIZE)))
    await harness.plan()
    leases = Leases(harness.database, "w", "test-model", harness.settings.lease_s)

    async def die(begins: bool) -> Lease:
        lease = await leases.claim(1)
        assert lease is not None
        if begins:
            assert await leases.begin_trial(lease, 1, 0)
        await harness.expire_leases()
        return lease

    for begins in (False, False, True, False, False):
        await die(begins)
    last = await die(False)
    assert last.trial is not None
    assert (last.trial.size, last.trial.alone_deaths) == (1, 1)


async def test_deaths_that_no_request_causes_cost_nobody_an_answer(harness: Harness) -> None:
    batch_id = await harness.submit(jsonl(line(n) for n in range(SIZE)))
    await harness.plan()
    leases = Leases(harness.database, "w", "test-model", harness.settings.lease_s)
    for _ in range(3):
        assert await leases.claim(1)
        assert await harness.expire_leases() == 1
    assert await one_life(harness, leases, frozenset()) == ([SIZE], True)
    [batch] = await harness.until_ended(batch_id)
    assert len((await harness.results(batch))[0]) == SIZE
