"""Worker objects as clients read them."""

from typing import Any, Literal

from pydantic import BaseModel, Field

from service.queue.progress import STALLED_S

WorkerState = Literal["working", "idle", "stalled", "draining", "starting"]


class GpuObject(BaseModel):
    """A GPU of a worker's machine as its driver sees it; what it does not say is null."""

    gpu: str = Field(description="Number or UUID")
    product: str
    memory_used_bytes: int | None
    memory_bytes: int | None
    busy: float | None = Field(description="Share of the last second or less in which a kernel ran")
    celsius: int | None
    uncorrected_errors: int | None = Field(
        description="Memory errors since the driver started that ECC did not correct"
    )
    is_lost: bool = Field(description="Whether the driver no longer reaches it")


class WorkerObject(BaseModel):
    """A worker that is alive or whose engine is starting.

    Rates cover the last few seconds; they are null until its engine has run a step.
    """

    id: str
    object: Literal["worker"] = "worker"
    model: str
    host: str
    pid: int | None = Field(default=None, description="Its process on `host`; SIGTERM ends it cleanly")
    followers: list[str] = []  # hosts of the other nodes of its engine
    machine: str  # its accelerators, or CPU; an emulated device says so
    state: WorkerState
    slices: int
    requests: int
    online_requests: int | None = None  # null: it takes none
    started_at: int
    seen_at: int
    starting_s: float | None = None  # how long its engine has been starting
    stage: str | None = None  # what it is doing while it starts
    step_age_s: float = 0.0  # seconds since a step ended, while requests wait
    steps_per_second: float | None
    tokens_per_second: float | None
    is_timed: bool = True  # whether the cost model describes its machine
    gpus: list[GpuObject] = []  # of its first machine
    cost_model_error: float | None  # error of predicted step times, as a share of the measured ones

    @classmethod
    def of(cls, state: dict[str, Any], is_drained: bool) -> "WorkerObject":
        """Build the object from a heartbeat; that of an older worker may lack some keys."""
        engine = state.get("engine") or []
        measured = sum(rank.get("step_s", 0.0) for rank in engine)
        predicted = sum(rank.get("predicted_step_s", 0.0) for rank in engine)
        return cls(
            id=state["name"],
            model=state["model"],
            host=state.get("host", ""),
            pid=state.get("pid"),
            followers=state.get("followers", []),
            machine=next((rank["device"] for rank in engine if rank.get("device")), state.get("machine", "")),
            state=_worker_state(state, is_drained),
            step_age_s=state.get("step_age_s", 0.0),
            slices=state["slices"],
            requests=state["requests"],
            online_requests=state.get("online_requests"),
            started_at=state.get("started_at", 0),
            seen_at=state.get("seen_at", 0),
            steps_per_second=state.get("steps_per_second"),
            tokens_per_second=state.get("tokens_per_second"),
            is_timed=state.get("is_timed", True),
            gpus=[GpuObject.model_validate(each) for each in state.get("gpus", [])],
            cost_model_error=round(abs(predicted / measured - 1), 4) if measured else None,
        )

    @classmethod
    def of_starting(cls, state: dict[str, Any], now: float) -> "WorkerObject":
        return cls(
            id=state["name"],
            model=state["model"],
            host=state["host"],
            pid=state.get("pid"),
            machine=state.get("machine", ""),
            is_timed=state.get("is_timed", True),
            state="starting",
            slices=0,
            requests=0,
            started_at=int(now - state["starting_s"]),
            seen_at=int(now),
            starting_s=state["starting_s"],
            stage=state.get("stage"),
            steps_per_second=None,
            tokens_per_second=None,
            cost_model_error=None,
        )


def _worker_state(state: dict[str, Any], is_drained: bool) -> WorkerState:
    if state.get("step_age_s", 0.0) > STALLED_S:
        return "stalled"
    return "draining" if is_drained else "working" if state["slices"] or state.get("online_requests") else "idle"


class WorkerResumed(BaseModel):
    id: str
    object: Literal["worker"] = "worker"
    drained: bool = False
