"""Provides cost models for the registered models on the machine that the settings name."""

import asyncio

from sqlalchemy import select

from engine_ext.costs.cost import CostModel
from service.db.sessions import Database
from service.db.tables import Model
from service.estimates.model_costs import FALLBACK, planning_costs
from service.settings import Settings


class Costs:
    """Builds the cost models of registered models and caches them."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._known: dict[str, CostModel] = {}

    async def of(self, model: str) -> CostModel:
        """Return a model's cost model on the settings' machine, read from the source that its workers registered."""
        async with self._database.read() as session:
            source = await session.scalar(select(Model.source).where(Model.name == model)) or model
        if source not in self._known:
            tp = self._settings.engine_args.get("tp_size", 1)
            found = await asyncio.to_thread(
                planning_costs, source, self._settings.gpu, tp if isinstance(tp, int) else 1
            )
            if found.shape.name == FALLBACK != source:
                return found  # not cached: the model's config may be readable next time
            self._known[source] = found
        return self._known[source]
