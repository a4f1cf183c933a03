"""Whether an engine hangs, by what its schedulers write into shared memory."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engine_ext.plugin.pulse import FIRST_STEPS, Beating, Health, Pulse, Pulses

LIMIT_S = 60.0


def pulse(
    turned_at: float, stepped_at: float, longest_s: float = 0.1, steps: int = 5, expected_s: float = 0.1
) -> Pulse:
    return Pulse(turned_at, stepped_at, longest_s, expected_s, steps, 1)


def age(*found: Pulse, busy_since: float | None = 0.0, now: float = 100.0) -> float:
    return Health.of(found, busy_since, now, LIMIT_S).age_s


def limit(*found: Pulse) -> float:
    return Health.of(found, 0.0, 100.0, LIMIT_S).limit_s


def test_an_engine_that_rests_or_works_is_well() -> None:
    assert age(pulse(1.0, 1.0), busy_since=None) == 0.0
    assert age(pulse(99.9, 99.0)) == 1.0
    assert age(pulse(1.0, 1.0), busy_since=98.0) == 2.0  # it had nothing to do until then


def test_a_loop_that_does_not_turn_or_turns_for_nothing_hangs() -> None:
    assert age(pulse(30.0, 30.0)) == 70.0
    assert age(pulse(99.9, 30.0)) == 70.0
    assert age(pulse(99.0, 99.0), pulse(20.0, 99.0)) == 80.0  # one of two ranks
    assert age(pulse(99.0, 99.0), pulse(99.0, 3.0)) == 1.0  # the other has nothing to do


def test_the_limit_is_above_what_was_seen_and_generous_to_the_first_step() -> None:
    assert limit(pulse(1, 1)) == LIMIT_S
    assert limit(pulse(1, 1, longest_s=50.0)) == 100.0
    assert limit(pulse(1, 1, expected_s=50.0)) == 100.0
    assert limit(pulse(1, 1, longest_s=5000.0)) == FIRST_STEPS * LIMIT_S
    assert limit(pulse(1, 1, steps=0)) == FIRST_STEPS * LIMIT_S


def _beat(path: str) -> None:
    beating = Beating(Path(path), 3, 10.0)
    beating.turned(22.5)  # it was idle
    beating.stepped(23.0)
    beating.turned(25.0)
    beating.expects(7.0)
    beating.stepped(26.0)


def test_another_process_is_read_through_shared_memory() -> None:
    pulses = Pulses()
    assert pulses.read() == []
    process = multiprocessing.get_context("spawn").Process(target=_beat, args=(str(pulses.path),))
    process.start()
    process.join()
    [found] = pulses.read()
    assert found == Pulse(25.0, 26.0, 2.5, 7.0, 2, process.pid or 0)
    pulses.close()


def test_a_process_that_hangs_with_its_lock_held_is_killed_with_the_engine() -> None:
    """The scheduler here never lets go of its interpreter's lock, and nobody can ask it anything."""
    code = """
import re, subprocess, sys, time
from pathlib import Path
from engine_ext.plugin.pulse import Pulses, Watch
pulses = Pulses()
child = subprocess.Popen([sys.executable, "-c", f'''
import re, time
from pathlib import Path
from engine_ext.plugin.pulse import Beating
beating = Beating(Path("{pulses.path}"), 0, time.monotonic())
beating.turned(time.monotonic()); beating.stepped(time.monotonic())
re.search("(?:(?:a+)+)+b", "a" * 64)
'''])
print(child.pid, flush=True)
while not pulses.read(): time.sleep(0.05)
since = time.monotonic()
Watch(pulses, 0.5, lambda: since).start()
time.sleep(120)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert process.wait(100) == -signal.SIGKILL
    for _ in range(1000):  # until its parent, or whoever inherited it, has looked
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            return
        time.sleep(0.02)
    raise AssertionError("the scheduler lives on")


@pytest.mark.slow
def test_time_in_which_the_machine_stood_still_is_no_hang() -> None:
    """A frozen container or a paused virtual machine: worker and scheduler stop, and both run again."""
    code = """
import threading, time
from engine_ext.plugin.pulse import Beating, Pulses, Watch
pulses = Pulses()
beating = Beating(pulses.path, 0, time.monotonic())

def beat():
    while True:
        beating.turned(time.monotonic()); beating.stepped(time.monotonic())
        for _ in range(20): time.sleep(0.1)  # a step, of which a part is left when the machine runs again

since = time.monotonic()
Watch(pulses, 4.0, lambda: since).start()
threading.Thread(target=beat, daemon=True).start()
while True:
    print("alive", flush=True)
    time.sleep(0.5)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "alive\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(10)  # more than the limit
        process.send_signal(signal.SIGCONT)
        for _ in range(10):  # checks of the watch among them
            assert process.stdout.readline() == "alive\n"
    finally:
        process.kill()
        process.wait()
