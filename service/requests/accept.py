"""What a batch, or one of its lines, accepts as an answer, and what is done about others."""

from typing import Annotated, Any, Literal

import msgspec

from service.objects.request_output import MOST_TOKENS

MOST_RETRIES = 5  # of one request
MOST_CHARACTERS, MOST_VALUE = 200, 30  # of a message that repeats what the line says, and of one value in it
TURNS = {"/v1/chat/completions": "messages", "/v1/responses": "input"}  # by URL, the field that another try adds to
# Of these a line has no more than its batch, which has so much if it does not say.
_CAPPED = {"retries": 0, "continue": 0, "thinking_tokens": None, "explain": False}


class Accept(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True, rename={"more": "continue"}):
    """The `accept` of a batch's create, or of a line's `batchweave`; by default every answer is accepted.

    `finish`: "stop" takes none that was cut off, looped or refused. `schema`: none that is not the JSON that was asked
    for. `retries`: how often a request is asked again. `more`: tokens of an answer beyond its request's limit.
    `loops`: "stop" ends an answer where it repeats itself. `thinking_tokens`: how many an answer may think. `explain`:
    another try is told what is wrong with an answer that is not valid.
    """

    finish: Literal["stop"] | None = None
    schema: bool = False
    retries: Annotated[int, msgspec.Meta(ge=0, le=MOST_RETRIES)] = 0
    more: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] = 0
    loops: Literal["stop"] | None = None
    thinking_tokens: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)] | None = None
    explain: bool = False

    def __post_init__(self) -> None:
        if self.retries and not (self.finish or self.schema):
            raise ValueError("'retries' needs 'finish' or 'schema': they say which answers are asked again")
        if self.explain and not (self.schema and self.retries):
            raise ValueError("'explain' needs 'schema' and 'retries': another try is told what was not valid")

    @classmethod
    def of(cls, found: dict[str, Any] | None) -> "Accept":
        return msgspec.convert(found or {}, cls)

    def with_line(self, extras: Any) -> "Accept":
        """Return what a line of this batch accepts, by its `batchweave`, whose fields win.

        Raises ValueError, with the field and the reason.
        """
        if extras is None:
            return self
        if not isinstance(extras, dict) or extras.keys() - {"accept"} or not isinstance(extras.get("accept"), dict):
            raise ValueError("'batchweave' must be an object whose only field is 'accept', an object")
        mine: dict[str, Any] = msgspec.to_builtins(self)
        try:
            wanted = mine | extras["accept"]
            if not (wanted.get("finish") or wanted.get("schema") or "retries" in extras["accept"]):
                wanted.pop("retries", None)  # nothing is left to ask again for
            if not (wanted.get("schema") and wanted.get("retries")) and "explain" not in extras["accept"]:
                wanted.pop("explain", None)
            found = msgspec.convert(wanted, Accept)
        except (msgspec.ValidationError, RecursionError) as error:
            raise ValueError(f"'batchweave.accept' is not valid: {str(error)[:MOST_CHARACTERS]}") from error
        for name, usual in _CAPPED.items():
            asked, allowed = extras["accept"].get(name), mine.get(name, usual)
            if allowed is not None and ((asked is None and name in extras["accept"]) or (asked or 0) > allowed):
                raise ValueError(f"'batchweave.accept.{name}' is {_said(asked)}; the batch allows {_said(allowed)}")
        return found


def _said(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:MOST_VALUE]


EVERY_ANSWER = Accept()


def known(batch: Accept, extras: Any) -> Accept:
    """Return what a line of a batch that runs accepts: its own wish counts only if it would be valid now."""
    try:
        return batch.with_line(extras)
    except ValueError:  # it was validated before lines had a say
        return batch
