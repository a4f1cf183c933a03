"""White space in structured output ends, with xgrammar itself and SGLang's grammar around it."""

import json
import re
from collections.abc import Generator
from typing import Any

import pytest
import torch
import xgrammar
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from engine_ext.plugin.scheduler import blanks

VOCABULARY = [chr(each) for each in range(128)] + ["\n" + " " * count for count in range(16)] + ['": "', '", "']
STOP = 0
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


@pytest.fixture
def grammar() -> Generator[Any, None, None]:
    info = xgrammar.TokenizerInfo(list(VOCABULARY), stop_token_ids=[STOP])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    blanks.learn(info.decoded_vocab, -(-len(VOCABULARY) // 32))
    yield XGrammarGrammar(xgrammar.GrammarMatcher(compiled), len(VOCABULARY), compiled, None, json.dumps(SCHEMA))
    blanks.learn([], 1)


def allowed(grammar: Any, bounded: bool) -> list[int]:
    mask = torch.full((1, -(-len(VOCABULARY) // 32)), -1, dtype=torch.int32)
    grammar.fill_vocab_mask(mask, 0)
    if bounded:
        blanks.without(grammar, mask, 0)
    bits = mask[0].tolist()
    return [each for each in range(len(VOCABULARY)) if bits[each // 32] >> (each % 32) & 1]


def written(grammar: Any, bounded: bool, most: int, stubborn: str = "\n" + " " * 15) -> str:
    """What a model writes that wants nothing but white space, and else the shortest way to the end."""
    text = ""
    for _ in range(most):
        may = allowed(grammar, bounded)
        wanted = [VOCABULARY.index(each) for each in (stubborn, " ", '"', "}", "1", ":", ",", "a", "b", "{")]
        token = next((each for each in (STOP, *wanted) if each in may), None)
        if token is None:
            token = may[0]
        blanks.accept_token(XGrammarGrammar.accept_token, grammar, token)
        if token == STOP:
            return text
        text += VOCABULARY[token]
    return text


def test_white_space_ends_and_the_answer_is_valid(grammar: Any) -> None:
    text = written(grammar, bounded=True, most=500)
    assert set(json.loads(text)) == {"a", "b"}
    assert max(map(len, re.findall(r"\s+", text))) < blanks.MOST_BLANKS + 16  # the longest token has 16
    assert "\n " in text
    assert not re.search(r"\n\s*\n", text)


def test_without_the_bound_it_does_not_end(grammar: Any) -> None:
    text = written(grammar, bounded=False, most=500)
    assert text.lstrip("{").isspace()


def test_a_grammar_that_wants_white_space_alone_gets_it() -> None:
    info = xgrammar.TokenizerInfo(list(VOCABULARY), stop_token_ids=[STOP])
    compiled = xgrammar.GrammarCompiler(info).compile_regex(" {60}x")
    blanks.learn(info.decoded_vocab, -(-len(VOCABULARY) // 32))
    found = XGrammarGrammar(xgrammar.GrammarMatcher(compiled), len(VOCABULARY), compiled, None, "")
    assert written(found, bounded=True, most=100) == " " * 60 + "x"
    blanks.learn([], 1)


def test_a_grammar_that_wants_line_breaks_alone_gets_them() -> None:
    info = xgrammar.TokenizerInfo(list(VOCABULARY), stop_token_ids=[STOP])
    compiled = xgrammar.GrammarCompiler(info).compile_regex(r"\n\n\nx")
    blanks.learn(info.decoded_vocab, -(-len(VOCABULARY) // 32))
    found = XGrammarGrammar(xgrammar.GrammarMatcher(compiled), len(VOCABULARY), compiled, None, "")
    assert written(found, bounded=True, most=100) == "\n\n\nx"
    blanks.learn([], 1)
