"""Keeps a model from writing white space until its tokens are used up, and JSON on one line.

JSON's grammar allows any amount of white space between two fields; each is a token that nobody wants, and small models
do not stop. xgrammar 0.2.1 can bound it too, but says of such a grammar for 30 lists of objects that it takes 1 GB at 8
characters, and 4 MB without the bound.
"""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

MOST_BLANKS = 32  # characters in a row, after which no token of white space alone is allowed: indentation has fewer
BLANK, BREAKS = b" \t\r\n", b"\t\r\n"
BREAK = b"\n"  # which JSON allows between its texts alone
_lengths: dict[int, int] = {}  # by token id: the characters of those that are white space alone
_masks: list[Any] = []  # int32 masks [words]: of all other tokens, of all without a tab or a line break, and of both
_breaks: list[int] = []  # the token that is BREAK, if there is one


def learn(vocabulary: list[bytes], words: int) -> None:
    """Note which tokens are white space alone. `words`: 32-bit words of a mask over the model's vocabulary."""
    _lengths.clear()
    _lengths.update({number: len(each) for number, each in enumerate(vocabulary) if each and not each.strip(BLANK)})
    breaks = [number for number, each in enumerate(vocabulary) if any(map(each.__contains__, BREAKS))]
    _masks[:] = [_all_but(each, words) for each in ([*_lengths], breaks, [*_lengths, *breaks])]
    _breaks[:] = [number for number, each in enumerate(vocabulary) if each == BREAK][:1]


def _all_but(tokens: list[int], words: int) -> Any:
    import torch

    allowed = torch.full((words * 32,), True)
    allowed[tokens] = False
    bits = allowed.view(words, 32).to(torch.int64) << torch.arange(32)
    return bits.sum(dim=1).to(torch.int32)


def accept_token(original: Callable[..., None], grammar: Any, token: int) -> None:
    """Count the white space at the end of an answer."""
    original(grammar, token)
    length = _lengths.get(token)
    grammar.blanks = 0 if length is None else getattr(grammar, "blanks", 0) + length


def without(grammar: Any, mask: Any, row: int) -> None:
    """Take white space out of the tokens that may come next where it has no use, unless nothing else may come.

    It has none between JSON's texts.
    """
    if not _masks:
        return
    allowed = mask[row]
    if getattr(grammar.grammar_stats, "dispatch_type", None) == "json":
        _keep(allowed, _masks[2 if _may_break(allowed) else 1])
    if getattr(grammar, "blanks", 0) >= MOST_BLANKS:
        _keep(allowed, _masks[0])


def _keep(allowed: Any, these: Any) -> None:
    rest = allowed & these
    if rest.any():
        allowed.copy_(rest)


def _may_break(allowed: Any) -> bool:
    """Return whether a line may end now, by a mask of tokens, int32 [words]."""
    return bool(_breaks and int(allowed[_breaks[0] // 32]) >> (_breaks[0] % 32) & 1)


HOOKS = [
    ("sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.accept_token", accept_token, HookType.AROUND),
]
