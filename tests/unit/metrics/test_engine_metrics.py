"""The engine's figures as Prometheus and other roles read them."""

from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service.metrics.engine import EngineMetrics

STATE: dict[str, Any] = {
    "hooks": ["a"],
    "recent_ids": ["x"],
    "device": None,
    "engine_steps": 7,
    "step_s": 1.5,
    "admitted": 3,
    "waiting": 2,
    "kv_of_left": 10,
    "kv_of_right": 30,
    "series": [[0.1, 0.2, 0.1, 0.1, 5.0, 1.0]],
    "series_every": 1,
}


def test_each_rank_is_a_sample_and_what_a_state_lacks_is_none() -> None:
    metrics = EngineMetrics("m")
    metrics.take([STATE, {**STATE, "engine_steps": 9, "device": "emulated 1 x h200, mixed clock"}], 1.0)
    registry = CollectorRegistry()
    registry.register(metrics)
    text = generate_latest(registry).decode()
    samples = {
        (each.name, each.labels["rank"], each.labels.get("end")): each
        for family in text_string_to_metric_families(text)
        for each in family.samples
    }
    assert samples["batchweave_engine_steps_total", "0", None].value == 7
    assert samples["batchweave_engine_steps_total", "1", None].value == 9
    assert samples["batchweave_engine_step_seconds_total", "0", None].value == 1.5
    assert samples["batchweave_engine_waiting_requests", "0", None].value == 2
    assert samples["batchweave_engine_kv_tokens", "0", "right"].value == 30
    assert samples["batchweave_engine_steps_total", "0", None].labels["device"] == "real"
    assert "emulated" in samples["batchweave_engine_steps_total", "1", None].labels["device"]
    assert not any(name.startswith("batchweave_engine_retractions") for name, _, _ in samples)


def test_the_heartbeat_has_the_figures_and_no_ids() -> None:
    metrics = EngineMetrics("m")
    assert metrics.summary == []
    metrics.take([STATE], 1.0)
    [found] = metrics.summary
    assert found["engine_steps"] == 7
    assert found["series"] == STATE["series"]
    assert "recent_ids" not in found
    assert "hooks" not in found
