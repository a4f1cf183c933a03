"""`batchweave up --engine scripted` as a user without SGLang starts it: the real service, answered by rules."""

import json
from collections.abc import Generator

import pytest

from service.demo.prompts import CHAT
from tests.acceptance.service import Up
from tests.acceptance.test_up import line

RULES = [
    {"prompt": "poison*", "fault": "die"},
    {"prompt": "flaky*", "status": 503, "times": 2},
    {"prompt": "bad*", "status": 400},
    {"prompt": "slow*", "delay_s": 1.5},
    {"prompt": "label*", "answer": "good"},
]


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Generator[Up, None, None]:
    folder = tmp_path_factory.mktemp("scripted")
    missing = folder / "missing"
    for name in ("sglang", "torch", "transformers"):
        (missing / name).mkdir(parents=True)
        (missing / name / "__init__.py").write_text(f"raise ModuleNotFoundError('no {name}', name={name!r})\n")
    (folder / "rules.json").write_text(json.dumps({"rules": RULES}))
    variables = {"BATCHWEAVE_ENGINE": "scripted", "BATCHWEAVE_SCRIPT": str(folder / "rules.json")}
    service = Up.on(folder / "data")
    service.variables |= {**variables, "PYTHONPATH": str(missing)}
    service.start()
    service.until_engine()
    yield service
    assert service.stop() == 0


def asked(custom_id: str, text: str) -> dict[str, object]:
    return line(custom_id, messages=[{"role": "user", "content": text}], max_tokens=8)


def test_rules_answer_a_batch(up: Up) -> None:
    texts = {"a": "hello there", "b": "flaky one", "c": "bad one", "d": "slow one", "e": "label this"}
    batch = up.wait(up.submit([asked(custom_id, text) for custom_id, text in texts.items()]))
    answers, errors = up.lines(batch.output_file_id), up.lines(batch.error_file_id)
    said = {key: each["response"]["body"]["choices"][0]["message"]["content"] for key, each in answers.items()}
    assert said == {"a": "hello there", "b": "flaky one", "d": "slow one", "e": "good"}
    assert {key: each["response"]["status_code"] for key, each in errors.items()} == {"c": 400}


def test_rules_answer_online(up: Up) -> None:
    stream = up.client.chat.completions.create(
        model="batchweave-demo", messages=[{"role": "user", "content": "a b c"}], stream=True
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "a b c"
    found = up.client.embeddings.create(model="batchweave-demo", input=["a", "b"], dimensions=4)
    assert [len(each.embedding) for each in found.data] == [4, 4]


@pytest.mark.slow
def test_a_request_that_kills_the_engine_is_found_and_refused_alone(up: Up) -> None:
    lines = [asked(f"id-{number}", f"question {number}") for number in range(3)]
    batch = up.wait(up.submit([*lines, asked("bad", "poison")], CHAT))
    assert set(up.lines(batch.output_file_id)) == {f"id-{number}" for number in range(3)}
    assert set(up.lines(batch.error_file_id)) == {"bad"}
