"""One step, two engines: a simulated one shows what SGLang's scheduler holds, plans alike, and does the same."""

from pathlib import Path

import pytest

pytest.importorskip("sglang")

from tests.engine.step.scenes import Compared, compare, scene_engine

SCENES = 12  # of the 200 that `python -m tests.engine.step.scenes` plays


@pytest.mark.timeout(1800)  # it may have to compile all loops of the simulator
def test_sglang_and_the_simulator_take_the_same_steps(demo: Path, tmp_path: Path) -> None:
    found = Compared()
    with scene_engine(demo, tmp_path) as engine:
        for seed in range(SCENES):
            compare(engine, tmp_path, seed, found)
    print(found)
    assert not found.differences, "\n".join(found.differences[:20])
    assert min(found.parked, found.yielded, found.rested, found.made_way, found.no_room) > 0
    assert found.applied > 0.9 * found.steps > 0
