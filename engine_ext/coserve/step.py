"""Decides one step beside online requests, and learns from it: the rules of this package in one call each.

The scheduler plugin calls `choose` and `learn` in every step, where a call from Python costs about as much as what it
computes. The simulator gives each online prompt its part as it admits it, and shares the rest.
"""

from typing import NamedTuple

from engine_ext.arrays import Bools, Column
from engine_ext.compiled import compiled
from engine_ext.coserve.governor import Governor, governed, note_step
from engine_ext.coserve.harvest import harvest
from engine_ext.coserve.limit import NOT_PROFILED, PAGE, Profiled, step_limit, while_prompts_wait
from engine_ext.coserve.predictor import Load, Predictor, longest_chunk, observe, predict, with_chunk, with_margin
from engine_ext.coserve.slo import Bounds


class Online(NamedTuple):
    """What online requests need of a step.

    `decoding`: how many of them decode. `prompts`: how many wait for this step with their prompts; 0 if these find no
    room, for then they wait for batches to end. Requests that may wait are not among these. `tokens`: prompt tokens
    still to compute; `due_tokens`: those of prompts with deadlines; `before`: computed tokens of the first prompt.
    `slack_s`: the least time until the next token of one that decodes is due, less what still runs;
    `first_slack_s`: until the first token of one of the prompts.
    """

    decoding: int
    prompts: int
    tokens: int
    due_tokens: int
    before: int
    slack_s: float
    first_slack_s: float


class Delayed(NamedTuple):
    """What work of batches in a step delays: so many online `requests`, with prompts among them or not.

    `slack_s`, `first_slack_s`: as in `Online`. `rest`: tokens of online prompts that stay for further steps of `chunk`
    each.
    """

    requests: int
    has_prompts: bool
    slack_s: float
    first_slack_s: float
    rest: int
    chunk: int


class Batches(NamedTuple):
    """What batches have for a step.

    `kv`, `skipped`: by decode, int64 [decodes], the KV tokens that it reads and for how many steps running it was left
    out. `before`: the computed tokens of the prompt that is next.
    """

    kv: Column
    skipped: Column
    before: int


class Choice(NamedTuple):
    """The prompt tokens of a step, of `online` requests and of `batches`, and the most seconds that it may take."""

    online: int
    batches: int
    limit_s: float


@compiled
def choose(
    predictor: Predictor,
    governor: Governor,
    bounds: Bounds,
    profiled: Profiled,
    decodes: Load,
    needs: Online,
    batches: Batches,
    largest: int,
    rests: Bools,
) -> Choice:
    """Choose a step's prompt tokens, and write into `rests` which decodes of batches it leaves out.

    `decodes`: the load of those that decode in any case. `largest`: prompt tokens of the largest step.
    """
    online = 0
    if needs.tokens > 0:
        alone_s = predict(predictor, decodes)
        limit_s = step_limit(bounds, NOT_PROFILED, needs.slack_s, alone_s, needs.decoding, False)
        fitting = longest_chunk(predictor, decodes, needs.before, limit_s, needs.tokens)
        online = min(needs.tokens, max(fitting, PAGE))
    load = with_chunk(decodes, needs.before, online) if online > 0 else decodes
    delayed = Delayed(
        needs.decoding + needs.prompts,
        needs.prompts > 0,
        needs.slack_s,
        needs.first_slack_s,
        max(0, needs.due_tokens - online) if needs.prompts > 0 else 0,
        online,
    )
    limit_s = batches_limit(predictor, governor, bounds, profiled, load, delayed)
    most = max(0, largest - online)
    found = harvest(predictor, load, batches.kv, batches.skipped, rests, limit_s, batches.before, most)
    if needs.decoding + needs.prompts > 0:
        return Choice(online, found.prompt_tokens, limit_s)
    if found.left_out == len(rests):  # nobody waits for this step; a limit that no step can keep must not end batches
        rests[:] = False
    return Choice(online, max(found.prompt_tokens, PAGE), limit_s)


@compiled
def batches_limit(
    predictor: Predictor, governor: Governor, bounds: Bounds, profiled: Profiled, load: Load, delayed: Delayed
) -> float:
    """Return the most seconds of a step with work of batches, beside the online work `load`."""
    alone_s, slack_s = predict(predictor, load), delayed.slack_s
    if delayed.rest > 0:
        slack_s = min(slack_s, while_prompts_wait(alone_s, delayed.first_slack_s, delayed.rest, delayed.chunk))
    limit_s = step_limit(bounds, profiled, slack_s, alone_s, delayed.requests, delayed.has_prompts)
    return governed(governor, limit_s, with_margin(predictor, load))


@compiled
def learn(predictor: Predictor, governor: Governor, load: Load, online: Load, took_s: float) -> None:
    """Learn from a step of this load that took so many seconds, of which `online` was for online requests."""
    note_step(governor, took_s, predict(predictor, online), predict(predictor, load))
    observe(predictor, load, took_s)
