"""Keeps a model from writing white space until its tokens are used up.

JSON's grammar allows any amount of it between two fields, and small models do not stop. xgrammar 0.2.1 can bound it
too, but says of such a grammar for 30 lists of objects that it takes 1 GB at 8 characters, and 4 MB without the bound.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

MOST_BLANKS = 32  # characters in a row, after which no token of white space alone is allowed: indentation has fewer
BLANK = b" \t\r\n"
_lengths: dict[int, tuple[int, int]] = {}  # by token id, of those that are white space alone: characters, line breaks
_others: list[Any] = []  # two int32 masks [words]: of all other tokens, and of these and those without a line break


def learn(vocabulary: list[bytes], words: int) -> None:
    """Note which tokens are white space alone. `words`: 32-bit words of a mask over the model's vocabulary."""
    _lengths.clear()
    for number, each in enumerate(vocabulary):
        if each and not each.strip(BLANK):
            _lengths[number] = len(each), each.count(b"\n")
    breaks = [number for number, (_, count) in _lengths.items() if count]
    _others[:] = [_all_but(list(_lengths), words), _all_but(breaks, words)]


def _all_but(tokens: list[int], words: int) -> Any:
    import torch

    allowed = torch.full((words * 32,), True)
    allowed[tokens] = False
    bits = allowed.view(words, 32).to(torch.int64) << torch.arange(32)
    return bits.sum(dim=1).to(torch.int32)


def accept_token(original: Callable[..., None], grammar: Any, token: int) -> None:
    """Count the white space at the end of an answer."""
    original(grammar, token)
    length, breaks = _lengths.get(token, (0, 0))
    grammar.blanks, grammar.breaks = (
        (getattr(grammar, "blanks", 0) + length, getattr(grammar, "breaks", 0) + breaks) if length else (0, 0)
    )


def without(grammar: Any, mask: Any, row: int) -> None:
    """Take out of the tokens that may come next: white space after enough of it, a line break after another one.

    What a grammar wants all the same, such as a pattern of blanks, stays.
    """
    if not _others:
        return
    if getattr(grammar, "blanks", 0) >= MOST_BLANKS:
        rest = mask[row] & _others[0]
    elif getattr(grammar, "breaks", 0):
        rest = mask[row] & _others[1]
    else:
        return
    if rest.any():
        mask[row] = rest


HOOKS = [
    ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.accept_token", accept_token, HookType.AROUND),
]
