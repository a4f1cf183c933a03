"""Online requests beside a batch where SGLang copies KV cache to host memory: what was evicted comes back."""

from collections.abc import Generator
from pathlib import Path

import pytest

from tests.engine.test_online import LONG, STRICT, run
from tests.engine.test_real_scan import Real, Requests, running_real, tokens_of


@pytest.fixture(scope="module", params=[False, True], ids=["overlap", "no overlap"])
def real(request: pytest.FixtureRequest, demo: Path, log: Path) -> Generator[Real, None, None]:
    copies = {"enable_hierarchical_cache": True, "disable_overlap_schedule": request.param}
    with running_real(demo, log, copies, STRICT) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("mixed", [True, False])
def test_what_was_overwritten_comes_back_from_the_host(real: Real, mixed: bool) -> None:
    """Long prompts are parked and decodes taken off for online prompts that need most of the KV cache."""
    tokens = tokens_of(21)
    requests: Requests = [(tokens(60), 100) for _ in range(48)] + [(tokens(LONG), 4) for _ in range(3)]
    online: Requests = [(tokens(5_500 if k < 2 else 40), 8) for k in range(4)]
    answers = real.answers_alone(requests + online)
    ours = run(real, None, requests, online, mixed, held=1_500)
    assert ours["answers"] + [found["answer"] for found in ours["online"]] == answers
    assert ours["parked"] > 0
    assert ours["preempted"] > 0
    assert ours["loaded_host_tokens"] > 0
    assert (ours["waiting"], ours["running"], ours["kv_kept"]) == (0, 0, 0)
