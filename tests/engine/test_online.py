"""Online requests beside a batch in real SGLang with a small KV cache: they go first, and nobody's answers change."""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine.bench_engine import BenchEngine
from benchmarks.engine.tuning import Tuning
from engine_ext.plugin.scheduler.member import GAIN
from engine_ext.step.tuning import MOST_MADE_WAY
from tests.engine.test_real_scan import CHUNK, Real, Requests, growing, prompts_and_outputs, running_real, tokens_of

SLOTS = 32  # that `Real` gives its engine
# After each step SGLang counts free, cached and held KV tokens, and the engine dies if any is lost.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
LONG = 1_900  # tokens of a batch's prompt: four chunks


def batch() -> Requests:
    """Long prompts, each a chunked prefill, beside long answers."""
    tokens = tokens_of(11)
    return [(tokens(LONG), 4) for _ in range(8)] + [(tokens(20), 150) for _ in range(16)]


def asked() -> Requests:
    """Online requests: short ones and one that is longer than a step."""
    tokens = tokens_of(12)
    return [(tokens(40 if k != 5 else 700), 12) for k in range(8)]


@pytest.fixture(
    scope="module", params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["overlap", "no overlap"]
)
def real(request: pytest.FixtureRequest, demo: Path, log: Path) -> Generator[Real, None, None]:
    with running_real(demo, log, {"disable_overlap_schedule": request.param}, STRICT) as found:
        yield found


async def within(engine: BenchEngine, main: Callable[[BenchEngine], Coroutine[Any, Any, Any]]) -> Any:
    return await asyncio.wait_for(main(engine), 250)


def run(
    real: Real,
    policy: str | None,
    requests: Requests,
    beside: Requests,
    mixed: bool,
    stream: Requests | None = None,
    held: int = 0,
    running: int = 0,
    limit_s: float = 0.0,
    chunk: int = CHUNK,
) -> Any:
    """Run the batch; the online requests come one after the other while it runs. Returns both kinds of answers.

    Each comes once the batch holds `held` tokens of the KV cache and has `running` requests on the engine, and three
    more of them were admitted than for the one before.

    `stream`: more of them, which come each a moment after the one before it.
    """

    async def main(engine: BenchEngine) -> Any:
        tuning = Tuning(policy, chunk, mixed=mixed, limit_s=limit_s)
        batch_runs = asyncio.create_task(engine.run(tuning, *prompts_and_outputs(requests)))
        answers: list[dict[str, Any]] = []
        for number, (ids, tokens) in enumerate(beside):
            while not batch_runs.done():
                state = await engine.state()
                is_full = state["kv_of_left"] + state["kv_of_right"] >= held and state["running"] >= running
                if is_full and state["admitted"] >= 1 + 3 * number:
                    break
                await asyncio.sleep(0.005)
            answers.append(await engine.ask(f"online-{number}", ids, tokens))
        streamed: list[asyncio.Task[Any]] = []
        for number, (ids, tokens) in enumerate(stream or []):
            while (await engine.state())["admitted"] < 1 and not batch_runs.done():
                await asyncio.sleep(0.005)
            streamed.append(asyncio.create_task(engine.ask(f"stream-{number}", ids, tokens)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*streamed)
        found = await batch_runs
        return found | {"online": answers}

    return real.engine.do(within, main)


@pytest.mark.parametrize("mixed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_online_requests_are_in_the_next_step(real: Real, mixed: bool) -> None:
    """Each is in the first step that is decided after it came, if need be before the chunk of a batch's prompt."""
    alone = real.answers_alone(batch())
    theirs = real.answers_alone(asked())
    made_way = 0
    for _ in range(30):  # whether one comes in the middle of a long prompt is chance, and rarer on a busy machine
        ours = run(real, None, batch(), asked(), mixed, chunk=CHUNK // 4)
        assert ours["answers"] == alone
        assert [found["answer"] for found in ours["online"]] == theirs
        assert ours["online_admitted"] >= len(asked()) // 2  # the others came when the batch was over
        # Hardly any waits at all; one may, until there is room, or beside a prompt that gained too little to make way.
        assert ours["online_most_steps"] <= 6
        assert ours["admitted"] == len(batch()) + ours["retractions"]  # a parked prefill counts as one
        assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)
        made_way += ours["parked"] + ours["yielded"]
        if made_way or not mixed:  # there a prompt of a batch has whole steps, in whose middle hardly any comes
            break
    assert made_way > 0 or not mixed


def test_a_batch_is_retracted_before_online_requests(real: Real) -> None:
    """Answers of the batch grow longer than any sample foretold, while young online answers run beside them."""
    tokens = tokens_of(13)
    young: Requests = [(tokens(30), 40) for _ in range(8)]
    alone = real.answers_alone(growing())
    ours = run(real, None, growing(), young, mixed=True)
    assert ours["answers"] == alone
    assert ours["retractions"] - ours["parked"] > 0
    assert [found["retractions"] for found in ours["online"]] == [0] * len(young)
    assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)


@pytest.mark.slow
def test_a_request_is_parked_only_so_often(real: Real) -> None:
    """One prompt of ten chunks beside a stream of online requests: it gains each time, and is computed in the end."""
    tokens = tokens_of(14)
    requests: Requests = [(tokens(4_900), 4), *((tokens(20), 100) for _ in range(4))]
    alone = real.answers_alone(requests)
    ours = run(real, None, requests, [], mixed=True, stream=[(tokens(300), 1) for _ in range(20)])
    assert ours["answers"] == alone
    assert 0 < ours["parked"] <= MOST_MADE_WAY + 4_900 // GAIN
    assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)


def test_a_batch_makes_room_for_online_requests(real: Real) -> None:
    """Answers fill the KV cache; an online prompt that needs most of it does not wait until they end."""
    tokens = tokens_of(15)
    requests: Requests = [(tokens(60), 150) for _ in range(48)]
    large: Requests = [(tokens(5_500), 8)]
    alone = real.answers_alone(requests)
    theirs = real.answers_alone(large)
    for mixed in (True, False):
        ours = run(real, None, requests, large, mixed, held=1_500)
        assert ours["answers"] == alone
        assert [found["answer"] for found in ours["online"]] == theirs
        assert [found["retractions"] for found in ours["online"]] == [0]
        assert ours["preempted"] > 0
        assert ours["online_most_steps"] <= 6
        assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)


def test_a_batch_gives_a_request_slot_up(real: Real) -> None:
    """More short requests than the engine runs at once: an online one needs a slot, and not the KV cache."""
    tokens = tokens_of(16)
    requests: Requests = [(tokens(4), 100) for _ in range(64)]
    short: Requests = [(tokens(8), 4) for _ in range(4)]
    alone = real.answers_alone(requests)
    ours = run(real, None, requests, short, mixed=True, running=SLOTS)
    assert ours["answers"] == alone
    assert ours["preempted"] > 0
    assert ours["online_most_steps"] <= 6
    assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)


@pytest.mark.parametrize("mixed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_decodes_of_a_batch_rest_while_online_requests_decode(real: Real, mixed: bool) -> None:
    """No step may be longer than online requests need alone, so the batch has what is left when they have ended.

    Then decodes that have rested ride beside a chunk of a long prompt at once.
    """
    tokens = tokens_of(17)
    requests: Requests = [(tokens(30), 60 + 10 * k) for k in range(12)] + [(tokens(LONG), 4) for _ in range(6)]
    online: Requests = [(tokens(20 if k != 3 else 700), 30) for k in range(6)]
    alone = real.answers_alone(requests)
    theirs = real.answers_alone(online)
    ours = run(real, None, requests, online, mixed, running=4, limit_s=1e-5)
    assert ours["answers"] == alone
    assert [found["answer"] for found in ours["online"]] == theirs
    assert ours["left_out"] > 100
    assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)


def test_requests_that_rest_can_be_aborted(real: Real) -> None:
    """They end, the others get their answers, and nothing of the KV cache is lost."""
    tokens = tokens_of(18)
    requests: Requests = [(tokens(30), 60 + 10 * k) for k in range(12)]
    alone = real.answers_alone(requests)

    async def main(engine: BenchEngine) -> Any:
        tuning = Tuning(None, CHUNK, limit_s=1e-5)
        batch_runs = asyncio.create_task(engine.run(tuning, *prompts_and_outputs(requests)))
        while (await engine.state())["running"] < len(requests):
            await asyncio.sleep(0.005)
        online = asyncio.create_task(engine.ask("online", tokens(20), 200))
        while (await engine.state())["left_out"] == 0:
            await asyncio.sleep(0.005)
        for number in (2, 7, 8):
            engine.abort(f"bench-{number}")
        await online
        return await batch_runs

    ours = real.engine.do(within, main)
    lengths = [len(answer) for answer in ours["answers"]]
    assert [k for k, (_, wanted) in enumerate(requests) if lengths[k] < wanted] == [2, 7, 8]
    assert all(ours["answers"][k] == alone[k] for k in range(12) if k not in (2, 7, 8))
    assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)
