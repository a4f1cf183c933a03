"""Exposes the state of a worker's engine to Prometheus, and a summary of it for the worker's heartbeat."""

from collections.abc import Callable, Iterable
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "batchweave_engine_"
SILENT_S = 10.0  # an engine that has not answered for this long counts as idle
LABELS = ("model", "rank", "device")
# Maps each field of a scheduler's state to the metric's name and HELP text.
COUNTERS = {
    "engine_steps": ("steps", "Engine steps completed"),
    "step_s": ("step_seconds", "Measured duration of all engine steps"),
    "predicted_step_s": ("step_predicted_seconds", "Predicted duration of all engine steps, without overlap"),
    "compute_s": ("step_compute_seconds", "Compute time of all engine steps by the cost model"),
    "reads_s": ("step_kv_read_seconds", "KV cache read time of all engine steps by the cost model"),
    "prompt_tokens": ("computed_prompt_tokens", "Prompt tokens computed, including recomputed ones"),
    "output_tokens": ("output_tokens", "Output tokens decoded"),
    "admitted": ("admitted_requests", "Requests admitted, including those admitted again"),
    "admitted_prompt_tokens": ("admitted_prompt_tokens", "Prompt tokens of requests at their first admission"),
    "admitted_cached_tokens": ("admitted_cached_tokens", "Prompt tokens found in the KV cache at first admission"),
    "expected_cached_tokens": (
        "expected_cached_tokens",
        "Prompt tokens at first admission that neighbours in the plan share",
    ),
    "retractions": ("retractions", "Retractions of running requests, whose KV cache the engine took back"),
    "retracted_tokens": ("retracted_tokens", "KV cache tokens discarded by retractions"),
    "restored_tokens": ("restored_tokens", "Tokens that requests found in the KV cache when they came again"),
    "loaded_host_tokens": ("loaded_host_tokens", "KV cache tokens that came back from host memory"),
    "recomputed_tokens": ("recomputed_tokens", "Tokens that requests had to compute again when they came again"),
    "preempted": ("preemptions", "Decoding requests of batches that left the engine for online ones"),
    "parked": ("parked_prefills", "Prefills of batches that were stopped for online requests"),
    "yielded": ("yielded_steps", "Steps in which a batch's prompt left online prompts their part"),
    "left_out": ("left_out_decodes", "Decodes of batches that steps left out for online requests"),
    "limited_steps": ("limited_steps", "Steps in which batches got fewer prompt tokens because of online requests"),
    "online_s": ("online_seconds", "Time that steps would have taken without batches, while online requests come"),
    "batches_excess_s": ("batches_seconds", "Time by which batches made steps longer, while online requests come"),
    "plans": ("plans", "Plans made of the engine's backlog"),
    "decisions": ("decisions", "Admission decisions made"),
    "deciding_s": ("deciding_seconds", "Time that admission decisions take; plans are made beside them"),
}
GAUGES = {
    "waiting": ("waiting_requests", "Requests in the engine waiting for admission"),
    "running": ("running_requests", "Requests in prefill or decode"),
    "kv_capacity": ("kv_capacity_tokens", "Capacity of the KV cache in tokens"),
    "kv_kept": ("kept_prefix_tokens", "KV cache tokens pinned for the request that each end of the scan admits next"),
    "online_kv": ("online_kv_tokens", "KV cache tokens held by online requests"),
    "kv_kept_for_online": ("kv_reserve_tokens", "KV cache tokens kept free for online requests"),
    "batches_share": ("batches_share", "Share of their part of a step that batches may use beside online requests"),
    "step_limit_s": ("step_limit_seconds", "The longest that the last step might take; 0: any time"),
    "remaining_compute_s": ("remaining_compute_seconds", "Expected compute time of all waiting and running requests"),
    "remaining_memory_s": (
        "remaining_kv_read_seconds",
        "Expected KV cache read time of all waiting and running requests",
    ),
}
SIDES = {"kv_of_left": "left", "kv_of_right": "right"}
HEARTBEAT = (*COUNTERS, *GAUGES, *SIDES, "online_classes", "device", "series", "series_every")


# Per-second rates in a heartbeat, with the fields that each one sums; the service's history adds up all workers.
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
    "online_seconds_per_second": ("online_s",),
    "batches_seconds_per_second": ("batches_excess_s",),
}


class EngineMetrics(Collector):
    """Serves the latest scheduler states that it was given, one per data-parallel rank."""

    def __init__(self, model: str, step_age_s: Callable[[], float] = lambda: 0.0) -> None:
        """`step_age_s` returns the seconds since the engine completed a step, 0 while it is idle."""
        self._model = model
        self.step_age_s = step_age_s
        self._states: list[dict[str, Any]] = []
        self._taken_at = 0.0
        self._rates: dict[str, float] = {}

    def take(self, states: list[dict[str, Any]], now: float) -> None:
        """Store these states; `now` is in seconds of any monotonic clock."""
        elapsed_s = now - self._taken_at
        if self._states and elapsed_s > 0:
            for name, counted in RATES.items():
                more = _total(states, counted) - _total(self._states, counted)
                self._rates[name] = round(max(more, 0) / elapsed_s, 6)
        self._states, self._taken_at = states, now

    def rates(self, now: float) -> dict[str, float]:
        """Return rates per second between the last two states: empty before that, 0 when the engine has gone silent."""
        return self._rates if now - self._taken_at < SILENT_S else dict.fromkeys(self._rates, 0.0)

    @property
    def remaining_s(self) -> float:
        """Return how long the engine will take for all that is in flight, as it expected at the last look."""
        return max((float(state.get("remaining_s", 0.0)) for state in self._states), default=0.0)

    @property
    def summary(self) -> list[dict[str, Any]]:
        """Return the heartbeat's fields for each rank, including the series of its steps."""
        return [{name: state[name] for name in HEARTBEAT if name in state} for state in self._states]

    def collect(self) -> Iterable[Metric]:
        for kind, fields in ((CounterMetricFamily, COUNTERS), (GaugeMetricFamily, GAUGES)):
            for field, (name, text) in fields.items():
                family = kind(PREFIX + name, text, labels=LABELS)
                for rank, state in enumerate(self._states):
                    if field in state:
                        family.add_metric(self._labels(rank, state), state[field])
                yield family
        about = "KV cache tokens held by the requests of each end of the scan"
        by_end = GaugeMetricFamily(PREFIX + "kv_tokens", about, labels=(*LABELS, "end"))
        for rank, state in enumerate(self._states):
            for field, end in SIDES.items():
                if field in state:
                    by_end.add_metric([*self._labels(rank, state), end], state[field])
        yield by_end
        yield from self._of_classes()
        about = "Time since the last engine step while requests are in flight, otherwise 0"
        age = GaugeMetricFamily(PREFIX + "step_age_seconds", about, labels=LABELS)
        device = next((str(state["device"]) for state in self._states if state.get("device")), "real")
        age.add_metric([self._model, "all", device], self.step_age_s())
        yield age

    def _of_classes(self) -> Iterable[Metric]:
        """Yield how online requests of each class were served."""
        labels = (*LABELS, "tier")
        about = "Online requests that the engine has answered, by whether they kept the bounds of their class"
        ended = CounterMetricFamily(PREFIX + "online_requests", about, labels=(*labels, "kept"))
        about = "Seconds of the last thousand online requests: TTFT, and TPOT (mean time per token after the first)"
        times = GaugeMetricFamily(PREFIX + "online_latency_seconds", about, labels=(*labels, "of", "quantile"))
        for rank, state in enumerate(self._states):
            for each in state.get("online_classes", ()):
                named = [*self._labels(rank, state), each["tier"]]
                ended.add_metric([*named, "true"], each["ended"] - each["late"])
                ended.add_metric([*named, "false"], each["late"])
                for of in ("ttft", "tpot"):
                    for quantile, name in (("0.5", "p50"), ("0.99", "p99")):
                        times.add_metric([*named, of, quantile], each[f"{of}_{name}_s"])
        yield ended
        yield times

    def _labels(self, rank: int, state: dict[str, Any]) -> list[str]:
        return [self._model, str(rank), str(state.get("device") or "real")]


def _total(states: list[dict[str, Any]], fields: tuple[str, ...]) -> float:
    return sum(state.get(field, 0) for state in states for field in fields)
