"""Online requests beside a batch in real SGLang with a small KV cache: they go first, and nobody's answers change."""

import asyncio
from collections.abc import Generator
from typing import Any

import pytest

from engine_ext.plugin.scheduler.admission import GAIN, MOST_PARKED
from engine_ext.plugin.tuning import Tuning
from service.demo.model import ensure_demo_model
from service.demo.prompts import corpus
from tests.engine.test_real_scan import CHUNK, Real, Requests, growing, tokens_of

SLOTS = 32  # that `Real` gives its engine
LONG = 1_900  # tokens of a batch's prompt: four chunks


def batch() -> Requests:
    """Long prompts, each a chunked prefill, beside long answers."""
    tokens = tokens_of(11)
    return [(tokens(LONG), 4) for _ in range(8)] + [(tokens(20), 150) for _ in range(16)]


def asked() -> Requests:
    """Online requests: short ones and one that is longer than a step."""
    tokens = tokens_of(12)
    return [(tokens(40 if k != 5 else 700), 12) for k in range(8)]


@pytest.fixture(scope="module", params=[False, True], ids=["overlap schedule", "no overlap schedule"])
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Generator[Real, None, None]:
    folder = tmp_path_factory.mktemp("online")
    model = ensure_demo_model(folder / "demo", corpus())
    with pytest.MonkeyPatch.context() as environment:
        # After each step SGLang counts free, cached and held KV tokens, and the engine dies if any is lost.
        environment.setenv("SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY", "1")
        found = Real(model, folder / "steps.jsonl", {"disable_overlap_schedule": request.param})
    yield found
    found.engine.close()
    found.loop.close()


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
) -> Any:
    """Run the batch; the online requests come one after the other while it runs. Returns both kinds of answers.

    Each comes once the batch holds `held` tokens of the KV cache and has `running` requests on the engine, and three
    more of them were admitted than for the one before.

    `stream`: more of them, which come each a moment after the one before it.
    """

    async def main() -> Any:
        tuning = Tuning(policy, CHUNK, mixed=mixed, limit_s=limit_s)
        prompts, outputs = [ids for ids, _ in requests], [tokens for _, tokens in requests]
        batch_runs = asyncio.create_task(real.engine.run(tuning, prompts, outputs))
        answers: list[dict[str, Any]] = []
        for number, (ids, tokens) in enumerate(beside):
            while not batch_runs.done():
                state = await real.engine.state()
                is_full = state["kv_of_left"] + state["kv_of_right"] >= held and state["running"] >= running
                if is_full and state["admitted"] >= 1 + 3 * number:
                    break
                await asyncio.sleep(0.005)
            answers.append(await real.engine.ask(f"online-{number}", ids, tokens))
        streamed: list[asyncio.Task[Any]] = []
        for number, (ids, tokens) in enumerate(stream or []):
            while (await real.engine.state())["admitted"] < 1 and not batch_runs.done():
                await asyncio.sleep(0.005)
            streamed.append(asyncio.create_task(real.engine.ask(f"stream-{number}", ids, tokens)))
            await asyncio.sleep(0.01)
        await asyncio.gather(*streamed)
        found = await batch_runs
        return found | {"online": answers}

    return real.loop.run_until_complete(asyncio.wait_for(main(), 250))


@pytest.mark.parametrize("mixed", [True, False])
def test_online_requests_are_in_the_next_step(real: Real, mixed: bool) -> None:
    """Each is in the first step that is decided after it came, if need be before the chunk of a batch's prompt."""
    alone = real.answers_alone(batch())
    theirs = real.answers_alone(asked())
    parked = 0
    for _ in range(40):  # whether one comes in the middle of a long prompt is chance, and rarer on a busy machine
        ours = run(real, None, batch(), asked(), mixed)
        assert ours["answers"] == alone
        assert [found["answer"] for found in ours["online"]] == theirs
        assert ours["online_admitted"] >= len(asked()) // 2  # the others came when the batch was over
        # Hardly any waits at all; one may, until there is room, or beside a prompt that gained too little to make way.
        assert ours["online_most_steps"] <= 6
        assert ours["admitted"] == len(batch()) + ours["retractions"]  # a parked prefill counts as one
        assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)
        parked += ours["parked"]
        if parked:
            break
    assert parked > 0


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


def test_a_request_is_parked_only_so_often(real: Real) -> None:
    """One prompt of ten chunks beside a stream of online requests: it gains each time, and is computed in the end."""
    tokens = tokens_of(14)
    requests: Requests = [(tokens(4_900), 4), *((tokens(20), 100) for _ in range(4))]
    alone = real.answers_alone(requests)
    ours = run(real, None, requests, [], mixed=True, stream=[(tokens(300), 1) for _ in range(20)])
    assert ours["answers"] == alone
    assert 0 < ours["parked"] <= MOST_PARKED + 4_900 // GAIN
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


@pytest.mark.parametrize("mixed", [True, False])
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

    async def main() -> Any:
        tuning = Tuning(None, CHUNK, limit_s=1e-5)
        prompts, outputs = [ids for ids, _ in requests], [wanted for _, wanted in requests]
        batch_runs = asyncio.create_task(real.engine.run(tuning, prompts, outputs))
        while (await real.engine.state())["running"] < len(requests):
            await asyncio.sleep(0.005)
        online = asyncio.create_task(real.engine.ask("online", tokens(20), 200))
        while (await real.engine.state())["left_out"] == 0:
            await asyncio.sleep(0.005)
        for number in (2, 7, 8):
            real.engine.abort(f"bench-{number}")
        await online
        return await batch_runs

    ours = real.loop.run_until_complete(asyncio.wait_for(main(), 250))
    lengths = [len(answer) for answer in ours["answers"]]
    assert [k for k, (_, wanted) in enumerate(requests) if lengths[k] < wanted] == [2, 7, 8]
    assert all(ours["answers"][k] == alone[k] for k in range(12) if k not in (2, 7, 8))
    assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)
