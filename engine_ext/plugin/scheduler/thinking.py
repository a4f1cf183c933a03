"""Bounds how many tokens a request may think: SGLang's grammar of reasoning then lets only the thought's end come.

SGLang has it for all requests of an engine or none, and then masks every token of each; here only requests with a bound
pay for one.
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
    if most == NO_BOUND and not stops_loops(request):
        return
    if request.grammar is None:
        request.grammar = backend._make_grammar_object(None, True)
    if hasattr(request.grammar, "max_think_tokens"):
        request.grammar.max_think_tokens = most
        request.grammar.enable_token_filter = True
        request.grammar.token_filter_fn = backend.grammar_backend.set_token_filter


def close(grammar: Any) -> bool:
    """End the thought that a request is in; return False if it is in none that can be ended."""
    if not getattr(grammar, "enable_token_filter", False) or not grammar._is_thinking():
        return False
    grammar.max_think_tokens = 0
    return True
