"""The points of the charts: for a period that the page's address names, in the units that pages show."""

from typing import Any

from service.queue.progress import Event

RANGES = {"15m": 900, "1h": 3600, "6h": 6 * 3600, "24h": 24 * 3600, "7d": 7 * 24 * 3600}
RANGE = "1h"
EVENT_WORDS = {
    "start": "became ready",
    "stop": "shut down cleanly",
    "death": "fell silent",
    "back": "was heard again",
    "exit": "died",
}
# Shares of the KV cache's capacity, by the point's name of the tokens.
_OF_KV = {
    "kv_left": "kv_of_left",
    "kv_right": "kv_of_right",
    "kv_online": "online_kv",
    "kv_kept": "kv_kept_for_online",
    "kv_batches": "kv_of_batches",
}
_SHARES = {"compute": "compute_per_second", "reads": "reads_per_second", "online": "online_seconds_per_second"}


def ranged(wanted: str) -> str:
    """Return this range if it is one of RANGES, otherwise the default."""
    return wanted if wanted in RANGES else RANGE


def charted(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points with shares of capacity and of time as percentages, and retractions per minute."""
    return [{**point, **_derived(point)} for point in points]


def _derived(point: dict[str, Any]) -> dict[str, float | None]:
    capacity = point.get("kv_capacity") or None
    found: dict[str, float | None] = {
        name: None if capacity is None else 100 * point.get(tokens, 0) / capacity for name, tokens in _OF_KV.items()
    }
    for name, seconds in (*_SHARES.items(), ("excess", "batches_seconds_per_second")):
        found[name] = None if point.get(seconds) is None else 100 * point[seconds]
    cached = point.get("cached_share")
    found["cached"] = None if cached is None else 100 * cached
    found["retractions"] = 60 * point.get("retractions_per_second", 0.0)
    return found


def marks(events: list[Event], since: float) -> list[dict[str, Any]]:
    """Return what a chart marks: what happened to workers since then, the oldest first."""
    told = [
        {"at": each.at, "kind": each.kind, "text": f"{each.name} {EVENT_WORDS[each.kind]}"}
        for each in events
        if each.at >= since
    ]
    return sorted(told, key=lambda each: each["at"])
