"""Projects take turns online, and leave room for others; needs SGLang's names, but no engine."""

import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine_ext.coserve.limit import NO_LIMITS
from engine_ext.coserve.predictor import Load
from engine_ext.coserve.slo import CLASSES, DEFAULT, FLEX, PRIORITY
from engine_ext.plugin.marks import Terms, marks, online_marks
from engine_ext.plugin.scheduler.beside import Beside
from engine_ext.plugin.scheduler.online import NOBODY
from engine_ext.plugin.scheduler.turns import Turns, chunk_tokens
from service.demo.tiny import NAME
from tests.engine.conftest import running_engine
from tests.engine.dividing import divide
from tests.engine.test_beside import MODEL

SLOTS, CAPACITY = 16, 16_000
RATIO = SimpleNamespace(current=0.5)


class Req:
    def __init__(
        self, project: str, number: int, slo: str = DEFAULT, weight: float = 1.0, tokens: int = 10, answer: int = 10
    ) -> None:
        self.name, self.origin_input_ids, self.output_ids = f"{project}{number}", [1] * tokens, list[int]()
        marked = online_marks(slo, project, weight)
        self.sampling_params = SimpleNamespace(custom_params=marked, max_new_tokens=answer)


def came(turns: Turns, queue: list[Any], *reqs: Req) -> None:
    for req in reqs:
        queue.append(req)
        turns.came(queue)


def scheduler_of(queue: list[Any]) -> Any:
    return SimpleNamespace(
        waiting_queue=queue,
        chunked_req=None,
        max_running_requests=SLOTS,
        new_token_ratio_tracker=RATIO,
    )


def names(reqs: list[Any]) -> list[str]:
    return [req.name for req in reqs]


def test_projects_take_turns_by_weight_in_their_class() -> None:
    turns, queue = Turns(), list[Any]()
    came(
        turns,
        queue,
        *(Req("a", n) for n in range(4)),
        Req("b", 0),
        Req("b", 1),
        *(Req("c", n, weight=2) for n in range(3)),
    )
    assert names(queue) == ["c0", "a0", "b0", "c1", "c2", "a1", "b1", "a2", "a3"]
    came(turns, queue, Req("a", 9, PRIORITY), Req("d", 0, FLEX))
    assert names(queue)[0] == "a9"
    assert names(queue)[-1] == "d0"


def test_a_long_request_has_the_turn_of_many_short_ones() -> None:
    turns, queue = Turns(), list[Any]()
    came(turns, queue, *(Req("a", n, tokens=8000) for n in range(2)), *(Req("b", n, tokens=1000) for n in range(9)))
    assert names(queue) == [*(f"b{n}" for n in range(7)), "a0", "b7", "b8", "a1"]


def test_who_was_idle_has_saved_up_no_turns_and_who_is_retracted_keeps_its_own() -> None:
    turns, queue = Turns(), list[Any]()
    scheduler = scheduler_of(queue)
    came(turns, queue, *(Req("a", n) for n in range(6)))
    before, taken = list(queue), queue[:4]
    scheduler.waiting_queue = queue[4:]
    turns.show(scheduler, before, [])
    came(turns, scheduler.waiting_queue, Req("b", 0), Req("b", 1), Req("b", 2))
    assert names(scheduler.waiting_queue) == ["a4", "b0", "a5", "b1", "b2"]
    came(turns, scheduler.waiting_queue, taken[3])
    assert names(scheduler.waiting_queue)[0] == "a3"


@pytest.mark.parametrize(
    ("several", "batches_wait", "shown"), [(False, False, 20), (True, False, 14), (False, True, 14)]
)
def test_a_project_leaves_slots_to_others_and_all_leave_some_to_batches(
    several: bool, batches_wait: bool, shown: int
) -> None:
    turns, queue = Turns(), list[Any]()
    came(turns, queue, *(Req("a", n) for n in range(20)))
    scheduler = scheduler_of(queue)
    if several:
        turns.came([Req("b", 0)])
    before = list(queue)
    held = turns.hold_back(scheduler, [], CAPACITY, batches_wait)
    assert len(scheduler.waiting_queue) == shown
    assert len(held) == 20 - shown
    scheduler.waiting_queue = scheduler.waiting_queue[3:]
    turns.show(scheduler, before, held)
    assert scheduler.waiting_queue == before[3:]
    decoding: list[Any] = before[:14]
    scheduler.waiting_queue = [Req("a", 30), Req("b", 1)]
    for req in scheduler.waiting_queue:
        req.batchweave_turn = 1.0  # type: ignore[attr-defined]
    held = turns.hold_back(scheduler, decoding, CAPACITY, batches_wait)
    assert (
        names(held) == {(False, False): [], (True, False): ["a30"], (False, True): ["a30", "b1"]}[several, batches_wait]
    )


def test_a_project_leaves_kv_cache_to_others_unless_it_has_nothing_running() -> None:
    turns, queue = Turns(), list[Any]()
    large: dict[str, Any] = {"answer": 4000}
    came(turns, queue, *(Req("a", n, **large) for n in range(9)), Req("a", 9, answer=1), Req("b", 0, answer=100_000))
    scheduler = scheduler_of(queue)
    assert names(turns.hold_back(scheduler, [], CAPACITY, False)) == ["a7", "a8", "a9"]
    assert "b0" in names(scheduler.waiting_queue)


def test_choices_that_share_a_prompt_are_not_held_back_for_it() -> None:
    turns, queue = Turns(), list[Any]()
    came(turns, queue, *(Req("a", n, tokens=10_000) for n in range(10)), Req("b", 0))
    scheduler = scheduler_of(queue)
    assert not turns.hold_back(scheduler, [], CAPACITY, False)


def test_turns_of_classes_are_apart_and_never_go_back() -> None:
    turns, queue = Turns(), list[Any]()
    came(turns, queue, *(Req("a", n, FLEX) for n in range(100)), *(Req("b", n) for n in range(6)), Req("a", 200))
    assert names(queue)[:3] == ["b0", "a200", "b1"]
    scheduler = scheduler_of([each for each in queue if each.name != "b5"])
    turns.show(scheduler, queue, [])
    before = scheduler.waiting_queue
    scheduler.waiting_queue = [each for each in before if each.name != "a0"]
    turns.show(scheduler, before, [])
    came(turns, scheduler.waiting_queue, Req("d", 0))
    assert names(scheduler.waiting_queue).index("d0") == 6


def test_who_comes_while_a_long_prompt_is_computed_is_not_behind_the_rest_of_it() -> None:
    turns, queue = Turns(), list[Any]()
    came(turns, queue, Req("a", 0, tokens=8000), Req("a", 1, tokens=8000))
    before, scheduler = list(queue), scheduler_of(queue[1:])
    scheduler.chunked_req = queue[0]
    scheduler.chunked_req.extend_range = SimpleNamespace(end=2000)
    turns.show(scheduler, before, [])
    queue = scheduler.waiting_queue
    came(turns, queue, *(Req("b", n, tokens=1000) for n in range(9)), Req("c", 0, FLEX))
    turns.note_first(scheduler)
    assert names(scheduler.chunked_req.batchweave_first) == [f"b{n}" for n in range(5)]
    assert names(queue) == [*(f"b{n}" for n in range(9)), "a1", "c0"]


def test_a_long_prompt_leaves_room_to_those_that_fit_and_has_a_page() -> None:
    assert chunk_tokens([], 4096, 1) == 4096
    assert chunk_tokens([10, 20], 4096, 1) == 4066
    assert chunk_tokens([10, 20], 4096, 16) == 4064
    assert chunk_tokens([10, 8000, 20], 4096, 1) == 4086  # SGLang does not cut the second one beside the chunk
    assert chunk_tokens([4000, 95, 1], 4096, 1) == 1
    assert chunk_tokens([4000], 4096, 128) == 4096


def test_decodes_have_their_steps_among_those_of_online_prompts() -> None:
    def batch(*reqs: Req, tokens: int, decoding: list[Any] | None = None) -> Any:
        for req in reqs:
            req.extend_range = SimpleNamespace(length=tokens)  # type: ignore[attr-defined]
        return SimpleNamespace(reqs=reqs, decoding_reqs=decoding)

    turns, online, of_batch = Turns(), Req("a", 0), Req("a", 1)
    of_batch.sampling_params.custom_params = marks("kind", Terms(project="a"))
    running = SimpleNamespace(reqs=[SimpleNamespace(finished=lambda: False)])
    for other in (batch(of_batch, tokens=9000), batch(online, tokens=9000, decoding=[online])):
        turns.note_step(other)
        assert not turns.are_decodes(running)
    for tokens, steps in ((4096, 4), (8, 0), (8, 0), (8, 1), (10**6, 8)):
        turns.note_step(batch(online, tokens=tokens))
        taken = 0
        while turns.are_decodes(running):
            turns.note_step(None)
            taken += 1
        assert taken == steps
    turns.note_step(batch(online, tokens=4096))
    assert not turns.are_decodes(SimpleNamespace(reqs=[SimpleNamespace(finished=lambda: True)]))


def test_requests_of_batches_are_none_of_a_projects() -> None:
    turns, ours = Turns(), Req("a", 0)
    ours.sampling_params.custom_params = marks("kind", Terms(project="a"))
    queue: list[Any] = [ours]
    came(turns, queue, Req("a", 1, PRIORITY))
    assert queue[0] is ours


def test_batches_get_their_least_share_of_the_time_where_no_slo_is_known() -> None:
    class Late(Req):
        finished_reason = None

    got = {}
    for share in (0.0, 1 / 8):
        beside, req = Beside.of(CLASSES, NO_LIMITS, MODEL, 100_000, 0, share), Late("a", 0)
        beside.arrived(req, 0.0)
        needs, got[share], now = NOBODY._replace(prompts=[req], waiting=1, tokens=2048, kv=2048), 0, 0.0
        for step in range(400):  # its first token is due since long
            now = 10.0 + 0.05 * step
            beside.pass_time(needs, now)
            allowed, _ = divide(beside, needs, now, fixed=Load(0, 0.0, 0, 1, 10))
            got[share] += allowed.most - allowed.online
            beside.launched(Load(allowed.most, 0.0, 1, 1, 10), Load(allowed.online, 0.0, 1, 1, 10))
    assert got[0.0] == 0
    assert got[1 / 8] >= 20 * 256


async def ask(host: Any, project: str, number: int, **body: Any) -> float:
    """Return how long the answer took."""
    asked = {"model": NAME, "messages": [{"role": "user", "content": f"{project} {number}"}], "temperature": 0, **body}
    began = time.monotonic()
    answer = await host.serve("/v1/chat/completions", asked, f"chatcmpl-{project}{number}", project=project)
    assert answer.status_code == 200, answer.body
    return time.monotonic() - began


@pytest.mark.parametrize("flood", [{"max_tokens": 600}, {"max_tokens": 600, "n": 40}], ids=["many", "choices"])
def test_a_flood_of_one_project_stops_neither_others_nor_batches(demo: Path, log: Path, flood: dict[str, Any]) -> None:
    """One project asks for five times what the engine runs at once; another one, and a batch, are answered before."""

    async def main(host: Any) -> list[float]:
        await ask(host, "b", 0, max_tokens=1)
        count = 80 // flood.get("n", 1)
        theirs = [asyncio.create_task(ask(host, "a", n, ignore_eos=True, **flood)) for n in range(count)]
        async with asyncio.timeout(60):
            while not (await host.scheduler_states())[0]["online_kv"]:
                await asyncio.sleep(0.05)
        body = {"model": NAME, "messages": [{"role": "user", "content": "c"}], "max_tokens": 4}
        batch = [asyncio.create_task(host.run("/v1/chat/completions", body, f"of-batch-{n}", "k")) for n in range(3)]
        took = [await ask(host, "b", n, max_tokens=4) for n in range(1, 4)]
        assert {answer.status_code for answer in await asyncio.gather(*batch)} == {200}
        assert not all(task.done() for task in theirs), "the flood was over before"
        for task in theirs:
            task.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)
        return took

    with running_engine(demo, {"max_running_requests": 16}, log, least_share=1 / 8) as engine:
        assert max(engine.do(main)) < 30


def test_long_prompts_of_one_project_stop_nobodys_stream(demo: Path, log: Path) -> None:
    """Another project has answers of many tokens while they are computed, in an engine that mixes no decodes in."""
    prompts = [[10 + each] * 6000 for each in range(8)]

    async def main(host: Any) -> int:
        await ask(host, "b", 0, max_tokens=1)
        flood = asyncio.create_task(
            host.serve("/v1/completions", {"model": NAME, "prompt": prompts, "max_tokens": 1}, "cmpl-a", project="a")
        )
        async with asyncio.timeout(60):
            while not (await host.scheduler_states())[0]["online_kv"]:
                await asyncio.sleep(0.05)
        answers = 0
        while not flood.done():
            await ask(host, "b", answers + 1, max_tokens=8, ignore_eos=True)
            answers += 1
        assert (await flood).status_code == 200
        return answers

    arguments = {"max_running_requests": 16, "chunked_prefill_size": 1024}
    with running_engine(demo, arguments, log, overlap="none") as engine:
        assert engine.do(main) >= 4


def test_room_is_looked_for_again_when_another_request_is_first() -> None:
    turns, running = Turns(), SimpleNamespace(batch_is_full=True)
    a, b = Req("a", 0), Req("b", 0)
    turns.look_again([a], running)
    running.batch_is_full = True  # `a` does not fit
    turns.look_again([a], running)
    assert running.batch_is_full
    turns.look_again([b, a], running)
    assert not running.batch_is_full


def test_who_finds_no_room_holds_nobody_for_whom_there_is_some(demo: Path, log: Path) -> None:
    """SGLang notes that the cache is full when a request does not fit, and asks nobody else until one ends."""

    async def main(host: Any) -> None:
        await ask(host, "b", 0, max_tokens=1)
        theirs = [asyncio.create_task(ask(host, "a", n, ignore_eos=True, max_tokens=4000)) for n in range(60)]
        async with asyncio.timeout(60):
            while not (await host.scheduler_states())[0]["online_kv"]:
                await asyncio.sleep(0.05)
        await asyncio.sleep(2)
        async with asyncio.timeout(200):
            await ask(host, "b", 1, max_tokens=4)
        assert not any(task.done() for task in theirs), "it waited for room that was free before"
        for task in theirs:
            task.cancel()
        await asyncio.gather(*theirs, return_exceptions=True)

    with running_engine(demo, {"max_running_requests": 64, "max_total_tokens": 20_000}, log) as engine:
        engine.do(main)
