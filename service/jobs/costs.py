"""Provides cost models for the registered models on the machines of their workers."""

import asyncio
import json
from typing import Any

import structlog
from sqlalchemy import select

from engine_ext.costs.cost import CostModel
from service.db.sessions import Database
from service.db.tables import Model
from service.errors import CostsError
from service.estimates.model_costs import FALLBACK, assumed_gpu, planning_costs
from service.settings import Settings

log = structlog.get_logger()


class Costs:
    """Builds the cost models of registered models and caches them."""

    def __init__(self, database: Database, settings: Settings) -> None:
        self._database = database
        self._settings = settings
        self._known: dict[str, CostModel] = {}

    async def of(self, model: str) -> CostModel:
        """Return a model's costs on the machine of its newest worker, or on that of the settings if none is known.

        The model is read from the source that is registered.
        """
        async with self._database.read() as session:
            row = (await session.scalars(select(Model).where(Model.name == model))).one_or_none()
        source = row.source if row else model
        tp = self._settings.engine_args.get("tp_size", 1)
        ours: dict[str, Any] = {"gpu": assumed_gpu(self._settings), "tp": tp if isinstance(tp, int) else 1}
        machine = (row.machine if row else None) or ours
        key = json.dumps([source, machine], sort_keys=True)
        if key not in self._known:
            try:
                found = await asyncio.to_thread(planning_costs, source, machine["gpu"], machine["tp"])
            except (CostsError, LookupError, TypeError) as error:  # a worker of another version
                log.warning("planned for another machine than the worker's", model=model, error=repr(error))
                found = await asyncio.to_thread(planning_costs, source, ours["gpu"], ours["tp"])
            if found.shape.name == FALLBACK != source:
                return found  # not cached: the model's config may be readable next time
            self._known[key] = found
        return self._known[key]
