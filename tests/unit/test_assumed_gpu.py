"""Which GPU plans assume: the one that is set, else this machine's."""

import pytest

from service.estimates import model_costs
from service.estimates.gpus import Gpu
from service.estimates.model_costs import FALLBACK_GPU, assumed_gpu
from service.settings import load_settings


@pytest.mark.parametrize(
    ("name", "assumed"), [("NVIDIA L40S", "l40s"), ("NVIDIA Unheard-of", FALLBACK_GPU), (None, FALLBACK_GPU)]
)
def test_it_is_that_of_the_machine_where_a_preset_describes_it(
    name: str | None, assumed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_costs, "machine_gpu", lambda: name)
    assert assumed_gpu(load_settings()) == assumed
    assert assumed_gpu(load_settings(gpu="h100")) == "h100"


def test_its_name_is_that_of_the_first_gpu_that_may_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, name in (([Gpu("3", None, "NVIDIA B200"), Gpu("1", None, "NVIDIA L40S")], "NVIDIA B200"), ([], None)):
        monkeypatch.setattr(model_costs, "machine_gpus", lambda there=there: there)
        model_costs.machine_gpu.cache_clear()
        assert model_costs.machine_gpu() == name
    model_costs.machine_gpu.cache_clear()
