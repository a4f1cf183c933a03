"""SGLang on an emulated device: a list of requests in, the virtual time and the books of the run out."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import ContinueGenerationReqInput, PauseGenerationReqInput, SetInternalStateReq

from engine_ext.plan.cost import CostModel
from engine_ext.plan.engine_model import Clock, EngineModel
from engine_ext.plugin import admission, emulated
from engine_ext.plugin.host import CPU_DEFAULTS
from engine_ext.plugin.options import Options

CONTEXT = 1 << 18  # tokens
RUNNING = 2048
STEP_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class Setting:
    """How a run is scheduled. `policy`: one of SGLang's, or None for the dual scan.

    `chunk` and `ratio` (new token ratio at the start) are SGLang's; the scan takes the first as its largest step.
    """

    clock: Clock
    policy: str | None = None
    chunk: int = STEP_TOKENS
    ratio: float = 0.7


class EmulatedEngine:
    """Create it in the main thread before the event loop runs; `model_path` is any small model, which never runs."""

    def __init__(self, model_path: str, cost: CostModel, capacity: int | None = None, context: int = CONTEXT) -> None:
        Options(cost, emulated=True).hand_over()
        self.capacity = capacity or EngineModel.of(cost).capacity  # tokens of KV cache
        self._engine = Engine(
            model_path=model_path,
            **{
                **CPU_DEFAULTS,
                "max_total_tokens": self.capacity,
                "max_running_requests": RUNNING,
                "chunked_prefill_size": STEP_TOKENS,
            },
            enable_mixed_chunk=True,
            max_prefill_tokens=STEP_TOKENS + RUNNING,
            context_length=context,
            json_model_override_args=json.dumps({"max_position_embeddings": context}),
            skip_tokenizer_init=True,
            disable_overlap_schedule=True,
            skip_server_warmup=True,
            log_level="error",
        )
        self._manager: Any = self._engine.tokenizer_manager

    async def run(self, setting: Setting, prompts: Sequence[list[int]], outputs: Sequence[int]) -> dict[str, Any]:
        """Run them all, given in this order, with everything there before the first step; the books of the run.

        Nobody is told the lengths of outputs beforehand.
        """
        self._manager.auto_create_handle_loop()
        await self._manager.flush_cache()
        policy = emulated.POLICIES.index(setting.policy or "fcfs")
        numbers = {
            emulated.SET: int(setting.clock),
            emulated.CHUNK: setting.chunk,
            emulated.RATIO: setting.ratio,
            emulated.POLICY: policy,
        }
        await self._manager.set_internal_state(SetInternalStateReq(server_args=numbers))
        await self._manager._async_dispatch_to_scheduler(PauseGenerationReqInput(mode="in_place"))
        ours = {"custom_params": {admission.KIND: "run", admission.UNTOLD: True}} if setting.policy is None else {}

        async def one(number: int) -> dict[str, Any]:
            sampling = {"max_new_tokens": outputs[number], "ignore_eos": True, "temperature": 0, **ours}
            answer: Any = await self._engine.async_generate(
                input_ids=prompts[number], sampling_params=sampling, rid=f"emulated-{number}"
            )
            return answer["meta_info"]

        tasks: list[asyncio.Task[dict[str, Any]]] = []
        for number in range(len(prompts)):
            tasks.append(asyncio.create_task(one(number)))
            if number % 64 == 0:
                await asyncio.sleep(0)
        await asyncio.sleep(1 + len(prompts) / 2000)  # they cross over to the scheduler
        await self._manager._async_dispatch_to_scheduler(ContinueGenerationReqInput())
        metas = await asyncio.gather(*tasks)
        [state] = await self._manager.get_internal_state()
        return state["batchweave"] | {
            "cached_tokens": sum(meta["cached_tokens"] for meta in metas),
            "retractions": sum(meta.get("num_retractions", 0) for meta in metas),
        }

    def close(self) -> None:
        self._engine.shutdown()
