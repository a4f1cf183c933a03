"""Reads an engine's answer: its usage, in the field names of any endpoint, or its error."""

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


class _Body(msgspec.Struct):
    usage: _BodyUsage | None = None
    error: _BodyError | None = None


_decoder = msgspec.json.Decoder(_Body)


def error_message(body: bytes) -> str:
    """Return the reason that the engine gave for its failure."""
    error = _decoder.decode(body).error
    return error.message if error else "it gave no reason"


def usage_of(body: bytes) -> Usage:
    """Return the tokens that the answer reports."""
    found = _decoder.decode(body).usage
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
