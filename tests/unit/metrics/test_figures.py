"""Every figure that is served is documented, and alerts and dashboard ask for none that is not."""

import json
import re
from pathlib import Path

import yaml
from prometheus_client import REGISTRY

from service.metrics import counters, queue
from service.metrics.engine import EngineMetrics
from service.metrics.gpu_health import GpuHealth
from service.objects.storage import Room

ROOT = Path(__file__).parents[3]
NAME = re.compile(r"\bbatchweave_[a-z_]+")
OF_HISTOGRAMS = ("_bucket", "_sum", "_count")


def served() -> set[str]:
    assert counters.HTTP  # that they are registered
    families = [*REGISTRY.collect(), *EngineMetrics("m").collect(), *GpuHealth([]).collect()]
    own = {f"{each.name}_total" if each.type == "counter" else each.name for each in families}
    live = {queue.PREFIX + name for name in queue.GAUGES}
    live |= {family.name for family in queue.room_metrics(Room(1, 1))} | {f"{queue.PREFIX}{queue.DEATHS}_total"}
    return {name for name in own | live if name.startswith("batchweave_")}


def plain(name: str) -> str:
    return next((name.removesuffix(end) for end in OF_HISTOGRAMS if name.endswith(end)), name)


def test_every_figure_is_documented() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    documented = set(NAME.findall(text)) | {f"batchweave_engine{each}" for each in re.findall(r"…(_[a-z_]+)", text)}
    assert served() == {name for name in documented if name != "batchweave_engine_"}


def test_alerts_and_dashboard_ask_for_what_is_served() -> None:
    rules = yaml.safe_load((ROOT / "docker/prometheus/alerts.yml").read_text())["groups"][0]["rules"]
    panels = json.loads((ROOT / "docker/grafana/batchweave.json").read_text())["panels"]
    asked = [rule["expr"] for rule in rules] + [each["expr"] for panel in panels for each in panel["targets"]]
    assert len(asked) > 30
    for expression in asked:
        for name in NAME.findall(expression):
            assert plain(name) in served(), expression
    assert all(rule["annotations"].keys() == {"summary", "todo"} for rule in rules)
