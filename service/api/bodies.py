"""Request bodies, checked field by field. Responses are in shapes.py."""

import json
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from service.db.tables import OnLongLine, OutputOrder
from service.db.webhook_events import EventType
from service.objects.request_output import MOST_TOKENS
from service.objects.shards import RetryOutcome
from service.requests.accept import MOST_RETRIES, Accept

# The id of a file, batch, project or key; an id that no object can have is refused without a lookup.
ObjectId = Annotated[str, StringConstraints(max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
MOST_UNKNOWN, MOST_NAME = 16, 64  # fields that are named, and characters of each


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=3600, le=2592000)]


class CreateUpload(BaseModel):
    model_config = ConfigDict(extra="forbid")

    bytes: Annotated[int, Field(ge=0, le=5 * 1024**4)]
    filename: Annotated[str, StringConstraints(min_length=1, max_length=1024)]
    mime_type: Annotated[str, StringConstraints(max_length=256)]
    purpose: Literal["batch"]
    expires_after: ExpiresAfter | None = None


class CompleteUpload(BaseModel):
    model_config = ConfigDict(extra="forbid")

    part_ids: Annotated[list[ObjectId], Field(max_length=10_000)]
    md5: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{32}$")] | None = None

    @model_validator(mode="before")
    @classmethod
    def has_few_fields(cls, given: Any) -> Any:
        """Refuse thousands of unknown fields as one: the ids make this body a large one, and each would be an error."""
        if isinstance(given, dict) and len(given) > MOST_UNKNOWN:
            raise ValueError(f"has more than {MOST_UNKNOWN} fields")
        return given


MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class AcceptExtras(BaseModel):
    """Which answers are good enough, and what is done about others."""

    model_config = ConfigDict(extra="forbid")

    finish: Annotated[
        Literal["stop"] | None,
        Field(description="`stop`: an answer that is cut off, looped or refused is not accepted"),
    ] = None
    json_schema: Annotated[
        bool,
        Field(alias="schema", description="An answer that is not the whole JSON that was asked for is not accepted"),
    ] = False
    retries: Annotated[
        int,
        Field(ge=0, le=MOST_RETRIES, description="How often to ask again instead of an answer that is not accepted"),
    ] = 0
    more: Annotated[
        int,
        Field(alias="continue", ge=0, le=MOST_TOKENS, description="Tokens beyond the limit of an answer's request"),
    ] = 0
    loops: Annotated[
        Literal["stop"] | None,
        Field(description="`stop`: an answer ends where it repeats itself; a thought that does is closed"),
    ] = None
    thinking_tokens: Annotated[
        int | None,
        Field(ge=0, le=MOST_TOKENS, description="How many tokens a model that reasons may think before it answers"),
    ] = None
    explain: Annotated[
        bool, Field(description="Another try is shown an answer that is not valid, and told what is wrong with it")
    ] = False

    @model_validator(mode="after")
    def has_a_reason(self) -> "AcceptExtras":
        Accept.of(self.model_dump(by_alias=True))
        return self

    @property
    def chosen(self) -> dict[str, Any]:
        """What differs from the defaults, as a batch's row has it."""
        return self.model_dump(by_alias=True, exclude_defaults=True)


class CreateExtras(BaseModel):
    """Options beyond OpenAI's API. The OpenAI client sends them with `extra_body={"batchweave": {...}}`."""

    model_config = ConfigDict(extra="forbid")

    output_order: OutputOrder = OutputOrder.ANY
    on_long_line: Annotated[
        OnLongLine,
        Field(
            description="What fails if a request is longer than the model's context: only that request's line, or the "
            "whole file, before it runs"
        ),
    ] = OnLongLine.FAIL_LINE
    accept: Annotated[
        AcceptExtras | None, Field(description="Which answers are good enough; without it all of them are")
    ] = None
    hold: Annotated[
        bool,
        Field(description="Validate the batch and preview its plan, but run nothing until POST /v1/batches/{id}/start"),
    ] = False


class CreateBatch(BaseModel):
    model_config = ConfigDict(extra="allow")  # other clients send fields of their own; the batch names them

    input_file_id: ObjectId
    endpoint: str
    completion_window: Annotated[
        str,
        StringConstraints(pattern=r"^[1-9][0-9]{0,3}[mhd]$"),
        Field(description="24h, or any other <n>m, <n>h or <n>d; at most 30d"),
    ]
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None
    output_expires_after: ExpiresAfter | None = None
    batchweave: CreateExtras = CreateExtras()

    @property
    def unknown_fields(self) -> list[dict[str, str | None]]:
        """Return the names of the fields that are ignored, each with the most similar name that is known."""
        known = [*CreateBatch.model_fields, *CreateExtras.model_fields]
        names = [name[:MOST_NAME] for name in (self.model_extra or {}) if name.isprintable()][:MOST_UNKNOWN]
        return [{"name": name, "similar": next(iter(get_close_matches(name, known, 1)), None)} for name in names]


class RetryBatch(BaseModel):
    model_config = ConfigDict(extra="forbid")

    outcomes: Annotated[
        list[RetryOutcome],
        Field(min_length=1, max_length=len(RetryOutcome), description="Whose requests run again"),
    ] = [RetryOutcome.FAILED]
    max_tokens: Annotated[
        int | None,
        Field(ge=1, le=MOST_TOKENS, description="Limit of tokens of each answer, in place of its request's own"),
    ] = None
    accept: Annotated[
        AcceptExtras | None,
        Field(description="Which answers are good enough; left out: as the batch said; null: all of them"),
    ] = None


EventTypeList = Annotated[list[EventType], Field(min_length=1, max_length=16)]
WebhookName = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^\x00]+$")]
WebhookUrl = Annotated[str, StringConstraints(min_length=1, max_length=2048, pattern=r"^[\x21-\x7e]+$")]


class CreateWebhook(BaseModel):
    name: WebhookName
    url: WebhookUrl
    event_types: EventTypeList


class UpdateWebhook(BaseModel):
    name: WebhookName | None = None
    url: WebhookUrl | None = None
    event_types: EventTypeList | None = None


class RotateSecret(BaseModel):
    keep_old_secret_active_for_24_hours: bool = False


class TestWebhook(BaseModel):
    event_type: EventType


OTHER_FIELDS = sorted(
    {name for each in (ExpiresAfter, CreateUpload, CompleteUpload, RetryBatch) for name in each.model_fields}
)


def explain(error: Mapping[str, Any]) -> str:
    """Return pydantic's error for a field in words that say what would be valid."""
    field = str(error["loc"][-1])
    if error["type"] == "string_pattern_mismatch" and field in ("completion_window", "window"):
        return f"must be a whole number of minutes, hours or days, such as 24h, 30m, 7d, not {error['input']!r:.40}"
    if error["type"] == "extra_forbidden":
        is_ours = "batchweave" in error["loc"]
        nearest = get_close_matches(field, CreateExtras.model_fields if is_ours else OTHER_FIELDS, 1)
        if nearest:
            return f"unknown field; did you mean {nearest[0]!r}?"
        return f"unknown field; the fields are {', '.join(CreateExtras.model_fields)}." if is_ours else "unknown field"
    if error["type"] == "missing":
        return "is missing" + (": write 24h, 30m or 7d" if field == "completion_window" else "")
    if error["type"] in ("string_pattern_mismatch", "string_too_short") and error.get("input") == "":
        return "is empty"
    if error["type"] == "string_pattern_mismatch":
        return f"is not valid: {json.dumps(error['input'], ensure_ascii=False):.60}"
    if error["type"] in ("too_long", "too_short"):
        least, most = error["ctx"].get("min_length"), error["ctx"].get("max_length")
        wanted = f"at least {least} must be there" if most is None else f"at most {most} are allowed"
        found = error["ctx"].get("actual_length") or "too many"  # pydantic counts no further in some
        return f"has {found} entries; {wanted}"
    if error["type"] in ("model_attributes_type", "model_type", "dict_type"):
        return "must be an object"
    return str(error["msg"]).removeprefix("Value error, ")
