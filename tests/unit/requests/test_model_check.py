"""A model whose turns do not end, or whose tokenizer mistranslates, is found before it spoils a batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from service.demo.prompts import corpus
from service.demo.tiny import ensure_tiny_model
from service.requests.model_check import faults


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return ensure_tiny_model(tmp_path / "m", corpus())


def change(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_good_model_has_no_faults_and_one_that_is_not_there_none_that_are_known(model: Path, tmp_path: Path) -> None:
    assert faults(model) == []
    assert faults(tmp_path / "none") == []


def test_a_turn_that_ends_with_another_token_than_the_answer_is_named(model: Path) -> None:
    change(model / "config.json", eos_token_id=0)
    change(model / "tokenizer_config.json", eos_token="<|begin|>")
    [fault] = faults(model)
    assert "ends a turn with '<|end|>' (1), but answers stop at '<|begin|>' (0)" in fault
    (model / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')  # which SGLang reads too
    assert faults(model) == []


def test_a_template_may_end_earlier_turns_in_another_way(model: Path) -> None:
    """As gpt-oss's does."""
    template = (
        "{% for each in messages %}<|{{ each.role }}|>{{ each.content }}{{ '<|end|>' if loop.last else '<|begin|>' }}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    change(model / "tokenizer_config.json", chat_template=template)
    assert faults(model) == []


def test_a_decoder_of_another_kind_is_named(model: Path) -> None:
    change(model / "tokenizer.json", decoder={"type": "ByteFallback"})
    [fault] = faults(model)
    assert "structured output is wrong" in fault
