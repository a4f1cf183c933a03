"""Every key in Redis. All of it can be wiped at any moment: SQL is the truth, and the reconciler rebuilds this."""


def stream(model: str) -> str:
    """Stream of slice ids for the workers of a model; the braces keep a model's keys on one cluster node."""
    return f"batchweave:{{{model}}}:slices"


def announced(model: str) -> str:
    """Set of the slice ids that are in the stream."""
    return f"batchweave:{{{model}}}:announced"


def progress(batch_id: str) -> str:
    """Hash by slice id of counts, for slices that are running."""
    return f"batchweave:progress:{batch_id}"


def worker(name: str) -> str:
    """Heartbeat of a worker, as JSON; it expires."""
    return f"batchweave:worker:{name}"


def starting(name: str) -> str:
    """A worker whose engine starts, as JSON; it expires."""
    return f"batchweave:starting:{name}"


def rate(project_id: str, minute: int) -> str:
    """How many requests a project sent to the API in this minute since 1970; it expires."""
    return f"batchweave:rate:{project_id}:{minute}"


def batch_history(batch_id: str) -> str:
    """List of points: how far the batch was, and when; it expires."""
    return f"batchweave:history:{batch_id}"


HISTORY = "batchweave:history"  # list of points: what all workers did
PACES = "batchweave:paces"  # by model, how fast its workers answer, as JSON; it expires
HISTORY_TURN = "batchweave:history-turn"  # whether this point is taken already
WORKERS = "batchweave:workers"  # set of the names that have a heartbeat, or had one
BELL = "batchweave:bell"  # channel: names of jobs that have something to do
GROUP = "workers"
