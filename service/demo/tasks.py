"""The demo's requests, of the kinds that people send: labels, extractions by a schema, summaries, and questions."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

CHAT = "/v1/chat/completions"
TICKETS, EXTRACTIONS = 40, 16  # of the customers' messages
QUESTIONS = 4  # about each document
# What the examples' finer labels come to: a model so small tells three apart, and looks at few examples.
KINDS = {"billing": "complaint", "question": "question", "praise": "thanks", "damaged": "complaint"}
SHOTS = ("billing", "question", "praise", "damaged", "question", "praise")
ONE_SENTENCE = {"stop": [". ", "\n"]}  # so small a model often says the same again and again
ORDER = {
    "product": {"type": "string", "maxLength": 40},
    "needs_reply": {"type": "boolean"},
}


def tasks(model: str) -> Iterator[dict[str, Any]]:
    """Yield the lines of the demo's file."""
    for at, document in enumerate(_read("documents.json"), 1):
        about = _says("system", f"Answer briefly, from this document.\n\n{document['title']}\n\n{document['text']}")
        for number, question in enumerate(document["questions"][:QUESTIONS], 1):
            yield _line(
                f"question-{at}-{number}", model, [about, _says("user", question)], max_tokens=48, **ONE_SENTENCE
            )
        summary = "Summarize the document in one sentence."
        yield _line(f"summary-{at}", model, [about, _says("user", summary)], max_tokens=96, **ONE_SENTENCE)
    mail = _read("tickets.json")
    asked = "Read a customer's message to a shop. Name the product, and whether a reply is needed."
    reading = _says("system", f"{asked} Answer in JSON.")
    for number, text in enumerate(mail["texts"][:EXTRACTIONS], 1):
        messages = [reading, _says("user", text)]
        yield _line(f"extract-{number}", model, messages, max_tokens=64, response_format=_form("order", ORDER))
    found = {each["label"]: each["text"] for each in mail["examples"]}
    shots = [said for each in SHOTS for said in (_says("user", found[each]), _says("assistant", KINDS[each]))]
    sorting = [_says("system", "Label each message: complaint, question or thanks."), *shots]
    for number, text in enumerate(mail["texts"][:TICKETS], 1):
        yield _line(f"label-{number}", model, [*sorting, _says("user", text)], max_tokens=4)


def _form(name: str, properties: dict[str, Any]) -> dict[str, Any]:
    """Return a response format of an object that has all these properties."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": name, "strict": True, "schema": schema}}


def _says(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _line(custom_id: str, model: str, messages: list[dict[str, str]], **asked: Any) -> dict[str, Any]:
    body = {"model": model, "messages": messages, "temperature": 0, **asked}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def _read(name: str) -> Any:
    return json.loads(files("service.demo").joinpath("data", name).read_text())
