"""/v1/models: the models that batches of this service can use."""

from typing import Annotated

from fastapi import APIRouter
from pydantic import StringConstraints
from sqlalchemy import select

from service.api.caller import CalledBy
from service.api.context import InContext
from service.api.shapes import ModelObject, Page
from service.db.tables import Model
from service.errors import NotFound

router = APIRouter(prefix="/v1/models", tags=["models"])


@router.get("")
async def list_models(context: InContext, _caller: CalledBy) -> Page[ModelObject]:
    async with context.database.read() as session:
        rows = (await session.scalars(select(Model).order_by(Model.name))).all()
    return Page[ModelObject].of([ModelObject(id=row.name, created=row.created_at) for row in rows], len(rows))


@router.get("/{name:path}")
async def get_model(
    name: Annotated[str, StringConstraints(pattern=r"^[^\x00]+$")], context: InContext, _caller: CalledBy
) -> ModelObject:
    async with context.database.read() as session:
        row = (await session.scalars(select(Model).where(Model.name == name))).one_or_none()
    if row is None:
        raise NotFound(f"This service has no model {name!r}.", code="model_not_found", param="model")
    return ModelObject(id=row.name, created=row.created_at)
