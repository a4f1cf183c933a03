"""/metrics of the API, for operators: what this process served, and what is waiting and running in the service."""

from collections.abc import Iterable

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest
from prometheus_client.core import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from service.api.caller import CalledByMonitor
from service.api.context import InContext
from service.metrics.queue import queue_metrics, room_metrics

router = APIRouter(tags=["health"])


class _Given(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


@router.get("/metrics", response_class=Response)
async def metrics(context: InContext, _caller: CalledByMonitor) -> Response:
    """Return metrics in Prometheus' text format.

    If the API requires keys, send one with the role monitor or operator as the bearer token.
    """
    registry = CollectorRegistry()
    families = await queue_metrics(context.database, context.heartbeat, context.clock())
    if room := context.storage.room:
        families += room_metrics(room)
    registry.register(_Given(families))
    return Response(generate_latest(REGISTRY) + generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
