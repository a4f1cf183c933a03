"""Computes the token ids of prompts with the model's own tokenizer and chat template, without its engine.

They affect the plan but no answer: if the template refuses a body, the body's text is used instead, and the engine
reports what is wrong with it.
"""

import json
from array import array
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, NoReturn

import jinja2
import msgspec
import structlog
from huggingface_hub import snapshot_download
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

FILES = ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
CHAT = "/v1/chat/completions"
PIECE = 512 * 1024  # characters of a text that are tokenized at a time; more than the context of most models
CERTAIN = 0.99  # share of the tokens counted in pieces that a text has at least
TEMPLATED = (CHAT, "/v1/responses")
# The fields that hold the prompt in the bodies of the other endpoints.
FIELDS = {
    "/v1/completions": ("prompt",),
    "/v1/embeddings": ("input",),
    "/v1/score": ("query", "items"),
    "/v1/rerank": ("query", "documents"),
}
log = structlog.get_logger()


class Text(NamedTuple):
    """The text of a prompt. If not `is_exact`, the engine will read another text of about this length."""

    string: str
    is_exact: bool


class Prompt(NamedTuple):
    """A prompt's token ids. If `is_exact`, the engine will read exactly these; if not, at least `fewest` tokens."""

    ids: Sequence[int]
    is_exact: bool
    fewest: int = 0


class PromptTokens:
    """Holds the tokenizer and chat template of one model."""

    def __init__(self, tokenizer: Tokenizer | None, template: jinja2.Template | None, specials: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._specials = specials

    @classmethod
    def load(cls, source: str) -> "PromptTokens":
        """Load from a local folder or a hub id; a model without tokenizer.json is planned by UTF-8 bytes."""
        folder = Path(source)
        if not folder.is_dir():
            folder = Path(snapshot_download(source, allow_patterns=FILES))
        config = _read_json(folder / "tokenizer_config.json")
        jinja_file = folder / "chat_template.jinja"
        text = jinja_file.read_text() if jinja_file.exists() else config.get("chat_template")
        if isinstance(text, list):  # several named templates
            text = next((each["template"] for each in text if each.get("name") == "default"), None)
        tokenizer = None
        if (folder / "tokenizer.json").exists():
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        else:
            log.warning("no tokenizer.json: prompts are planned by bytes", model=source)
        specials = {key: _token_text(value) for key, value in config.items() if key.endswith("_token")}
        return cls(tokenizer, _environment().from_string(text) if text else None, specials)

    def encode(self, endpoint: str, bodies: list[dict[str, Any]]) -> list[Prompt]:
        """Return the prompt of each body, in order."""
        given = [token_ids(body.get("input" if endpoint == "/v1/embeddings" else "prompt")) for body in bodies]
        texts = [
            self.text(endpoint, body) if ids is None else Text("", True)
            for body, ids in zip(bodies, given, strict=True)
        ]
        strings = [text.string for text in texts]
        specials = endpoint not in TEMPLATED  # a chat template writes its own
        if self._tokenizer is None:
            return [
                Prompt(list(text.encode()) if ids is None else ids, ids is not None)
                for text, ids in zip(strings, given, strict=True)
            ]
        # The tokenizer needs hundreds of bytes for each byte of a text, so a gigantic one goes through it in pieces.
        short = [string if len(string) <= PIECE else "" for string in strings]
        encoded = [each.ids for each in self._tokenizer.encode_batch_fast(short, add_special_tokens=specials)]
        return [
            self._in_pieces(text) if len(text.string) > PIECE else Prompt(found if ids is None else ids, text.is_exact)
            for found, ids, text in zip(encoded, given, texts, strict=True)
        ]

    def decode(self, prompts: list[list[int]]) -> list[str]:
        """Return the texts of these token ids; where no tokenizer is known, they are bytes."""
        if self._tokenizer is None:
            return [bytes(each for each in ids if each < 256).decode(errors="replace") for ids in prompts]
        return self._tokenizer.decode_batch(prompts, skip_special_tokens=False)

    def _in_pieces(self, text: Text) -> Prompt:
        """Return approximately the text's tokens: they may differ at the cuts, and be a few more than there are."""
        assert self._tokenizer is not None
        found = array("I")
        for at in range(0, len(text.string), PIECE):
            [piece] = self._tokenizer.encode_batch_fast([text.string[at : at + PIECE]], add_special_tokens=False)
            found.extend(piece.ids)
        return Prompt(found, False, int(len(found) * CERTAIN) if text.is_exact else 0)

    def text(self, endpoint: str, body: dict[str, Any]) -> Text:
        if endpoint not in TEMPLATED:
            fields = FIELDS[endpoint]
            prompt = body.get(fields[0])
            if len(fields) == 1 and isinstance(prompt, str):
                return Text(prompt, True)
            return Text("\n".join(_as_text(body.get(name)) for name in fields), False)
        messages = _messages(endpoint, body)
        if self._template is not None:
            try:
                rendered = self._template.render(
                    messages=[_with_text_content(message) for message in messages],
                    tools=body.get("tools"),
                    add_generation_prompt=True,
                    **self._specials,
                    **(body.get("chat_template_kwargs") or {}),
                )
                return Text(rendered, endpoint == CHAT and _is_text_only(messages))
            except Exception:  # a template is the model's own program, and may fail in any way
                log.debug("chat template failed", exc_info=True)
        return Text(_as_text(messages), False)


def prompt_tokens(source: str) -> PromptTokens:
    """Return what a model makes of prompts, by its source; models that were used lately are not loaded again."""
    with _loading[source]:  # or two threads would load the same one
        return _loaded(source)


_loading: defaultdict[str, Lock] = defaultdict(Lock)
_loaded = lru_cache(maxsize=8)(PromptTokens.load)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return Jinja as chat templates expect it: Hugging Face's names, in a sandbox because models are not trusted."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    names: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(names)
    return environment


def _tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _messages(endpoint: str, body: dict[str, Any]) -> Any:
    """Return the messages that the template renders; for /v1/responses, roughly what SGLang makes of the input."""
    if endpoint == CHAT:
        return body["messages"]
    given = body["input"]
    messages: list[Any] = given if isinstance(given, list) else [{"role": "user", "content": given}]
    instructions = body.get("instructions")
    return [{"role": "system", "content": instructions}, *messages] if instructions else messages


def _with_text_content(message: Any) -> Any:
    """Return the message with the text of its parts as its content, if the content is a list of parts."""
    if isinstance(message, dict) and isinstance(message.get("content"), list):
        parts = [part.get("text", "") for part in message["content"] if isinstance(part, dict)]
        return {**message, "content": "".join(part for part in parts if isinstance(part, str))}
    return message


def _is_text_only(messages: Any) -> bool:
    contents = [message.get("content") for message in messages if isinstance(message, dict)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return all(isinstance(part, dict) and part.get("type", "text") == "text" for part in parts)


def token_ids(prompt: Any) -> list[int] | None:
    """Return the prompt if it is given as token ids, otherwise None."""
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) and 0 <= token < 2**32 for token in prompt):
        return prompt
    return None


def _as_text(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _read_json(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Any]) if path.exists() else {}


def _token_text(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token
