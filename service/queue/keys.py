"""Names every key in Redis. Redis can be wiped at any time: SQL is the truth, and the reconciler rebuilds the rest."""


def ready(model: str) -> str:
    """Return the key of a model's list of announced slices; the braces keep a model's keys on one cluster node."""
    return f"batchweave:{{{model}}}:ready"


def taken(model: str) -> str:
    """Return the key of the hash that says when, in milliseconds, each slice was taken that is not claimed yet."""
    return f"batchweave:{{{model}}}:taken"


def more(model: str) -> str:
    """Return the key that exists while there may be ready slices besides the announced ones."""
    return f"batchweave:{{{model}}}:more"


def wakes(model: str) -> str:
    """Return the key of the stream whose last entry says when slices were last announced; idle workers wait for it."""
    return f"batchweave:{{{model}}}:wakes"


def crew(model: str) -> str:
    """Return the key of the roll of a model's workers, with what each has in hand (`crew.py`)."""
    return f"batchweave:{{{model}}}:crew"


def nodes(engine: str) -> str:
    """Return the key of the roll of the nodes of one engine (`roll.py`)."""
    return f"batchweave:nodes:{engine}"


def progress(batch_id: str) -> str:
    """Return the key of the hash from running slices' ids to their counts."""
    return f"batchweave:progress:{batch_id}"


def worker(name: str) -> str:
    """Return the key of a worker's heartbeat: JSON, which expires."""
    return f"batchweave:worker:{name}"


def starting(name: str) -> str:
    """Return the key of the state of a worker whose engine is starting: JSON, which expires."""
    return f"batchweave:starting:{name}"


def rate(project_id: str, minute: int) -> str:
    """Return the key of the count of a project's API requests in this minute since 1970; it expires."""
    return f"batchweave:rate:{project_id}:{minute}"


def batch_history(batch_id: str) -> str:
    """Return the key of the list of a batch's progress over time; it expires."""
    return f"batchweave:history:{batch_id}"


def lost(digest: str) -> str:
    """Return the key of the set of workers that were lost with this online request; it expires."""
    return f"batchweave:{{losses}}:{digest}"


HISTORY = "batchweave:history"  # list of points: what all workers together did
LONG_HISTORY = "batchweave:history-week"  # the same of a week, with fewer points
WORKER_DEATHS = "batchweave:worker-deaths"  # list of workers that fell silent, as JSON; the newest are kept
DEATHS = "batchweave:deaths"  # how many workers and parts have died
WORKER_EVENTS = "batchweave:worker-events"  # the same of workers that start and stop
PACES = "batchweave:paces"  # by model, how fast its workers answer, as JSON; it expires
LONG_HISTORY_TURN = "batchweave:history-week-turn"
HISTORY_TURN = "batchweave:history-turn"  # exists while the current point is already taken
REFUSED = "batchweave:{losses}:refused"  # sorted set of digests of requests that kill workers, by when that ends
WORKERS = "batchweave:workers"  # set of the names of workers that have or had a heartbeat
BELL = "batchweave:bell"  # channel: names of jobs that have something to do
