"""Bounds how many tokens a request may think: SGLang's grammar of reasoning then lets only the thought's end come.

SGLang bounds a request too, but only in an engine that masks each token of every request; here requests without a bound
pay for none.
"""

from typing import Any

from engine_ext.plugin.marks import THINKING, stops_loops

NO_BOUND = -1


def bound(manager: Any, request: Any) -> None:
    """Give a request that thinks the bound that it came with, once its grammar, if it has one, is compiled."""
    given = (request.sampling_params.custom_params or {}).get(THINKING)
    most = given if isinstance(given, int) and given >= 0 else NO_BOUND
    backend = manager.grammar_backend
    if not request.require_reasoning or not hasattr(backend, "think_end_ids"):
        return
    if not backend.grammar_backend.is_support_token_filter:  # such as llguidance: it cannot close a thought
        return
    if most == NO_BOUND and not stops_loops(request):
        return
    if request.grammar is None:
        request.grammar = backend._make_grammar_object(None, True)
    if hasattr(request.grammar, "max_think_tokens"):
        before = request.grammar.max_think_tokens  # the operator's
        request.grammar.max_think_tokens = most if before < 0 else before if most < 0 else min(before, most)
        request.grammar.enable_token_filter = True
        request.grammar.token_filter_fn = backend.grammar_backend.set_token_filter


def close(grammar: Any) -> bool:
    """End the thought that a request is in; return whether there is one that can be ended."""
    if not getattr(grammar, "enable_token_filter", False) or not grammar._is_thinking():
        return False
    grammar.max_think_tokens = 0
    return True
