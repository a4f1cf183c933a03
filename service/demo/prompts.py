"""The built-in demo file: three kinds of requests, which differ in length and share prefixes within each kind."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def requests(model: str) -> dict[str, list[dict[str, Any]]]:
    """Return batch lines by endpoint: few-shot classification and document questions, then stories to continue."""
    return {
        CHAT: [*_tickets(model), *_questions(model)],
        COMPLETIONS: list(_stories(model)),
    }


def corpus() -> list[str]:
    """Return every text of the demo, to train its tokenizer on."""
    lines = [line for each in requests("").values() for line in each]
    return [json.dumps(line["body"], ensure_ascii=False) for line in lines]


def _tickets(model: str) -> Iterator[dict[str, Any]]:
    """Yield requests with a long shared prefix and one-word answers."""
    data = _read("tickets.json")
    shots = "\n\n".join(f"Message: {each['text']}\nLabel: {each['label']}" for each in data["examples"])
    system = f"{data['instructions']}\n\n{shots}"
    for number, text in enumerate(data["texts"], 1):
        body = {
            "messages": [
                {"role": "system", "content": system},
                {"role": "user", "content": f"Message: {text}\nLabel:"},
            ],
            "max_tokens": 4,
        }
        yield _line(f"ticket-{number}", CHAT, model, body)


def _questions(model: str) -> Iterator[dict[str, Any]]:
    """Yield several questions about each document, with answers of a sentence or two."""
    for at, document in enumerate(_read("documents.json"), 1):
        system = f"Answer from this document.\n\n{document['title']}\n\n{document['text']}"
        for number, question in enumerate(document["questions"], 1):
            messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
            yield _line(f"document-{at}-{number}", CHAT, model, {"messages": messages, "max_tokens": 40})


def _stories(model: str) -> Iterator[dict[str, Any]]:
    """Yield requests with short prompts and long answers."""
    for number, opening in enumerate(_read("stories.json")["openings"], 1):
        yield _line(f"story-{number}", COMPLETIONS, model, {"prompt": opening, "max_tokens": 160})


def _line(custom_id: str, url: str, model: str, body: dict[str, Any]) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": url,
        "body": {"model": model, **body, "temperature": 0},
    }


def _read(name: str) -> Any:
    return json.loads(files("service.demo").joinpath("data", name).read_text())
