"""White space in structured output ends, with xgrammar itself and SGLang's grammar around it."""

import json
from collections.abc import Generator
from typing import Any

import pytest
import torch
import xgrammar
from sglang.srt.constrained.base_grammar_backend import GrammarStats
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from engine_ext.plugin.scheduler import blanks

VOCABULARY = (
    [chr(each) for each in range(128)]
    + ["\n" + " " * count for count in range(16)]
    + ['": "', '", "']
    + ["\n\n", " " * 8, "{\n", '",\n  ']
)
STOP = 0
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a", "b"]}


@pytest.fixture
def grammar() -> Generator[Any, None, None]:
    info = xgrammar.TokenizerInfo(list(VOCABULARY), stop_token_ids=[STOP])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(SCHEMA))
    blanks.learn(info.decoded_vocab, -(-len(VOCABULARY) // 32))
    matcher, stats = xgrammar.GrammarMatcher(compiled), GrammarStats(dispatch_type="json")
    yield XGrammarGrammar(matcher, len(VOCABULARY), compiled, None, json.dumps(SCHEMA), stats)
    blanks.learn([], 1)


def allowed(grammar: Any, bounded: bool) -> list[int]:
    mask = torch.full((1, -(-len(VOCABULARY) // 32)), -1, dtype=torch.int32)
    grammar.fill_vocab_mask(mask, 0)
    if bounded:
        blanks.without(grammar, mask, 0)
    bits = mask[0].tolist()
    return [each for each in range(len(VOCABULARY)) if bits[each // 32] >> (each % 32) & 1]


def written(grammar: Any, bounded: bool, most: int, stubborn: str = " " * 8) -> str:
    """What a model writes that wants nothing but white space, and else the shortest way to the end."""
    text = ""
    for _ in range(most):
        may = allowed(grammar, bounded)
        wanted = [
            VOCABULARY.index(each)
            for each in ("\n", "\n\n", "{\n", stubborn, " ", '"', "}", "1", ":", ",", "a", "b", "{")
        ]
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
    assert text == '{"a":"' + " " * blanks.MOST_BLANKS + '","b":1}'


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


def test_white_space_within_texts_stays(grammar: Any) -> None:
    for character in '{"a":"x:  , ':
        assert VOCABULARY.index(character) in allowed(grammar, bounded=True)
        blanks.accept_token(XGrammarGrammar.accept_token, grammar, VOCABULARY.index(character))
    assert VOCABULARY.index(" " * 8) in allowed(grammar, bounded=True)


@pytest.mark.parametrize("pattern", [r"\n\n\nx", r"\n\n\n(x|y)"])
def test_line_breaks_of_other_grammars_stay(pattern: str) -> None:
    info = xgrammar.TokenizerInfo(list(VOCABULARY), stop_token_ids=[STOP])
    compiled = xgrammar.GrammarCompiler(info).compile_regex(pattern)
    blanks.learn(info.decoded_vocab, -(-len(VOCABULARY) // 32))
    found = XGrammarGrammar(xgrammar.GrammarMatcher(compiled), len(VOCABULARY), compiled, None, "")
    assert written(found, bounded=True, most=100) == "\n\n\nx"
    blanks.learn([], 1)


def test_a_text_with_a_pattern_has_its_blank() -> None:
    """Instead of digits without end."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[0-9]+ (USD|EUR)$"}}}
    schema |= {"required": ["a"], "additionalProperties": False}
    info = xgrammar.TokenizerInfo(list(VOCABULARY), stop_token_ids=[STOP])
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
    blanks.learn(info.decoded_vocab, -(-len(VOCABULARY) // 32))
    stats = GrammarStats(dispatch_type="json")
    found = XGrammarGrammar(xgrammar.GrammarMatcher(compiled), len(VOCABULARY), compiled, None, "", stats)
    for character in '{"a":"5 ':
        assert VOCABULARY.index(character) in allowed(found, bounded=True)
        blanks.accept_token(XGrammarGrammar.accept_token, found, VOCABULARY.index(character))
    blanks.learn([], 1)
