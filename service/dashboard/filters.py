"""The filters of the list of batches, as chosen in its form."""

import json
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any

from fastapi import Query
from sqlalchemy import ColumnElement, Select, String, cast, exists, or_, select

from service.dashboard.standings import GROUPS
from service.db.clock import DAY_S
from service.db.models import asks_for
from service.db.tables import Batch, File
from service.db.tenant_tables import Project
from service.endpoints import ModelName

NO_NUL = r"^[^\x00]*$"
Day = Annotated[str, Query(pattern=r"^(\d{4}-\d{2}-\d{2})?$")]


@dataclass(frozen=True, slots=True)
class Filters:
    """The chosen filters. Empty ones are ignored. Days are days of creation in UTC, and both are included."""

    state: Annotated[str, Query(max_length=20)] = ""  # a key of GROUPS
    model: Annotated[str, Query(max_length=512, pattern=NO_NUL)] = ""
    project: Annotated[str, Query(max_length=128, pattern=NO_NUL)] = ""
    since: Day = ""
    until: Day = ""
    text: Annotated[str, Query(max_length=256, pattern=NO_NUL)] = ""

    @property
    def chosen(self) -> dict[str, str]:
        return {name: value for name, value in asdict(self).items() if value}

    def of(self, query: Select[Any]) -> Select[Any]:
        """Return the query restricted by these filters."""
        wanted: list[ColumnElement[bool]] = [Batch.deleted_at.is_(None)]
        if self.state in GROUPS:
            wanted.append(GROUPS[self.state])
        if self.model:
            wanted.append(asks_for(ModelName.of(self.model)))
        if self.project:
            wanted.append(Batch.project_id.in_(select(Project.id).where(Project.name == self.project)))
        begin, end = _midnight(self.since), _midnight(self.until)
        if begin is not None:
            wanted.append(Batch.created_at >= begin.timestamp())
        if end is not None:
            wanted.append(Batch.created_at < end.timestamp() + DAY_S)
        if self.text:
            ids = (place.contains(self.text, autoescape=True) for place in (Batch.id, Batch.input_file_id))
            metadata = cast(Batch.custom_metadata, String)  # JSON, in which non-ASCII letters are escaped
            file = File.filename.icontains(self.text, autoescape=True)
            named = exists().where(File.id == Batch.input_file_id, file).correlate(Batch)  # one look for each batch
            wanted.append(or_(*ids, named, metadata.icontains(json.dumps(self.text)[1:-1], autoescape=True)))
        return query.where(*wanted)


def _midnight(day: str) -> datetime | None:
    """Return the start of the day in UTC; None if the day is empty or not in the calendar."""
    try:
        return datetime.strptime(day, "%Y-%m-%d").replace(tzinfo=UTC) if day else None
    except ValueError:
        return None
