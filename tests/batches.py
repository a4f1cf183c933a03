"""Creates batches as the API does, without the API."""

from service import ids
from service.db.sessions import Database
from service.db.tables import Batch, BatchStatus, File
from service.objects.storage import Storage, file_key

CHAT = "/v1/chat/completions"
DAY_S = 24 * 3600


async def create_batch(database: Database, storage: Storage, data: bytes, now: float, window_s: int = DAY_S) -> str:
    """Store a file of chat requests and a batch that waits for its validation; return the batch's id."""
    file_id, batch_id, created_at = ids.file_id(), ids.batch_id(), int(now)
    await storage.put(file_key(file_id), data)
    file = File(id=file_id, purpose="batch", filename="in.jsonl", size_bytes=len(data), created_at=created_at)
    batch = Batch(
        id=batch_id,
        status=BatchStatus.VALIDATING,
        endpoint=CHAT,
        input_file_id=file_id,
        completion_window="24h",
        created_at=created_at,
        expires_at=created_at + window_s,
    )
    async with database.write() as session:
        session.add_all([file, batch])
    return batch_id
