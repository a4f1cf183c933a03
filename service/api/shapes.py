"""Response objects as OpenAI's clients read them: every key is present, null if it has no value. See also bodies.py."""

from collections.abc import Sequence
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, Field

from service import ids
from service.db.moves import TERMINAL
from service.db.tables import Batch, BatchStatus, File, OutputOrder, Upload, UploadStatus
from service.endpoints import ModelName
from service.estimates.outcomes import words_of
from service.estimates.preview import Preview
from service.estimates.standing import Standing, work_of
from service.objects.shards import RetryOutcome
from service.queue.counts import Counts

Item = TypeVar("Item")


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: str | None = None

    @classmethod
    def of(cls, file: File) -> "FileObject":
        return cls(
            id=file.id,
            bytes=file.size_bytes,
            created_at=file.created_at,
            expires_at=file.expires_at,
            filename=file.filename,
            purpose=file.purpose,
        )


class UploadObject(BaseModel):
    id: str
    object: Literal["upload"] = "upload"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: UploadStatus
    file: FileObject | None

    @classmethod
    def of(cls, upload: Upload, file: File | None) -> "UploadObject":
        return cls(
            id=upload.id,
            bytes=upload.size_bytes,
            created_at=upload.created_at,
            expires_at=upload.expires_at,
            filename=upload.filename,
            purpose=upload.purpose,
            status=UploadStatus(upload.status),
            file=FileObject.of(file) if file else None,
        )


class UploadPartObject(BaseModel):
    id: str
    object: Literal["upload.part"] = "upload.part"
    created_at: int
    upload_id: str


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchDeleted(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    deleted: Literal[True] = True


class BatchError(BaseModel):
    code: str
    line: int | None
    message: str
    param: str | None


class BatchErrors(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchError]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int


class BatchUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Cause(BaseModel):
    """A group of failed requests with similar errors; `message` and `custom_ids` are samples."""

    status_code: int | None
    code: str | None
    message: str
    count: int
    custom_ids: list[str]

    @classmethod
    def of(cls, cause: dict[str, Any], is_listed: bool) -> "Cause":
        found = cls(**cause)
        return found.model_copy(update={"custom_ids": found.custom_ids[:1]}) if is_listed else found


class UnknownParameter(BaseModel):
    """A parameter of the bodies of `lines` that is ignored, or does not do all that it says; the lines run anyway."""

    name: str
    lines: int
    similar: str | None = Field(description="The known parameter with the most similar name, if one is close")
    why: str | None = Field(None, description="Why it does not do what it says, if the engine knows it")


class UnknownField(BaseModel):
    """A field of the create that was ignored."""

    name: str
    similar: str | None = Field(description="The known field with the most similar name, if one is close")


# What figures in seconds of a GPU are for models on machines that the cost model does not describe.
NULL_UNLESS_TIMED = "null where the cost model does not describe the machine, such as a CPU"


class PlanPreview(BaseModel):
    """What a held batch would need if nothing else ran. A long batch is judged by its first `requests` requests."""

    requests: int
    prompt_sharing: float = Field(
        description="Largest possible share of the prompt tokens that earlier requests have already computed"
    )
    compute_seconds: float | None = Field(description=f"By the cost model; {NULL_UNLESS_TIMED}")
    memory_seconds: float | None = Field(description=f"By the cost model; {NULL_UNLESS_TIMED}")
    planned_for: str | None = Field(description="Model and machine; null where the seconds are")

    @classmethod
    def of(cls, found: Preview, is_timed: bool) -> "PlanPreview":
        return cls(
            requests=found.requests,
            prompt_sharing=round(found.prompt_sharing, 4),
            compute_seconds=round(found.compute_s, 6) if is_timed else None,
            memory_seconds=round(found.memory_s, 6) if is_timed else None,
            planned_for=found.planned_for if is_timed else None,
        )


class Outcomes(BaseModel):
    """What the answers so far are worth to their requests."""

    ok: int
    cut_off: int = Field(description="Ended by max_tokens, or by the model's context length")
    looped: int = Field(description="Cut off while the model repeated itself")
    invalid: int = Field(description="Ended, and are not the JSON that the request asked for")
    refused: int = Field(description="The model refused, or a filter ended the answer")
    failed: int
    not_accepted: int = Field(
        description="Of those that failed, the ones with an answer that the batch does not accept"
    )

    @classmethod
    def of(cls, counts: Counts) -> "Outcomes":
        bad = counts.cut_off + counts.looped + counts.invalid + counts.refused
        return cls(
            ok=counts.completed - bad,
            cut_off=counts.cut_off,
            looped=counts.looped,
            invalid=counts.invalid,
            refused=counts.refused,
            failed=counts.failed,
            not_accepted=counts.not_accepted,
        )


class BatchExtras(BaseModel):
    """Fields beyond OpenAI's batch object. Times are in Unix seconds."""

    output_order: OutputOrder
    retry_of: str | None
    retry_outcomes: list[RetryOutcome] | None = Field(description="Whose requests of `retry_of` run again; or null")
    max_tokens: int | None = Field(description="Limit of tokens that a retry sets for each answer")
    queue_position: int | None = Field(description="Number of batches of the same model with an earlier deadline")
    waiting_for: str | None = Field(description="What the batch is waiting for, while none of its requests runs")
    accept: dict[str, Any] | None = Field(description="Which answers are good enough, as the create said")
    held: bool = Field(description="Whether the batch waits for POST /v1/batches/{id}/start before it runs")
    preview: PlanPreview | None
    prompt_tokens: int
    expected_output_tokens: int | None = Field(description="From the plan or the preview; null before either")
    expected_gpu_seconds: float | None = Field(
        description=f"The minimum according to the cost model; null before the plan or the preview; {NULL_UNLESS_TIMED}"
    )
    expected_cost: float | None = Field(
        description="Cost of `expected_gpu_seconds` at the price in BATCHWEAVE_WORKER_HOUR_PRICE"
    )
    earliest_at: int | None = Field(description=f"Estimated end by the planner's cost model; {NULL_UNLESS_TIMED}")
    expected_at: int | None = Field(
        description="Estimated end at the pace of the model's answers, with earlier deadlines served first"
    )
    latest_at: int | None = Field(
        description="Estimated end as in `expected_at`, but after all work that engines already have, "
        "plus two standard errors"
    )
    late_because: str | None = Field(
        description="Why the batch will miss its deadline, if only online requests make it late; otherwise null"
    )
    early_output_file_id: str | None = Field(
        description="Output file that is readable from the first answer on and only grows at its end"
    )
    early_error_file_id: str | None
    unknown_parameters: list[UnknownParameter] = Field(
        description="What is ignored because no engine knows it, or does not do what it says, such as a keyword of "
        "a schema that no grammar enforces; once the file is checked; at most 16, those first that may be mistakes"
    )
    unknown_fields: list[UnknownField] = Field(description="Fields of the create that were ignored; at most 16")
    failures: list[Cause] = Field(
        description="Causes of the failed requests, once the batch is finished; in lists the ten largest, with one "
        "custom_id each"
    )
    outcomes: Outcomes
    outcome_warnings: list[str] = Field(
        description="A sentence for each outcome but ok that more than 5% of the answers have; from 20 answers on, and "
        "at the end"
    )

    @classmethod
    def of(
        cls, batch: Batch, counts: Counts, found: Standing, hour_price: float | None, most_causes: int | None
    ) -> "BatchExtras":
        work, preview = work_of(batch), Preview.of(batch)
        gpu_s = work.gpu_s if work is not None and found.is_timed else None
        cost = None if gpu_s is None or hour_price is None else gpu_s / 3600 * hour_price
        grows = batch.output_order == OutputOrder.ANY
        early = ids.early_file_ids(batch.id) if grows else (None, None)
        return cls(
            output_order=OutputOrder(batch.output_order),
            retry_of=batch.retry_of,
            retry_outcomes=_repeated(batch),
            max_tokens=batch.max_tokens,
            queue_position=found.position,
            waiting_for=found.waiting_for,
            prompt_tokens=batch.prompt_tokens,
            held=batch.held,
            accept=batch.accept,
            preview=PlanPreview.of(preview, found.is_timed) if preview else None,
            expected_output_tokens=work and round(work.output_tokens),
            expected_gpu_seconds=None if gpu_s is None else round(gpu_s, 6),
            expected_cost=None if cost is None else round(cost, 6),
            earliest_at=found.estimate.earliest_at,
            expected_at=found.estimate.expected_at,
            latest_at=found.estimate.latest_at,
            late_because=found.late_because,
            early_output_file_id=early[0],
            early_error_file_id=early[1],
            unknown_parameters=[UnknownParameter(**each) for each in batch.unknown_parameters or []],
            unknown_fields=[UnknownField(**each) for each in batch.unknown_fields or []],
            failures=[Cause.of(cause, most_causes is not None) for cause in (batch.causes or [])[:most_causes]],
            outcomes=Outcomes.of(counts),
            outcome_warnings=words_of(counts, batch.status in TERMINAL),
        )


def _repeated(batch: Batch) -> list[RetryOutcome] | None:
    """Return the outcomes that a retry repeats, None for other batches."""
    if batch.retry_of is None:
        return None
    return [RetryOutcome(each) for each in batch.retry_outcomes or [RetryOutcome.FAILED]]


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage | None
    metadata: dict[str, str] | None
    batchweave: BatchExtras

    @classmethod
    def of(
        cls, batch: Batch, counts: Counts, found: Standing, hour_price: float | None, most_errors: int | None = None
    ) -> "BatchObject":
        errors = (batch.errors or [])[:most_errors]
        return cls(
            id=batch.id,
            endpoint=batch.endpoint,
            model=None if batch.model is None else str(ModelName(batch.model, batch.adapter)),
            errors=BatchErrors(data=[BatchError(**error) for error in errors]) if errors else None,
            input_file_id=batch.input_file_id,
            completion_window=batch.completion_window,
            status=BatchStatus(batch.status),
            output_file_id=batch.output_file_id,
            error_file_id=batch.error_file_id,
            created_at=batch.created_at,
            in_progress_at=batch.in_progress_at,
            expires_at=batch.expires_at,
            finalizing_at=batch.finalizing_at,
            completed_at=batch.completed_at,
            failed_at=batch.failed_at,
            expired_at=batch.expired_at,
            cancelling_at=batch.cancelling_at,
            cancelled_at=batch.cancelled_at,
            request_counts=RequestCounts(total=batch.total, completed=counts.completed, failed=counts.failed),
            usage=BatchUsage(
                input_tokens=counts.input_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=counts.cached_tokens),
                output_tokens=counts.output_tokens,
                output_tokens_details=OutputTokensDetails(reasoning_tokens=counts.reasoning_tokens),
                total_tokens=counts.input_tokens + counts.output_tokens,
            ),
            metadata=batch.custom_metadata,
            batchweave=BatchExtras.of(batch, counts, found, hour_price, most_errors),
        )


class ModelObject(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["batchweave"] = "batchweave"


class Page(BaseModel, Generic[Item]):
    """One page of a list; `has_more` is true exactly when an item follows `last_id`."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, items: Sequence[Any], limit: int) -> "Page[Item]":
        """Build a page from up to `limit + 1` items; the extra one shows that there are more."""
        shown = list(items[:limit])
        return cls(
            data=shown,
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(items) > limit,
        )
