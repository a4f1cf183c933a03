"""Runs ours and SGLang's own policies on the same engine, with the same knowledge of lengths from one sample."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from engine_ext.arrays import Column, Floats, column
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.errors import TooLarge
from engine_ext.plan.families import find_families
from engine_ext.plan.groups import Groups, group_requests
from engine_ext.plan.lengths import UNKNOWN, Estimates, estimate, group_caps, look_ahead
from engine_ext.plan.memory import Recall
from engine_ext.plan.order import walk_in_order
from engine_ext.plan.prompts import Prompts
from engine_ext.plan.resources import Requests, node_loads
from engine_ext.plan.sample import ask_sample
from engine_ext.plan.tree import PrefixTree, build_tree
from engine_ext.plan.tuning import KEEP_SHARING, SAMPLE
from engine_ext.scan.footprint import output_tokens
from engine_ext.scan.replan import Progress, answers_before_next, plan_backlog
from engine_ext.scan.state import State, StepCosts
from engine_ext.scan.tiers import Urgency
from engine_ext.simulate.cache import Cache, new_cache
from engine_ext.simulate.engine import DECODE, DONE, PREFILL, Engine, new_engine, series_of
from engine_ext.simulate.loop import run_batchweave
from engine_ext.simulate.stock import run_stock


@dataclass(frozen=True, slots=True)
class Search:
    """Lists what to try for policies with settings; the best result counts.

    `chunks` are prompt tokens per step; `ratios` are SGLang's new token ratio at the start. `keep` is the share of the
    possible sharing that splits must keep.
    """

    chunks: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096)
    ratios: tuple[float, ...] = (1.0, 0.6, 0.3)
    keep: float = KEEP_SHARING


SEARCH = Search()
DEFAULT_RATIO = 0.7  # SGLang's new token ratio at the start, unless it is told otherwise
DEFAULT_CHUNKS = ((35, 2048), (60, 4096), (160, 8192))  # prompt tokens of a step on a GPU with less memory, in GiB
DEFAULT_CHUNK = 16384  # on a larger one


@dataclass(frozen=True, slots=True)
class Work:
    """A window as all policies see it: its tree, the true outputs, the sample, and estimates made from it.

    `share` is the part of the requests that is the sample. If `foretold`, our policy knows the sample's answers before
    it starts, and not only when they end. `recall` is what it remembers of earlier batches. `prepared_s` is the seconds
    that this took by `clock`, which also times what each policy plans.
    """

    tree: PrefixTree
    lengths: Column
    output: Column
    caps: Column
    groups: Groups
    share: float
    sample: Column
    known: Column
    foretold: bool
    recall: Recall | None
    estimates: Estimates
    cost: CostModel
    best_saved_s: float
    compute_s: float
    memory_s: float
    prepared_s: float
    clock: Callable[[], float]

    @property
    def ideal_s(self) -> float:
        """Return T_o: everything is shared and overlapped."""
        return max(self.compute_s - self.best_saved_s, self.memory_s)

    def practical_s(self, model: EngineModel) -> float:
        """Return T_o with the interference of the engine's clock."""
        return self.ideal_s + model.interference * min(self.compute_s - self.best_saved_s, self.memory_s)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds the result of one run; `seconds` and shares include `planner_s`.

    `sharing` is the share of T_comp that was not computed, leaving out what was computed again after retractions.
    """

    policy: str
    setting: str
    seconds: float
    tokens_per_s: float
    share_of_ideal: float
    share_of_practical: float
    sharing: float
    sharing_kept: float
    retractions: int
    recomputed_tokens: int
    steps: int
    planner_s: float
    most_kv: int
    series: Floats


Policy = Callable[[Work, EngineModel, int, Search], Outcome]


def prepare(
    prompts: Prompts,
    output: Column,
    cost: CostModel,
    caps: Column,
    kinds: Column | None = None,
    sample: float = SAMPLE,
    seed: int = 0,
    clock: Callable[[], float] = lambda: 0.0,
    foretold: bool = True,
    recall: Recall | None = None,
) -> Work:
    """Build the tree and the groups, and choose the sample. With `sample` 1 every length is known in advance."""
    started = clock()
    tree = build_tree(prompts)
    lengths = prompts.lengths
    groups = group_requests(tree, kinds)
    by_group = group_caps(groups, caps)
    if sample >= 1:
        chosen, known = np.empty(0, dtype=np.int64), output
        estimates = Estimates(
            *(np.asarray(each, dtype=np.float64) for each in (output, output.astype(float) ** 2, output))
        )
    else:
        generator = np.random.default_rng(seed)
        family = find_families(tree)
        chosen, seen = ask_sample(groups, by_group, lengths.astype(np.float64), output, generator, family, sample)
        known = np.full(len(prompts), UNKNOWN)
        known[chosen] = output[chosen]
        estimates = estimate(groups, look_ahead(seen, groups, by_group), caps, known)
    true = Requests.exact(lengths, output)
    root = node_loads(tree, true, cost).of(0)
    return Work(
        tree,
        lengths,
        output,
        caps,
        groups,
        min(sample, 1.0),
        chosen,
        known,
        foretold,
        recall,
        estimates,
        cost,
        root.saved_s,
        root.compute_s,
        root.memory_s,
        clock() - started,
        clock,
    )


def simulate(work: Work, model: EngineModel, policy: str, seed: int = 0, search: Search = SEARCH) -> Outcome:
    """Run a policy, with the best of its settings in `search` if it has any. Raises KeyError, TooLarge."""
    return run(work, model, POLICIES[policy], seed, search)


def run(work: Work, model: EngineModel, policy: Policy, seed: int = 0, search: Search = SEARCH) -> Outcome:
    """Run a policy; see `simulate`. Raises TooLarge."""
    needed = work.lengths + work.output
    if len(needed) and int(needed.max()) >= model.capacity:
        raise TooLarge(int(needed.argmax()), int(needed.max()), model.capacity)
    return policy(work, model, seed, search)


def _batchweave(work: Work, model: EngineModel, seed: int, search: Search) -> Outcome:
    engine, cache, planned_s = run_scan(work, model, seed, search.keep)
    return outcome_of("batchweave", "", work, model, engine, cache, planned_s)


def run_scan(
    work: Work, model: EngineModel, seed: int = 0, keep: float = KEEP_SHARING, due_s: Floats | None = None
) -> tuple[Engine, Cache, float]:
    """Run our dual scan; return the engine and the cache as they are at the end, and the seconds spent on plans.

    `due_s`: float64 [requests], seconds from the start until each must have ended; None for no deadlines.
    """
    costs = StepCosts(
        model.gemm_s,
        model.read_s,
        model.weights_s,
        model.capacity,
        quadratic_s=model.quadratic_s,
        bursts=model.clock is Clock.SEQUENTIAL,
    )
    generator, (engine, cache) = np.random.default_rng(seed), fresh_engine(work, model)
    progress, decoded, planned_s = _at_first(work), 0, 0.0
    while not np.all(progress.ended):
        started = work.clock()
        now_s = float(engine.totals[0].seconds)
        if due_s is not None:
            progress = replace(progress, urgency=Urgency(due_s - now_s, np.zeros_like(progress.ended)))
        plan = plan_backlog(work.tree, work.groups, progress, work.cost, costs, generator, work.share, keep)
        state = plan.state
        planned_s += work.clock() - started
        answers = answers_before_next(progress.learned)
        until_s = now_s + float(plan.look_again_s)
        decoded = run_batchweave(engine, cache, model.numbers, state, decoded, answers, until_s)
        progress = _go_on(progress, engine, state)
    return engine, cache, planned_s


def _at_first(work: Work) -> Progress:
    sampled = np.zeros(len(work.known), dtype=np.bool_)
    sampled[work.sample] = work.foretold
    known = work.known.copy()
    if not work.foretold:
        known[work.sample] = UNKNOWN
    return replace(Progress.at_first(work.caps, known, sampled), recall=work.recall)


def _go_on(progress: Progress, engine: Engine, state: State) -> Progress:
    """Return how far the engine's requests are now."""
    runs, ended = (engine.state == PREFILL) | (engine.state == DECODE), engine.state == DONE
    running = np.flatnonzero(runs)
    tokens = np.where(ended, engine.output, engine.generated)
    tokens[running] = output_tokens(state, running)
    return replace(
        progress,
        tokens=tokens,
        runs=runs,
        prefilled=engine.state == DECODE,
        ended=ended,
        fresh=column(state.requests, "fresh").astype(np.int64),
        side=column(state.requests, "side").astype(np.int64),
    )


def ordered(name: str, order_of: Callable[[Work, int], Column], lpm: bool = False) -> Policy:
    """Return a policy that is a fixed order, at its best chunk size and then its best ratio."""

    def policy(work: Work, model: EngineModel, seed: int, search: Search) -> Outcome:
        run_at = _runner(name, order_of, lpm, work, model, seed)
        first, *others = search.ratios
        best = min(((run_at(chunk, first), chunk) for chunk in search.chunks), key=lambda found: found[0].seconds)
        return min([best[0], *(run_at(best[1], ratio) for ratio in others)], key=lambda found: found.seconds)

    return policy


def _at_defaults(name: str, order_of: Callable[[Work, int], Column], lpm: bool = False) -> Policy:
    """Return the same policy with the chunk size and the ratio that SGLang has where nobody sets them."""

    def policy(work: Work, model: EngineModel, seed: int, search: Search) -> Outcome:
        memory = work.cost.machine.hardware.memory_bytes / 2**30
        chunk = next((chunk for most, chunk in DEFAULT_CHUNKS if memory < most), DEFAULT_CHUNK)
        return _runner(name, order_of, lpm, work, model, seed)(chunk, DEFAULT_RATIO)

    return policy


def _runner(
    name: str, order_of: Callable[[Work, int], Column], lpm: bool, work: Work, model: EngineModel, seed: int
) -> Callable[[int, float], Outcome]:
    """Return what runs this order at a chunk size and a ratio, the sample first."""
    started = work.clock()
    order = order_of(work, seed)
    planned_s = work.clock() - started
    whole = np.concatenate([in_order(work.sample, order), order[~np.isin(order, work.sample)]])

    def run_at(chunk: int, ratio: float) -> Outcome:
        engine, cache = fresh_engine(work, model)
        run_stock(engine, cache, model.numbers, whole, work.estimates.mean, chunk, ratio, lpm)
        return outcome_of(name, f"chunk {chunk}, ratio {ratio:g}", work, model, engine, cache, planned_s)

    return run_at


def _as_submitted(work: Work, seed: int) -> Column:
    return np.arange(len(work.output))


def _at_random(work: Work, seed: int) -> Column:
    return np.random.default_rng(seed + 1).permutation(len(work.output))


def _longest_first(work: Work, seed: int) -> Column:
    return np.argsort(-work.estimates.mean, kind="stable")


def by_weight(work: Work, seed: int) -> Column:
    """Return SGLang's dfs-weight order when everything waits: the cached subtree continues, heavier nodes first.

    A new subtree begins with the request that came first.
    """
    tree = work.tree
    weight = (tree.last - tree.first).astype(np.float64)
    key = -weight
    top = np.flatnonzero(tree.parent == 0)  # they cover the order, each a consecutive part of it
    key[top] = np.minimum.reduceat(tree.order, tree.first[top])
    children = np.lexsort((key[1:], tree.parent[1:])) + 1
    return walk_in_order(tree, children).order


def in_order(chosen: Column, order: Column) -> Column:
    """Return the chosen requests as they follow each other in the order."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return chosen[np.argsort(place[chosen])]


def fresh_engine(work: Work, model: EngineModel) -> tuple[Engine, Cache]:
    """Return an engine and an empty cache as they are before the first step."""
    tree = work.tree
    leaf = np.empty(len(work.output), dtype=np.int64)
    leaf[tree.order] = tree.leaves
    return new_engine(leaf, work.lengths, work.output), new_cache(tree.parent, tree.begin, tree.end, model.capacity)


def outcome_of(
    policy: str, setting: str, work: Work, model: EngineModel, engine: Engine, cache: Cache, planned_s: float
) -> Outcome:
    cost, planner_s = work.cost, work.prepared_s + planned_s
    seconds = float(engine.totals[0].seconds) + planner_s
    tokens = int(work.lengths.sum() + work.output.sum())
    # The part of prompts that was computed, in the cost model's seconds: GEMM by token, attention by position.
    computed = cache.tokens[0]
    prompt_s = float(computed.computed) * cost.gemm_s_per_token + float(computed.quadratic) * cost.quadratic_s
    whole_s = float(cost.compute_s(work.lengths, np.zeros(len(work.lengths))).sum())
    saved = (whole_s - prompt_s) / work.compute_s if work.compute_s else 0.0
    best = work.best_saved_s / work.compute_s if work.compute_s else 0.0
    return Outcome(
        policy=policy,
        setting=setting,
        seconds=seconds,
        tokens_per_s=tokens / seconds if seconds else 0.0,
        share_of_ideal=work.ideal_s / seconds if seconds else 1.0,
        share_of_practical=work.practical_s(model) / seconds if seconds else 1.0,
        sharing=saved,
        sharing_kept=saved / best if best else 1.0,
        retractions=int(engine.totals[0].retractions),
        recomputed_tokens=int(engine.totals[0].recomputed),
        steps=int(engine.totals[0].steps),
        planner_s=planner_s,
        most_kv=int(engine.totals[0].most_locked),
        series=series_of(engine),
    )


_SGLANGS: Mapping[str, tuple[Callable[[Work, int], Column], bool]] = MappingProxyType(
    {
        "fcfs": (_as_submitted, False),
        "lpm": (_as_submitted, True),
        "dfs-weight": (by_weight, False),
        "random": (_at_random, False),
        "lof": (_longest_first, False),
    }
)
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        **{f"{name}-default": _at_defaults(f"{name}-default", *how) for name, how in _SGLANGS.items()},
        **{name: ordered(name, *how) for name, how in _SGLANGS.items()},
        "batchweave": _batchweave,
    }
)
