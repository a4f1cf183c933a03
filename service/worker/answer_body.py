"""Reads an engine's answer: its usage and its ends, in the field names of any endpoint, or its error."""

import msgspec

from service.objects.shards import Usage

NO_USAGE = Usage()


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = 0


class _OutputDetails(msgspec.Struct):
    reasoning_tokens: int | None = 0


class _BodyUsage(msgspec.Struct):
    """The usage of an answer, with the field names of chat completions and of responses."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    reasoning_tokens: int | None = 0
    prompt_tokens_details: _TokenDetails | None = None
    input_tokens: int = 0
    output_tokens: int = 0
    input_tokens_details: _TokenDetails | None = None
    output_tokens_details: _OutputDetails | None = None


class _BodyError(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None


class Choice(msgspec.Struct):
    """A choice of a chat completion, which has a message, or of a completion, which has a text."""

    finish_reason: str | None = None
    message: Message | None = None
    text: str | None = None


class ContentPart(msgspec.Struct):
    type: str = ""
    text: str | None = None


class Item(msgspec.Struct):
    """An item of a response's output."""

    type: str = ""
    content: list[ContentPart] | str | None = None


class Because(msgspec.Struct):
    reason: str | None = None


class Plain(msgspec.Struct):
    usage: _BodyUsage | None = None
    error: _BodyError | None = None


class Body(Plain):
    """What is read of an answer: of chat completions, completions, responses, and of errors."""

    choices: list[Choice] = []
    output: list[Item] = []
    status: str | None = None
    incomplete_details: Because | None = None


_decoder, _plain_decoder = msgspec.json.Decoder(Body), msgspec.json.Decoder(Plain)


def error_message(body: bytes) -> str:
    """Return the reason that the engine gave for its failure."""
    error = read(body).error
    return error.message if error else "it gave no reason"


def error_code(body: bytes) -> str | None:
    """Return the code of the engine's error."""
    error = read(body).error
    return str(error.code) if error and error.code is not None else None


def read(body: bytes) -> Body:
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError:  # such as content in a form of its own: nobody judges that
        found = _plain_decoder.decode(body)
        return Body(found.usage, found.error)


def usage_of(answer: Body) -> Usage:
    """Return the tokens that the answer reports."""
    found = answer.usage
    if found is None:
        return NO_USAGE
    details = found.prompt_tokens_details or found.input_tokens_details
    output = found.output_tokens_details
    return Usage(
        input=found.prompt_tokens or found.input_tokens,
        cached=(details.cached_tokens or 0) if details else 0,
        output=found.completion_tokens or found.output_tokens,
        reasoning=found.reasoning_tokens or (output.reasoning_tokens if output else 0) or 0,
    )
