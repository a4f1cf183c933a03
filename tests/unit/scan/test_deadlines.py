"""Deadlines and fairness inside the scan: a short window goes before a long one, and nobody is overtaken for ever."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_ext.plan.lengths import UNKNOWN
from engine_ext.scan import backlog as backlog_module
from engine_ext.scan.projects import NOT_AHEAD, Owner, ProjectTimes
from engine_ext.scan.tiers import AGED, ORDINARY, POOLS, Urgency
from tests.unit.scan.driving import decide
from tests.unit.scan.test_live import Engine, live, tokens

DAY_S, MINUTES_S = 86_400.0, 600.0


def loaded(shape: str, count: int = 1500) -> Engine:
    """An engine with a large batch of a day's window, of which the first requests run."""
    engine, generator = Engine(live(), most_at_once=40), np.random.default_rng(3)
    for key in range(count):
        prompts = {
            "one prefix": tokens((1, 300), (100 + key, 20)),
            "dense": tokens((100 + key, 400)),
            "light": tokens((100 + key, 8)),
            "mixed": tokens((100 + key, int(generator.integers(5, 600)))),
        }
        answers = {"one prefix": 30, "dense": 2, "light": 300, "mixed": int(generator.integers(1, 400))}
        engine.add(key, prompts[shape], answers[shape], due=DAY_S)
    for _ in range(60):
        engine.step()
    return engine


@pytest.mark.parametrize("shape", ["one prefix", "dense", "light", "mixed"])
@pytest.mark.parametrize("prompt", [3, 100, 600])
@pytest.mark.parametrize("answer", [1, 4, 200])
def test_a_short_window_goes_before_a_long_one(shape: str, prompt: int, answer: int) -> None:
    """Whatever its density: it stands between the ends of some, and at an end of others."""
    engine = loaded(shape)
    begun, few = len(engine.admitted), range(10_000, 10_005)

    for key in few:
        engine.add(key, tokens((key, prompt)), answer, due=engine.now + MINUTES_S)
    while not all(key in engine.admitted[begun:] for key in few):
        engine.step()
        assert len(engine.admitted) < begun + 200
    engine.run()


def test_of_two_deadlines_that_are_threatened_the_nearer_comes_first() -> None:
    engine = Engine(live(), most_at_once=8)
    for key in range(600):
        engine.add(key, tokens((key, 100)), 50)
    engine.step()
    total = max(engine.scan.remaining_s)

    for key in range(1000, 1060):
        engine.add(key, tokens((key, 100)), 50, due=total * (0.2 if key % 2 else 0.8))
    engine.run()

    ended = {near: max(engine.ended[key] for key in range(1000, 1060) if key % 2 == near) for near in (0, 1)}
    assert ended[1] < ended[0]
    assert ended[1] < total * 0.2
    assert ended[0] < total * 0.8


def test_what_the_order_would_meet_anyway_is_not_hurried() -> None:
    urgency = Urgency(np.array([100.0, 1000.0, 50_000.0, np.inf, -5.0]), np.zeros(5, dtype=np.bool_))

    assert urgency.tiers(10.0).tolist() == [POOLS, POOLS + 10, ORDINARY, ORDINARY, ORDINARY]


def test_the_time_to_a_deadline_is_real_time() -> None:
    """An engine ten times as slow as the cost model says must begin ten times as early."""
    due_s, nobody = np.array([100.0]), np.zeros(1, dtype=np.bool_)

    assert Urgency(due_s, nobody, slowness=1.0).tiers(20.0)[0] == POOLS
    assert Urgency(due_s, nobody, slowness=10.0).tiers(20.0)[0] < POOLS


def test_an_engine_slower_than_the_cost_model_is_noticed() -> None:
    engine = Engine(live(), slowness=50.0)
    for key in range(300):
        engine.add(key, tokens((key, 100)), 50)
    engine.run()

    assert engine.scan.slowness == pytest.approx(50, rel=0.3)


def test_nobody_is_overtaken_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests at both ends keep coming; those between them in density still get their turn."""
    monkeypatch.setattr(backlog_module, "MOST_OVERTAKEN", 200)
    engine = Engine(live(), most_at_once=16)
    middle = range(50)
    for key in middle:
        engine.add(key, tokens((key, 150)), 40)
    key = 1000

    for _ in range(20_000):
        while len(engine.scan) < 400:
            engine.add(key, tokens((key, 600 if key % 2 else 5)), 2 if key % 2 else 150, known=True)
            key += 1
        engine.step()
        if all(each in engine.ended for each in middle):
            break

    assert all(each in engine.ended for each in middle)
    last = max(engine.admitted.index(each) for each in middle)
    assert sum(each >= 1000 for each in engine.admitted[:last]) < 200 + 400 + 200  # the bound, a plan's worth, the tier


def test_whoever_was_overtaken_for_long_comes_before_all_but_the_urgent() -> None:
    aged = np.array([False, True, False])

    assert Urgency(np.array([60.0, np.inf, 5000.0]), aged).tiers(1.0).tolist() == [POOLS, AGED, POOLS + 20]


def test_an_urgent_request_that_does_not_fit_keeps_its_room() -> None:
    """Small ones pass it only beside the room that it needs, so it comes as soon as enough of the others have ended."""
    engine = Engine(live(), most_at_once=200)
    for key in range(2000):
        engine.add(key, tokens((key, 60)), 200, known=True)
    for _ in range(300):
        engine.step()
    assert engine.used > 8_000

    engine.add(9999, tokens((9999, 12_000)), 5, due=engine.now + MINUTES_S)
    begun = len(engine.admitted)
    while 9999 not in engine.ended:
        engine.step()
        assert len(engine.admitted) < begun + 400

    engine.run()


def test_a_request_that_the_engine_refuses_blocks_no_end() -> None:
    """As SGLang does where a request's adapter finds no slot: the others go on, and it is tried again later."""
    engine = Engine(live(), most_at_once=16)
    for key in range(200):
        engine.add(key, tokens((key, 100)), 20)
    scan, refused, tries = engine.scan, -1, 0
    for _ in range(3000):
        step = decide(scan, engine.used, 0, len(engine.decoding), 0, 1, 16 - len(engine.decoding), engine.now)
        for key in step.admitted:
            refused = key if refused < 0 else refused
            if key == refused and tries < 20:
                tries += 1
                scan.put_back(key, refused=True)
                continue
            scan.prefilled(key)
            scan.finished(key, 20)
            engine.done.append(key)
        if len(engine.done) == 200:
            break

    assert sorted(engine.done) == list(range(200))
    assert tries == 20
    assert engine.done.index(refused) > 20


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_taking_back_plans_nothing_again(seed: int) -> None:
    generator = np.random.default_rng(seed)
    engine = Engine(live(), most_at_once=8)
    for key in range(100):
        engine.add(key, tokens((key % 5, 50), (100 + key, 50)), 10)
    engine.step()
    waiting = [key for key in range(100) if key not in engine.admitted]
    gone = generator.permutation(waiting)[: int(generator.integers(1, len(waiting)))].tolist()
    plans = engine.scan.plans

    for key in gone:
        engine.scan.take_back(key)
    engine.step()
    assert engine.scan.plans == plans
    engine.run()

    assert sorted([*engine.done, *gone]) == list(range(100))
    assert len(engine.scan) == 0


def test_an_unknown_deadline_is_none() -> None:
    scan = live()
    scan.add(1, tokens((1, 10)), 5, UNKNOWN)

    assert decide(scan, 0, 0, 0, 0, 1, 5).admitted == [1]


@pytest.mark.parametrize(("weight", "least", "most"), [(1.0, 0.4, 0.6), (3.0, 0.65, 0.85)])
def test_short_windows_take_no_more_than_a_projects_share(weight: float, least: float, most: float) -> None:
    """A project whose batches all end in minutes, at both ends of the scan, beside one that has a day."""
    engine, ours, hasty = Engine(live(), most_at_once=40), Owner(1), Owner(2, weight)
    shapes = ((400, 2), (8, 300))  # prompt and output tokens
    for key in range(6000):
        owner, (prompt, answer) = (ours, hasty)[key % 2], shapes[key // 2 % 2]
        due = engine.now + (DAY_S if owner == ours else MINUTES_S)
        engine.add(key, tokens((100 + key, prompt)), answer, due=due, owner=owner)
    while len(engine.ended) < 2400:
        engine.step()

    assert least < sum(key % 2 for key in engine.ended) / len(engine.ended) < most


def test_a_project_that_is_ahead_keeps_its_deadlines_beside_itself() -> None:
    due_s, nobody = np.array([600.0, 7000.0, 5 * 3600.0]), np.zeros(3, dtype=np.bool_)
    ahead = np.array([7, 7, NOT_AHEAD])

    assert Urgency(due_s, nobody, ahead=ahead).tiers(1.0).tolist() == [POOLS + 30, POOLS + 50, POOLS + 30]
    assert Urgency(due_s, nobody, ahead=np.full(3, 7)).tiers(1.0).tolist() == [
        POOLS,
        POOLS + 20,
        POOLS + 30,
    ]


def test_a_project_saves_up_no_turns() -> None:
    """Whether it is away, or waits with a little all the time, while another works alone for an hour."""
    for trickles in (False, True):
        times, a, b = ProjectTimes(), np.array([1]), np.array([2])
        times.charge(np.array([1, 2]), np.array([1.0, 0.01]))
        times.ahead(np.array([1, 2]), 1.0)
        for _ in range(3600):
            times.charge(a, np.ones(1))
            times.ahead(np.array([1, 2]) if trickles else a, 1.0)
        lead = 0
        while times.ahead(np.array([1, 2]), 1.0)[0] == 1:
            times.charge(b, np.ones(1))
            lead += 1
        assert lead <= (60 if trickles else 0)


def test_one_request_of_another_project_leaves_a_projects_own_order_alone() -> None:
    engine, busy, other = Engine(live(), most_at_once=40, slowness=10.0), Owner(1), Owner(2)
    for key in range(4000):
        engine.add(key, tokens((100 + key, 5 + key % 600)), 1 + key % 400, due=DAY_S, owner=busy)
    engine.add(4000, tokens((9_000_000, 150)), 40, due=DAY_S, owner=other)
    for _ in range(300):
        engine.step()
    begun = len(engine.admitted)
    for key in range(5000, 5200):
        engine.add(key, tokens((100 + key, 5 + key % 600)), 1 + key % 400, due=engine.now + 120, owner=busy)
    engine.add(6000, tokens((9_000_001, 150)), 40, due=DAY_S, owner=other)
    while not all(key in engine.ended for key in range(5000, 5200)):
        engine.step()
    assert sum(key < 4000 for key in engine.admitted[begun:]) < 100
