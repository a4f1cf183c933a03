"""What a worker's engine does, for Prometheus, and shorter for the worker's heartbeat."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "batchweave_engine_"
SILENT_S = 10.0  # after which an engine that does not answer counts as one that does nothing
LABELS = ("model", "rank", "device")
# By field of a scheduler's state: the metric's name and what it says.
COUNTERS = {
    "engine_steps": ("steps", "Steps that have ended"),
    "step_s": ("step_seconds", "Time of all steps"),
    "predicted_step_s": ("step_predicted_seconds", "Time of all steps by the cost model, without overlap"),
    "compute_s": ("step_compute_seconds", "Arithmetic of all steps by the cost model"),
    "reads_s": ("step_kv_read_seconds", "Reading KV cache in all steps by the cost model"),
    "prompt_tokens": ("computed_prompt_tokens", "Prompt tokens computed, those computed again included"),
    "output_tokens": ("output_tokens", "Output tokens decoded"),
    "admitted": ("admitted_requests", "Requests let in, those let in again included"),
    "admitted_prompt_tokens": ("admitted_prompt_tokens", "Tokens of the prompts of requests when first let in"),
    "admitted_cached_tokens": ("admitted_cached_tokens", "Of these, found in the KV cache"),
    "expected_cached_tokens": ("expected_cached_tokens", "Of these, that the plan's neighbours share: the optimum"),
    "retractions": ("retractions", "Requests whose KV cache was taken back"),
    "retracted_tokens": ("retracted_tokens", "Tokens of KV cache that this threw away"),
    "plans": ("plans", "Plans of the backlog that were made"),
    "decisions": ("decisions", "Decisions whom to let in"),
    "deciding_s": ("deciding_seconds", "Time of these decisions, plans included"),
}
GAUGES = {
    "waiting": ("waiting_requests", "Requests that wait for admission"),
    "running": ("running_requests", "Requests that prefill or decode"),
    "kv_capacity": ("kv_capacity_tokens", "Tokens that the KV cache holds"),
    "kv_kept": ("kept_prefix_tokens", "KV tokens kept for whom each end lets in next"),
    "remaining_compute_s": ("remaining_compute_seconds", "Expected arithmetic of all that wait and run"),
    "remaining_memory_s": ("remaining_kv_read_seconds", "Expected KV reads of all that wait and run"),
}
SIDES = {"kv_of_left": "left", "kv_of_right": "right"}
HEARTBEAT = (*COUNTERS, *GAUGES, *SIDES, "device", "series", "series_every")


# Of a heartbeat, per second; the service's history sums them up.
RATES = {
    "steps_per_second": ("engine_steps",),
    "tokens_per_second": ("prompt_tokens", "output_tokens"),
    "input_tokens_per_second": ("prompt_tokens",),
    "output_tokens_per_second": ("output_tokens",),
    "admitted_prompt_tokens_per_second": ("admitted_prompt_tokens",),
    "admitted_cached_tokens_per_second": ("admitted_cached_tokens",),
    "compute_per_second": ("compute_s",),
    "reads_per_second": ("reads_s",),
    "retractions_per_second": ("retractions",),
}


class EngineMetrics(Collector):
    """Hands out the states that it was given last, one per data-parallel rank."""

    def __init__(self, model: str, step_age_s: Callable[[], float] = lambda: 0.0) -> None:
        """`step_age_s`: since the engine ended a step, 0 while it has nothing to do."""
        self._model = model
        self.step_age_s = step_age_s
        self._states: list[dict[str, Any]] = []
        self._taken_at = 0.0
        self._rates: dict[str, float] = {}

    def take(self, states: list[dict[str, Any]], now: float) -> None:
        """`now`: seconds of any steady clock."""
        elapsed_s = now - self._taken_at
        if self._states and elapsed_s > 0:
            for name, counted in RATES.items():
                more = _total(states, counted) - _total(self._states, counted)
                self._rates[name] = round(max(more, 0) / elapsed_s, 6)
        self._states, self._taken_at = states, now

    def rates(self, now: float) -> dict[str, float]:
        """Per second between the last two states, empty before; 0 where the engine has said nothing for a while."""
        return self._rates if now - self._taken_at < SILENT_S else dict.fromkeys(self._rates, 0.0)

    @property
    def summary(self) -> list[dict[str, Any]]:
        """What others may want to see of each rank, the series of its steps included."""
        return [{name: state[name] for name in HEARTBEAT if name in state} for state in self._states]

    def collect(self) -> Iterable[Metric]:
        for kind, fields in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for field, (name, text) in fields.items():
                family = kind(PREFIX + name, text, labels=LABELS)
                for rank, state in enumerate(self._states):
                    if field in state:
                        family.add_metric(self._labels(rank, state), state[field])
                yield family
        held = GaugeMetricFamily(PREFIX + "kv_tokens", "KV tokens held by end of the scan", labels=(*LABELS, "end"))
        for rank, state in enumerate(self._states):
            for field, end in SIDES.items():
                if field in state:
                    held.add_metric([*self._labels(rank, state), end], state[field])
        yield held
        age = GaugeMetricFamily(PREFIX + "step_age_seconds", "Since a step ended, while requests wait", labels=LABELS)
        device = next((str(state["device"]) for state in self._states if state.get("device")), "real")
        age.add_metric([self._model, "all", device], self.step_age_s())
        yield age

    def _labels(self, rank: int, state: dict[str, Any]) -> list[str]:
        return [self._model, str(rank), str(state.get("device") or "real")]


def _total(states: list[dict[str, Any]], fields: tuple[str, ...]) -> float:
    return sum(state.get(field, 0) for state in states for field in fields)
