"""Finds in a second what would spoil every answer of a model: turns that do not end, and a tokenizer that misspells.

Both come of conversions, and look like a bad model: answers that run into max_tokens, JSON with odd characters.
"""

import json
import re
from pathlib import Path
from typing import Any, cast

from tokenizers import Tokenizer

from service.requests.tokens import PromptTokens

SAMPLE = "a\n\u00eb"  # a newline and a letter of two bytes, which decoders of another kind spell in their own way
GENERATES = re.compile("CausalLM|ConditionalGeneration")
ANSWER = "Paris"
TURNS = [
    {"role": role, "content": said} for role, said in (("user", "Where?"), ("assistant", ANSWER), ("user", "Why?"))
]


def faults(folder: Path) -> list[str]:
    """Return what is wrong with the tokenizer and the chat template in a model's folder; empty if it is not known."""
    if not any(GENERATES.search(str(each)) for each in _read(folder / "config.json").get("architectures") or ()):
        return []
    try:
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokens = PromptTokens.load(str(folder))
        # Some templates end the last turn as the model does, and earlier ones in another way.
        texts = [tokens.text("/v1/chat/completions", {"messages": TURNS[:count]}) for count in (2, 3)]
    except Exception:  # the library raises a bare Exception; the load of the model reports it
        return []
    found: list[str] = []
    spelt = tokenizer.decode(tokenizer.encode(SAMPLE, add_special_tokens=False).ids)
    if spelt.strip(" ") != SAMPLE:
        found.append(
            f"the tokenizer makes {spelt!r} of {SAMPLE!r}, so structured output is wrong: see tokenizer.json's decoder"
        )
    ends = [_end_of_turn(tokenizer, text.string) for text in texts if text.is_exact]
    stops = _stops(folder, tokenizer)
    end = next((each for each in ends if each is not None), None)
    if end is not None and stops and not stops & set(ends):
        named = ", ".join(f"{tokenizer.id_to_token(each)!r} ({each})" for each in sorted(stops))
        found.append(
            f"the chat template ends a turn with {tokenizer.id_to_token(end)!r} ({end}), but answers stop at {named}: "
            "they run into max_tokens; see eos_token in tokenizer_config.json, eos_token_id in generation_config.json"
        )
    return found


def _end_of_turn(tokenizer: Tokenizer, text: str) -> int | None:
    """Return the special token that follows the assistant's answer; None if there is none before the next words."""
    _, is_there, rest = text.rpartition(ANSWER)
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    ids = tokenizer.encode(rest, add_special_tokens=False).ids if is_there else []
    for each in ids:
        if each in special:
            return each
        if tokenizer.decode([each]).strip():
            return None
    return None


def _stops(folder: Path, tokenizer: Tokenizer) -> set[int]:
    """Return the tokens at which SGLang ends an answer."""
    found = set[int]()
    for name in ("config.json", "generation_config.json"):
        config = _read(folder / name)
        for told in (config, config.get("text_config")):
            ids: Any = cast(dict[str, Any], told).get("eos_token_id") if isinstance(told, dict) else None
            found |= {each for each in (ids if isinstance(ids, list) else [ids]) if isinstance(each, int)}
    token: Any = _read(folder / "tokenizer_config.json").get("eos_token")
    named = cast(dict[str, Any], token).get("content") if isinstance(token, dict) else token
    if isinstance(named, str) and (number := tokenizer.token_to_id(named)) is not None:
        found.add(number)
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}
