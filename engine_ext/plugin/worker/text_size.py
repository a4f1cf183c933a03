"""Counts the text of a request that the engine would make tokens of, before it does."""

from typing import Any, NamedTuple

from engine_ext.plugin.worker.media import MEDIA

MOST_TOKEN_BYTES, TOKEN_BYTES = 64, 4  # nearly all tokens are at most so long, and as long as this on average
# All that a prompt or a chat template may contain; the first one that is there is the prompt.
FIELDS = (
    *("messages", "prompt", "input", "items", "documents", "query", "instruct", "instructions", "tools"),
    "chat_template_kwargs",
)
IDS = ("prompt", "input", "items", "query", "input_ids")  # may be token ids
CHOSEN = {"/v1/completions": "prompt", "/v1/embeddings": "input", "/v1/score": "items", "/v1/rerank": "documents"}
JOINS = ("/v1/score", "/v1/rerank")  # which make a prompt of each of several texts and all other text


class TextSize(NamedTuple):
    """The bytes of all texts as often as prompts have them, of the longest prompt, and the field with most of these."""

    total: int
    longest: int
    field: str


def text_size(endpoint: str, fields: dict[str, Any]) -> TextSize:
    """Count the text of a body. A token id counts as a usual token, and in the longest prompt as the longest one.

    Each text of a list is a prompt of its own at the endpoints that take several, beside what all of them share.
    """
    names = [name for name in (*FIELDS, "input_ids") if name in fields]
    totals = {name: _bytes(fields[name], TOKEN_BYTES if name in IDS else 0) for name in names}
    several = CHOSEN.get(endpoint, "")
    joined = len(fields[several]) if endpoint in JOINS and isinstance(fields.get(several), list) else 1
    total = totals.get(several, 0) + max(1, joined) * sum(size for name, size in totals.items() if name != several)
    sizes: dict[str, int] = {}
    for name in names:
        given, id_bytes = fields[name], MOST_TOKEN_BYTES if name in IDS else 0
        is_list = name == several and isinstance(given, list) and given and not isinstance(given[0], int)
        sizes[name] = max(_bytes(each, id_bytes) for each in given) if is_list else _bytes(given, id_bytes)
    return TextSize(total, sum(sizes.values()), max(sizes, key=lambda name: sizes[name], default=""))


def _bytes(value: Any, id_bytes: int) -> int:
    """Return the bytes of all text in a value, without media that it brings along; `id_bytes`: those of a token id."""
    count, left = 0, [("", value)]
    while left:
        key, each = left.pop()
        if isinstance(each, str):
            is_media = key in MEDIA and each.startswith("data:")
            count += 0 if is_media else len(each) if each.isascii() else len(each.encode(errors="replace"))
        elif isinstance(each, dict):
            count += sum(map(len, each))
            left += each.items()
        elif isinstance(each, list):
            if set(map(type, each)) == {int}:  # a prompt's token ids, of which there may be millions
                count += len(each) * (id_bytes or TOKEN_BYTES)
            else:
                left += [("", item) for item in each]
        else:
            count += id_bytes or TOKEN_BYTES
    return count
