"""Keeps a model from writing white space until its tokens are used up.

JSON's grammar allows any amount of it between two fields, and small models do not stop. xgrammar 0.2.1 can bound it
too, but says of such a grammar for 30 lists of objects that it takes 1 GB at 8 characters, and 4 MB without the bound.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

MOST_BLANKS = 32  # characters in a row, after which no token of white space alone is allowed: indentation has fewer
BLANK = b" \t\r\n"
_lengths: dict[int, int] = {}  # by token id: the characters of those that are white space alone
_others: list[Any] = []  # one int32 mask [words], of all other tokens


def learn(vocabulary: list[bytes], words: int) -> None:
    """Note which tokens are white space alone. `words`: 32-bit words of a mask over the model's vocabulary."""
    import torch

    _lengths.clear()
    _lengths.update({number: len(each) for number, each in enumerate(vocabulary) if each and not each.strip(BLANK)})
    allowed = torch.full((words * 32,), True)
    allowed[list(_lengths)] = False
    bits = allowed.view(words, 32).to(torch.int64) << torch.arange(32)
    _others[:] = [bits.sum(dim=1).to(torch.int32)]


def accept_token(original: Callable[..., None], grammar: Any, token: int) -> None:
    """Count the white space at the end of an answer."""
    original(grammar, token)
    length = _lengths.get(token)
    grammar.blanks = 0 if length is None else getattr(grammar, "blanks", 0) + length


def without(grammar: Any, mask: Any, row: int) -> None:
    """Take white space out of the tokens that may come next, if the answer has had enough of it and others may come."""
    if _others and getattr(grammar, "blanks", 0) >= MOST_BLANKS:
        rest = mask[row] & _others[0]
        if rest.any():
            mask[row] = rest


HOOKS = [
    ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.accept_token", accept_token, HookType.AROUND),
]
