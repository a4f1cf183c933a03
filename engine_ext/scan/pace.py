"""Says how many prompt tokens a step computes, so that compute and memory reads end together (BlendServe 5.3).

The pace keeps both in the ratio of the remaining work. `decide.py` chooses between the pace and what may override it.
"""

import numpy as np

from engine_ext.compiled import compiled
from engine_ext.scan.state import State, StepCosts
from engine_ext.scan.sweep import NOTHING_S
from engine_ext.scan.tuning import ALIGNMENT


@compiled
def paced_tokens(state: State, decoding_kv: int, decoding: int, pending: int) -> int:
    """Return how many prompt tokens keep the step's compute and reads in the ratio of the remaining work."""
    costs, totals = state.costs, state.totals[0]
    most = int(costs.most_tokens)
    token_s, reads_s = _prompt_token_s(state), decoding_kv * costs.read_s
    if decoding == 0 or totals.remaining_memory_s <= NOTHING_S:
        return max(0, most - decoding)
    # This replaces C_L + C_R of BlendServe's Algorithm 3, which follow the root's constant density, not what remains.
    ratio = _ratio(state, pending * token_s)
    paced = (min(ratio, 1.0) * reads_s - decoding * costs.gemm_s) / token_s
    riding = decoding + _riding(costs, ratio, token_s, reads_s, decoding)
    tokens = max(decoding + paced, riding)
    if tokens >= 2 * ALIGNMENT:  # BlendServe A.2: multiples of 128 use the hardware better
        tokens = np.floor(tokens / ALIGNMENT + 0.5) * ALIGNMENT
        if tokens < riding:  # else the step would read weights and compute nothing meanwhile
            tokens += ALIGNMENT
    return int(max(0.0, min(tokens, most) - decoding))


@compiled
def most_tokens(state: State, reads_s: float, decoding: int) -> int:
    """Return how many prompt tokens compute no longer than the step reads anyway.

    Once their GEMM takes as long as reading the weights, steps of any length compute equally many prompts a second. A
    longer step starts no request earlier; it only gives all that decode fewer tokens in that time, and the last of them
    end the run (docs/simulator.md, what made the difference).
    """
    costs, token_s = state.costs, _prompt_token_s(state)
    if decoding == 0:
        return int(costs.most_tokens)
    tokens = max((reads_s - decoding * costs.gemm_s) / token_s, costs.weights_s / costs.gemm_s - decoding)
    return int(max(0.0, min(tokens, costs.most_tokens - decoding)))


@compiled
def _ratio(state: State, pending_s: float) -> float:
    """Return the ratio of compute to reads in the remaining work.

    Above 1, all steps that compute at least as long as they read are equally good. A longer step only makes decoding
    wait, so that it becomes known late which answers are long.
    """
    return (state.totals[0].remaining_compute_s + pending_s) / state.totals[0].remaining_memory_s


@compiled
def _riding(costs: StepCosts, ratio: float, token_s: float, reads_s: float, decoding: int) -> float:
    """Return how many prompt tokens can hide their GEMM behind reading the weights, which every step pays for.

    Where reads are the larger part of the remaining work (`ratio` is below 1), the attention of these tokens must hide
    too, or it would make the step longer. Where compute is the larger part, attention takes its time in any step, and a
    step with too few tokens pays for reading the weights as well (docs/simulator.md, what made the difference).
    """
    weights_s, attention_s = costs.weights_s, token_s - costs.gemm_s
    riding = weights_s / costs.gemm_s - decoding
    if attention_s > 0 and ratio < 1:
        riding = min(riding, (max(reads_s, 2 * weights_s) - weights_s) / attention_s)
    return riding


@compiled
def hurried_tokens(state: State, decoding: int) -> int:
    """Return how many prompt tokens a step would need to keep the pace if the KV cache were full."""
    costs, totals = state.costs, state.totals[0]
    most = costs.most_tokens
    if totals.remaining_memory_s > NOTHING_S:
        seconds = min(_ratio(state, 0.0), 1.0) * costs.capacity * costs.read_s
        most = min(most, max(seconds / _prompt_token_s(state), ALIGNMENT))
    return max(0, int(most / ALIGNMENT) * ALIGNMENT - decoding)


@compiled
def _prompt_token_s(state: State) -> float:
    """Return the seconds per prompt token, attention included: of pending prompts, or else of the next ones."""
    work = state.totals[0].left_work
    if state.totals[0].pending_tokens > 0:
        work = state.totals[0].pending_work / state.totals[0].pending_tokens
    return state.costs.gemm_s * work
