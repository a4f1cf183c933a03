"""Whose grammars are compiled next: nobody's many costly ones hold up another's."""

import threading
from concurrent.futures import wait

from engine_ext.plugin.scheduler.compiles import MOST_OF_KIND, WORKERS, Compiles


def test_a_kind_has_half_the_threads_and_others_go_on() -> None:
    compiles, hold = Compiles(), threading.Event()
    compiles.kind = "costly"
    costly = [compiles.submit(hold.wait, 60) for _ in range(2 * WORKERS)]
    compiles.kind = "other"
    others = [compiles.submit(lambda: "answer") for _ in range(WORKERS)]
    assert not wait(others, 30).not_done
    assert {each.result() for each in others} == {"answer"}
    assert sum(each.running() for each in costly) == MOST_OF_KIND
    hold.set()
    assert not wait(costly, 30).not_done


def test_kinds_take_turns_whatever_came_first() -> None:
    compiles, hold, order = Compiles(), threading.Event(), list[str]()
    for _ in range(WORKERS // MOST_OF_KIND):
        compiles.kind += "x"
        for _ in range(MOST_OF_KIND):  # every thread is busy
            compiles.submit(hold.wait, 60)
    waiting = list[object]()
    for kind in "aaabc":
        compiles.kind = kind
        waiting.append(compiles.submit(order.append, kind))
    hold.set()
    assert not wait(waiting, 30).not_done  # type: ignore[arg-type]
    assert {"b", "c"} <= set(order[:4])


def test_a_compile_that_fails_or_is_cancelled_ends_none_of_the_threads() -> None:
    compiles, hold = Compiles(), threading.Event()
    busy = [compiles.submit(hold.wait, 60) for _ in range(MOST_OF_KIND)]
    cancelled = compiles.submit(print, "never")
    failing = compiles.submit(int, "no number")
    assert cancelled.cancel()
    hold.set()
    wait(busy, 30)
    assert isinstance(failing.exception(30), ValueError)
    assert compiles.submit(int, "1").result(30) == 1
