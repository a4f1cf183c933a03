"""What the scheduler process is told reaches it whole, as JSON in its environment."""

import pytest

from engine_ext.coserve.limit import Limits
from engine_ext.coserve.slo import SloClass
from engine_ext.costs.cost import CostModel
from engine_ext.costs.hardware import Machine, hardware
from engine_ext.costs.model_shape import preset
from engine_ext.plugin.options import VARIABLE, Options, handed_over


@pytest.mark.parametrize(
    ("online", "limits"),
    [
        (SloClass(), Limits()),
        (SloClass(ttft_s=2.0, tbt_s=0.1), Limits(limit_s=0.01)),
        (SloClass(), Limits(price_s=0.1)),
        (SloClass(), Limits(prompts_alone=True)),
        (SloClass(), Limits(limit_s=0.01, cuts_prompts=True)),
        (SloClass(), Limits(prompt_tokens=256)),
    ],
)
def test_bounds_and_limits_arrive(monkeypatch: pytest.MonkeyPatch, online: SloClass, limits: Limits) -> None:
    """Where nothing is bounded too: JSON has no infinity."""
    monkeypatch.delenv(VARIABLE, raising=False)
    assert handed_over() is None
    monkeypatch.setenv(VARIABLE, "")  # which the test gives back at its end
    options = Options(CostModel(preset("llama-3-8b"), Machine(hardware("h200"))), online=(online,), limits=limits)
    options.hand_over()
    found = handed_over()
    assert found is not None
    assert found == options
    assert [each.bounds for each in found.online] == [online.bounds]
    assert found.limits.profiled == limits.profiled
