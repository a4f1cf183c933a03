"""Several engines of one `batchweave up`, of one model or of two: one that dies does not touch the others."""

from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

from service.demo.prompts import CHAT
from tests.acceptance.service import Up
from tests.acceptance.test_up import line

LINES = 96


@pytest.fixture
def up(tmp_path: Path) -> Generator[Up, None, None]:
    # So long that all still run when the test has seen that each engine has requests, however slow it is.
    (tmp_path / "rules.json").write_text('{"rules": [{"prompt": "*", "delay_s": 15}]}')
    service = Up.on(tmp_path / "data", "--engines", "3", "--engine", "scripted", "--script", f"{tmp_path}/rules.json")
    service.variables |= {"BATCHWEAVE_SLICE_REQUESTS": "8", "BATCHWEAVE_LEASE_S": "3"}
    service.start()
    service.until_engine(3)
    yield service
    assert service.stop() == 0


def test_engines_of_one_machine_share_a_batch_and_die_alone(up: Up) -> None:
    before = {worker.pid for worker in up.workers()}
    batch_id = up.submit([line(str(number)) for number in range(LINES)], CHAT)
    up.until(lambda: all(each["requests"] for each in up.worker_states()), "each has requests")
    victim: psutil.Process = up.workers()[1]
    victim.kill()
    batch = up.wait(batch_id)
    assert set(up.lines(batch.output_file_id)) == {str(number) for number in range(LINES)}
    assert batch.error_file_id is None
    up.until_engine(3)
    now = {worker.pid for worker in up.workers()}
    assert before - now == {victim.pid}
    assert len(now) == 3


def test_two_models_of_one_service_have_an_engine_each(tmp_path: Path) -> None:
    models = ("--model", "demo", "--model", "tiny", "--model-name", "first", "--model-name", "second")
    service = Up.on(tmp_path / "data", "--engine", "scripted", *models)
    service.start()
    try:
        assert [each.id for each in service.client.models.list()] == ["first", "second"]  # before any engine is ready
        service.until_engine(2)
        assert sorted(each["model"] for each in service.worker_states()) == ["first", "second"]
        batches = [service.submit([line("a", model=name)], CHAT) for name in ("first", "second", "third")]
        found = [service.wait(each) for each in batches]
        assert [each.status for each in found] == ["completed", "completed", "failed"]
    finally:
        assert service.stop() == 0
