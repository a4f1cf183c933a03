"""Which preset describes a GPU, by the name that its driver gives it."""

import pytest

from engine_ext.costs.hardware import preset_of


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H20", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_drivers_name_leads_to_a_preset(name: str, preset: str | None) -> None:
    assert preset_of(name) == preset
