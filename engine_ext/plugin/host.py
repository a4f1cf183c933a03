"""One SGLang engine in this process, driven through SGLang's own OpenAI serving classes."""

import asyncio
import os
import signal
from dataclasses import dataclass
from typing import Any

import orjson
from pydantic import BaseModel, ValidationError
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion

from engine_ext.plugin import admission, entry

# What a batch line may not choose: identity, place in the queue, and routing belong to the service.
RESERVED_FIELDS = frozenset(
    {"rid", "priority", "stream", "stream_options", "session_id", "session_params", "bootstrap_host"}
    | {"bootstrap_port", "bootstrap_room", "routed_dp_rank", "disagg_prefill_dp_rank"}
)

# The wheel on a CPU: bfloat16 GEMM gives each row the same bits whatever the batch around it (float32 does not,
# below four rows), and one thread keeps it so and leaves the machine usable.
CPU_DEFAULTS: dict[str, Any] = {
    "dtype": "bfloat16",
    "sampling_backend": "pytorch",
    "disable_cuda_graph": True,
    "max_total_tokens": 65536,
    "max_running_requests": 64,
    "chunked_prefill_size": 4096,
}


class EngineStartError(RuntimeError):
    """The engine came up without batchweave's plugin in its scheduler."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What SGLang said to one request: an HTTP status and a JSON body, or that the request was aborted."""

    status_code: int
    body: bytes
    aborted: bool = False


class EngineHost:
    """Create it in the main thread before the event loop runs, then `await start()` in the loop."""

    def __init__(self, model_path: str, model_name: str, engine_args: dict[str, Any]) -> None:
        on_gpu = entry.gpu_is_present()
        if not on_gpu:
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        self.device = "gpu" if on_gpu else "cpu"
        self.model_name = model_name
        self._engine = Engine(
            **{
                "model_path": model_path,
                "served_model_name": model_name,
                "schedule_policy": "fcfs",
                "enable_cache_report": True,
                "skip_server_warmup": True,
                "log_level": "warning",
                **({} if on_gpu else CPU_DEFAULTS),
                **engine_args,
            }
        )
        self._manager: Any = self._engine.tokenizer_manager
        self._vocab_size = int(self._manager.model_config.vocab_size)
        manager, templates = self._manager, self._engine.template_manager
        self._serving: dict[str, tuple[type[BaseModel], OpenAIServingBase]] = {
            "/v1/chat/completions": (ChatCompletionRequest, OpenAIServingChat(manager, templates)),
            "/v1/completions": (CompletionRequest, OpenAIServingCompletion(manager, templates)),
        }

    async def start(self) -> None:
        """Attach to the running loop and assert that the plugin is in the scheduler process."""
        loop = asyncio.get_running_loop()
        self._manager.auto_create_handle_loop()
        # SGLang takes SIGTERM for its server; this process belongs to the worker, which drains by itself.
        loop.remove_signal_handler(signal.SIGTERM)
        wanted = {target for target, _, _ in entry.hooks()}
        for state in await self.scheduler_states():
            missing = wanted - set(state["hooks"])
            if missing:
                raise EngineStartError(f"SGLang started without these hooks of batchweave: {sorted(missing)}")

    async def scheduler_states(self) -> list[dict[str, Any]]:
        """Batchweave's part of each scheduler's internal state, one per data-parallel rank."""
        states = await self._manager.get_internal_state()
        missing = {"hooks": [], "waiting": 0, "admitted": 0, "recent_ranks": []}
        return [state.get("batchweave", missing) for state in states]

    async def max_running_requests(self) -> int:
        """Requests that the engine decodes at once, over all data-parallel ranks."""
        states = await self._manager.get_internal_state()
        return sum(int(state["effective_max_running_requests_per_dp"]) for state in states)

    async def run(self, endpoint: str, body: dict[str, Any], rid: str, rank: int) -> Answer:
        """Run one request; `rank` is its place in the plan, lower first. Bad requests answer 4xx, never raise."""
        request_type, serving = self._serving[endpoint]
        fields = {key: value for key, value in body.items() if key not in RESERVED_FIELDS}
        deadly = _deadly_field(fields, self._vocab_size)
        if deadly:
            message = f"{deadly}: outside the model's vocabulary of {self._vocab_size} tokens"
            return Answer(400, _error_body(message, "invalid_request_error", deadly, "invalid_request"))
        try:
            request: Any = request_type.model_validate(fields)
        except ValidationError as error:
            return _refused(error)
        request.rid = rid
        request.custom_params = {**(request.custom_params or {}), admission.RANK: rank}
        response: Any = await serving.handle_request(request, None)  # type: ignore[arg-type]
        if isinstance(response, BaseModel):
            choices = getattr(response, "choices", [])
            aborted = any(choice.finish_reason == "abort" for choice in choices)
            return Answer(200, response.model_dump_json().encode(), aborted)
        return _failed(response.status_code, bytes(response.body))

    def abort(self, rid: str) -> None:
        self._manager.abort_request(rid)

    def close(self) -> None:
        self._engine.shutdown()


def _deadly_field(fields: dict[str, Any], vocab_size: int) -> str | None:
    """The field of which SGLang 0.5.17's scheduler would die, with every request in it: it does not look itself."""
    for name in ("prompt", "input_ids"):
        if not _in_vocabulary(fields.get(name), vocab_size):
            return name
    for name in ("logprobs", "top_logprobs"):
        wanted = fields.get(name)
        if isinstance(wanted, int) and wanted > vocab_size:
            return name
    return None


def _in_vocabulary(prompt: Any, vocab_size: int) -> bool:
    if isinstance(prompt, list):
        return all(_in_vocabulary(each, vocab_size) for each in prompt)
    return not isinstance(prompt, int) or 0 <= prompt < vocab_size


def _refused(error: ValidationError) -> Answer:
    first = error.errors(include_url=False, include_input=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    return Answer(400, _error_body(f"{first['msg']} ({param})", "invalid_request_error", param, "invalid_request"))


def _failed(status_code: int, body: bytes) -> Answer:
    """SGLang's flat error object in OpenAI's envelope."""
    error = orjson.loads(body)
    kind = "invalid_request_error" if status_code < 500 else "server_error"
    code = "invalid_request" if status_code < 500 else "server_error"
    return Answer(status_code, _error_body(error["message"], kind, error.get("param"), code))


def _error_body(message: str, kind: str, param: str | None, code: str) -> bytes:
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})
