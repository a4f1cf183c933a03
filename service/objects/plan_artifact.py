"""The plan of a window in object storage: a human-readable header, and the order as fixed-size records."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.objects.plan_picture import PlanPicture
from service.objects.storage import Storage

# The batch's position in the header's list, and the number of the request in that batch.
PLACE = np.dtype([("batch", "<u4"), ("request", "<u4")])

# Where a request's line is in its batch's input file, and by what the lengths of its answers are remembered.
LINE = np.dtype([("offset", "<u8"), ("length", "<u4"), ("beginning", "<i8"), ("kind", "<i8")])

SLICE_BYTES = 64 << 20  # of the lines of a slice, which a worker reads at once
MOST_REMEMBERED = 16  # plans
_batches: OrderedDict[str, list[str]] = OrderedDict()  # of a plan, by its id; the last ones that were asked for

Places = NDArray[np.void]
Lines = NDArray[np.void]


class PlanHeader(msgspec.Struct, frozen=True):
    """Describes the window. `slices` are [first, count] pairs of positions in the order.

    `sharing`: share of `compute_s` that shared prefixes can save; `sharing_kept`: the part of it that this order keeps.
    Seconds and density are estimates for the machine named in `planned_for`; density is None where nothing is read.
    """

    model: str
    batches: list[str]
    requests: int
    prompt_tokens: int
    sharing: float
    sharing_kept: float
    density: float | None
    compute_s: float
    memory_s: float
    planned_for: str
    slices: list[tuple[int, int]]
    created_at: int
    version: int = 1


@dataclass(frozen=True, slots=True)
class PlanArtifact:
    """One plan's objects: its header, its order and its picture."""

    storage: Storage
    plan_id: str

    @property
    def folder(self) -> str:
        return f"plans/{self.plan_id}"

    async def write(
        self,
        header: PlanHeader,
        order: Places,
        lines: Lines | None = None,
        picture: PlanPicture | None = None,
        texts: Sequence[str] = (),
    ) -> None:
        if texts:
            await self.storage.put(f"{self.folder}/texts.json", msgspec.json.encode(texts))
        await self.storage.put(f"{self.folder}/order", order.tobytes())
        if lines is not None:
            await self.storage.put(f"{self.folder}/lines", lines.tobytes())
        if picture is not None:
            await self.storage.put(f"{self.folder}/picture.json", msgspec.json.encode(picture))
        await self.storage.put(f"{self.folder}/plan.json", msgspec.json.format(msgspec.json.encode(header)))

    async def header(self) -> PlanHeader:
        return msgspec.json.decode(await self.storage.read(f"{self.folder}/plan.json"), type=PlanHeader)

    async def batches(self) -> list[str]:
        """Return the header's batches. They are remembered, as a worker runs many slices of a window."""
        found = _batches.pop(self.plan_id, None) or (await self.header()).batches
        _batches[self.plan_id] = found
        if len(_batches) > MOST_REMEMBERED:
            _batches.popitem(last=False)
        return found

    async def picture(self) -> PlanPicture:
        """Return the plan's picture. Raises FileNotFoundError if the plan is gone or has none."""
        return msgspec.json.decode(await self.storage.read(f"{self.folder}/picture.json"), type=PlanPicture)

    async def texts(self) -> list[str]:
        """Return the texts of the picture's boxes; none if they are deleted."""
        try:
            return msgspec.json.decode(await self.storage.read(f"{self.folder}/texts.json"), type=list[str])
        except FileNotFoundError:
            return []

    async def delete_texts(self) -> None:
        """Delete what the picture says of requests; of an older version's plan, which has it inside, the picture."""
        await self.storage.delete(f"{self.folder}/texts.json")
        try:
            has_text = any(box.text for box in (await self.picture()).boxes)
        except FileNotFoundError:
            return
        if has_text:
            await self.storage.delete(f"{self.folder}/picture.json")

    async def places(self, first: int, count: int) -> Places:
        size: Any = PLACE.itemsize
        data = await self.storage.read_range(f"{self.folder}/order", first * size, count * size)
        return np.frombuffer(data, dtype=PLACE)

    async def lines(self, first: int, count: int) -> Lines:
        """Return the lines at these places. Raises FileNotFoundError if the plan does not have them."""
        size: Any = LINE.itemsize
        data = await self.storage.read_range(f"{self.folder}/lines", first * size, count * size)
        return np.frombuffer(data, dtype=LINE)

    async def delete(self) -> None:
        await self.storage.delete_all(self.folder)
