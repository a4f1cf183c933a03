"""Holds our requests in one scheduler, and the dual scan that decides which of them prefill in a step.

They wait here, outside SGLang's queue, whose cost per step grows with its length. `admission_hooks.py` shows SGLang the
ones that the scan admits. Requests without our mark are online requests: they stay in SGLang's own queue and go first
(`online.py`).
"""

import logging
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from engine_ext.coserve.limit import Limits
from engine_ext.coserve.slo import SloClasses
from engine_ext.coserve.tuning import LEAST_CHUNK
from engine_ext.coserve.victims import victims
from engine_ext.costs.cost import CostModel
from engine_ext.costs.engine_model import Clock, EngineModel
from engine_ext.plan.buckets import LONGEST
from engine_ext.plan.lengths import UNKNOWN
from engine_ext.plan.prompts import first_token
from engine_ext.plugin.marks import KIND, LENGTHS, UNTOLD, due_of, number_of, profile_of, project_of, weight_of
from engine_ext.plugin.options import Emulation, Overlap, mine
from engine_ext.plugin.scheduler import emulated
from engine_ext.plugin.scheduler.beside import Beside
from engine_ext.plugin.scheduler.fallback import reason_for_sglang
from engine_ext.plugin.scheduler.figures import Figures
from engine_ext.plugin.scheduler.host_copies import HostCopies
from engine_ext.plugin.scheduler.kv_space import KVSpace
from engine_ext.plugin.scheduler.member import GAIN, Member, Phase, Reason
from engine_ext.plugin.scheduler.online import NOBODY, Demand, demand, is_ours, length, uncomputed_tokens
from engine_ext.plugin.scheduler.pins import Pins
from engine_ext.plugin.scheduler.preemption import keeps_its_answer
from engine_ext.plugin.scheduler.radix import cached_tokens
from engine_ext.plugin.scheduler.ranks import Ranks
from engine_ext.plugin.scheduler.reuse import Reuse
from engine_ext.plugin.scheduler.turns import Turns
from engine_ext.scan.backlog import AtOnce, Executor
from engine_ext.scan.projects import Owner
from engine_ext.scan.state import StepCosts
from engine_ext.step.live import LiveScan
from engine_ext.step.tuning import MOST_MADE_WAY

log = logging.getLogger(__name__)
PINS_LEAVE = 64  # steps for which running requests must find room beside pinned prefixes
LOOK_AGAIN = 16  # steps between two looks at the cache for the same request
STEP_TOKENS = 8192  # the largest step if SGLang sets none
SWITCH_S = 0.0005  # after which a plan's thread leaves the interpreter to a step that waits for it


@dataclass(eq=False)
class Admission:
    """Our requests in one scheduler, and the scan that admits them."""

    scan: LiveScan
    overlap: Overlap
    pins: Pins
    ranks: Ranks
    space: KVSpace
    beside: Beside
    copies: HostCopies
    foresees: bool = False  # whether the worker asks what online requests will meet
    fallback: str | None = None  # why SGLang's own policy schedules instead
    by_key: dict[int, Member] = field(default_factory=dict[int, Member])
    waiting: dict[str, Member] = field(default_factory=dict[str, Member])  # by rid
    running: dict[Any, Member] = field(default_factory=dict[Any, Member])  # by SGLang's request
    computing: list[Member] = field(default_factory=list[Member])  # the running ones in PREFILL or STORING
    next_key: int = 0
    decoded: int = 0
    made_way: list[Any] = field(default_factory=list[Any])  # in this step
    resting: Any = None  # SGLang's batch of the decodes that the last step left out
    online: dict[Any, int] = field(default_factory=dict[Any, int])  # those that wait: how many steps went by
    online_runs: bool = True  # whether an online request may be among those that decode
    steps: int = 0
    figures: Figures = field(default_factory=Figures)
    not_mixed: int = 0  # running requests with which SGLang mixes no chunks
    cache_changed: bool = False
    reuse: Reuse = field(default_factory=Reuse)
    turns: Turns = field(default_factory=Turns)

    @classmethod
    def of(
        cls, cost: CostModel, online: SloClasses, limits: Limits, scheduler: Any, least_share: float = 0.0
    ) -> "Admission":
        space, overlap = KVSpace.of(scheduler), overlap_of(scheduler)
        step_tokens = int(scheduler.chunked_prefill_size or STEP_TOKENS)
        costs = StepCosts.of(cost, space.capacity, step_tokens, bursts=not overlap.mixes)
        scan = LiveScan(cost, costs, executor=_executor())
        fallback = reason_for_sglang(scheduler)
        if fallback:
            log.warning("SGLang's own policy schedules this engine, and not the dual scan: %s", fallback)
        pins = Pins(scheduler.tree_cache, space.capacity)
        ranks = Ranks.of(scheduler)
        model = EngineModel.of_steps(cost, Clock.MIXED).numbers
        beside = Beside.of(online, limits, model, space.capacity, _lag(scheduler, ranks), least_share)
        beside.is_needed &= fallback is None  # in such an engine a batch's requests look like online ones
        return cls(scan, overlap, pins, ranks, space, beside, HostCopies(scheduler), fallback=fallback)

    def add(self, req: Any) -> None:
        """Add a request that waits now, for the first time or because it was retracted."""
        if req in self.running:
            self.stop(req, Reason.RETRACTED)
            return
        member = self.waiting[req.rid] = self.by_key[self.next_key] = Member(req, self.next_key)
        self.next_key += 1
        params = req.sampling_params
        known = params.max_new_tokens if params.ignore_eos and not params.stop_strs else UNKNOWN
        cap = params.max_new_tokens
        if params.custom_params.get(UNTOLD):
            known, cap = UNKNOWN, LONGEST
        # One batch may hold several tasks, which often differ in max_tokens.
        alike = f"{params.custom_params[KIND]} {cap.bit_length()}"
        owner = Owner(number_of(project_of(req)), weight_of(req))
        prompt = np.array(req.origin_input_ids, dtype=np.uint32)
        if req.extra_key and len(prompt):  # SGLang's name for what shares no cache with others, such as an adapter's
            prompt[0] = first_token(int(prompt[0]), req.extra_key)
        apart = self.overlap.mixes and bool(req.return_logprob)
        profile = profile_of(params.custom_params.get(LENGTHS))
        due = due_of(params.custom_params)
        self.scan.add(member.key, prompt, cap, known, number_of(alike), due, apart, profile, owner)

    def take_back(self, rid: str, everything: bool) -> list[Any]:
        """Remove and return the waiting requests that an abort means: that of this id, or those that begin with it."""
        if everything:
            meant = list(self.waiting)
        elif rid in self.waiting:
            meant = [rid]
        else:
            meant = [each for each in self.waiting if each.startswith(rid)]
        members = [self.waiting.pop(each) for each in meant]
        for member in members:
            del self.by_key[member.key]
            self.scan.take_back(member.key)
        if not self.waiting:
            self.pins.release()
        return [member.req for member in members]

    def keep_prefixes(self, changed: bool, chunked: Any, online: int, decoding: int) -> None:
        """Pin the cached prefix of the request that each end of the scan admits next, as far as there is room.

        That is beside what runs and begins needs in the next steps: the rest of the prompt that is computed in chunks,
        if there is one, `online` KV tokens for online prompts, and those of `decoding` requests. Nothing is pinned when
        no request waits, or when none runs, since the next one may then need the whole cache. A prefix that finds no
        room is looked up again when the cache has changed, or when there was no room at all. `changed`: the cache may
        hold more than before.
        """
        self.cache_changed |= changed
        begun = 0 if chunked is None else uncomputed_tokens(chunked)
        needed = begun + online + PINS_LEAVE * (decoding + len(self.computing) + 1)
        room = self.space.free + self.pins.tokens - needed
        if not self.waiting or not self.running or room <= 0:
            self.pins.release()
            return
        again = self.cache_changed and self.steps % LOOK_AGAIN == 0
        self.pins.keep([self.by_key[key].req for key in self.scan.next_keys], again, room)
        self.cache_changed &= not again

    def notice_ends(self, still: Sequence[Any], continued: Any) -> bool:
        """Tell the scan which requests have ended: those that ran and are not in SGLang's batch any more.

        `continued`: the request with more chunks to prefill, which is in no batch. Returns whether any has ended.
        """
        if not self.online_runs and len(still) + (continued in self.running) == len(self.running):
            return False  # as in most steps; all of the batch are ours
        here = set(still)
        # In the order of admission: that of a set differs between processes, and all ranks must tell their scans the
        # same events in the same order, or they come to admit different requests.
        gone = [req for req in self.running if req not in here]
        for req in gone:
            if req is continued:
                continue
            member, tokens = self._leave(req), len(req.output_ids)
            del self.by_key[member.key]
            was_prefill = member.phase is Phase.PREFILL
            self._computed(member)
            if was_prefill or isinstance(req.finished_reason, FINISH_ABORT):
                self.scan.dropped(member.key, tokens)
            else:
                self.scan.finished(member.key, tokens)
        return bool(gone)

    def most_prompt_tokens(self, scheduler: Any, decoding: int) -> int:
        """Return the prompt tokens of the largest step, in which decodes take part of the room if they ride along.

        However many decode, there is room for a few: else prompts would wait until decodes end. While online requests
        come or are expected, a step may have fewer prompt tokens.
        """
        riding = decoding if self.overlap.mixes else 0
        fewest = max(int(scheduler.page_size), LEAST_CHUNK)
        largest = max(fewest, int(scheduler.chunked_prefill_size or STEP_TOKENS) - riding)
        if self.beside.prompt_tokens is None or not self.beside.is_needed:
            return largest
        return min(largest, max(fewest, self.beside.prompt_tokens))

    def demand(self, scheduler: Any, decoding: list[Any]) -> Demand:
        """Return what online requests need of the next step. Where there are none, this takes no time."""
        continued = scheduler.chunked_req
        is_chunked = continued is not None and continued not in self.running
        if not (scheduler.waiting_queue or is_chunked or self.online_runs):
            return NOBODY
        theirs = [req for req in decoding if req not in self.running]
        self.online_runs = bool(scheduler.waiting_queue or is_chunked or theirs)
        return demand(scheduler, theirs, self.most_prompt_tokens(scheduler, len(decoding)))

    def hold_back(self, scheduler: Any, decoding: list[Any]) -> list[Any]:
        """Hold back the online requests that must leave room for those of others, and for batches."""
        if self.fallback is not None:
            return []
        batches_wait = self.beside.memory.least_share > 0 and bool(self.waiting)
        return self.turns.hold_back(scheduler, decoding, self.space.capacity, batches_wait)

    def note_online(self, before: list[Any], after: list[Any]) -> None:
        """Note which online requests SGLang took in this step, of those that waited `before` it."""
        self.online = {req: self.online.get(req, 0) + 1 for req in after if not is_ours(req)}
        taken = [req for req in before if req not in self.online]
        self.figures.online_admitted += len(taken)
        self.figures.online_most_steps = max(self.figures.online_most_steps, *self.online.values(), 0)

    def may_park(self, req: Any) -> bool:
        """Return whether the prefill of one of our requests may be stopped: without a gain, only so often.

        A prompt that gains GAIN tokens each time ends, however often it is stopped.
        """
        member = self.running[req]
        return member.stopped < MOST_MADE_WAY or len(req.prefix_indices) >= member.computed + GAIN

    def stop(self, req: Any, reason: Reason, computed: int = 0) -> None:
        """Note that a running request waits again, with the output tokens that it has; one that was parked is first.

        `computed`: the prompt tokens of a parked one that are computed.
        """
        member = self._leave(req)
        self._computed(member)
        member.phase, self.waiting[req.rid] = Phase.WAITING, member
        if reason is Reason.PARKED:
            member.stopped += computed < member.computed + GAIN
            member.computed = max(computed, member.computed)
            self.scan.put_back(member.key)
        else:
            if reason is Reason.TAKEN_OFF:
                member.taken_off += 1
                if not req.output_ids:  # its first token is still being computed
                    member.computed = len(req.origin_input_ids)
            self.scan.retracted(member.key, len(req.output_ids))
        if reason is not Reason.RETRACTED:
            self.made_way.append(req)
        self.figures.note_stop(reason, length(req))

    def victims(self, running: Any, must: bool) -> list[Any]:
        """Return the requests that may be taken off the engine, those first that would hold their KV cache longest.

        `must`: whether SGLang would fail if nobody left. Then those come too, last, that have made way too often or
        whose answers may change, as they would by SGLang's own retraction.
        """
        keys = [self.scan.key_of(int(place)) for place in victims(self.scan.state)]
        members = [self.by_key[key] for key in keys if key is not None]
        here = set(running.reqs)
        able = [m for m in members if m.req in here and not m.req.finished() and m.req.to_finish is None]
        willing = [m.req for m in able if m.taken_off < MOST_MADE_WAY and keeps_its_answer(m.req)]
        return willing + [m.req for m in able if m.req not in set(willing)] if must else willing

    def note_left_out(self, resting: Sequence[Any], decoding: Sequence[Any]) -> None:
        """Note which decodes of batches a step leaves out, and tell the scan for how long others had been.

        Where nobody decodes, nobody is left out. Batches alone pay nothing for this.
        """
        if not self.beside.is_needed:
            return
        if decoding:
            self.beside.left_out += len(resting)
            for req in resting:
                self.running[req].skipped += 1
        for req in decoding:
            member = self.running.get(req)
            if member is not None and member.skipped:
                self.scan.left_out(member.key, member.skipped)
                member.skipped = 0

    def note_admitted(self, reqs: list[Any]) -> None:
        """Note that SGLang took these admissions."""
        for req in reqs:
            member = self.running[req] = self.waiting.pop(req.rid)
            member.phase = Phase.PREFILL
            self.computing.append(member)
            self.not_mixed += bool(req.return_logprob)
        self.figures.admitted += len(reqs)

    def note_refused(self, reqs: list[Any], first_blocks: bool) -> None:
        """Note that SGLang did not take these admissions: they wait again, first at their ends.

        `first_blocks`: whether SGLang was asked and took none of the step's, so that the first one held up the others.
        """
        for place, req in reversed(list(enumerate(reqs))):
            self.scan.put_back(self.waiting[req.rid].key, refused=first_blocks and place == 0)
        self.figures.refused += len(reqs)

    def prefilled(self, continued: Any) -> None:
        """Note that a batch of prompts runs: it completes all admitted prompts but that of `continued`."""
        is_stored = self.overlap is Overlap.PDMUX
        for member in list(self.computing):
            if member.phase is not Phase.PREFILL or member.req is continued:
                continue
            self.scan.prefilled(member.key, is_stored)
            if is_stored:
                self._computed(member)
            else:
                member.phase, member.tokens = Phase.STORING, len(member.req.output_ids)

    def store_all(self) -> None:
        """Tell the scan that all prompts are stored: with PD-multiplexing, SGLang asks again after a prefill."""
        for member in self.computing:
            if member.phase is Phase.PREFILL:
                self.scan.stored(member.key)

    def notice_stored(self) -> None:
        """Tell the scan which prompts SGLang has put into its cache: those whose answers have grown since.

        SGLang's overlap schedule launches a step before it looks at the results of the one before.
        """
        for member in list(self.computing):
            if member.phase is Phase.STORING and len(member.req.output_ids) > member.tokens:
                self._computed(member)
                self.scan.stored(member.key)

    def _leave(self, req: Any) -> Member:
        self.not_mixed -= bool(req.return_logprob)
        member = self.running.pop(req)
        member.skipped = 0
        return member

    def _computed(self, member: Member) -> None:
        """Move the member out of those whose prompts are being computed or stored."""
        if member.phase in (Phase.PREFILL, Phase.STORING):
            self.computing.remove(member)
        member.phase = Phase.DECODE


def _executor() -> Executor:
    """Return a thread for plans; on a virtual clock plans are made at once, because steps take no real time."""
    if mine().emulated is Emulation.VIRTUAL:
        return AtOnce()
    sys.setswitchinterval(SWITCH_S)
    return ThreadPoolExecutor(1, "plan")


def _lag(scheduler: Any, ranks: Ranks) -> int:
    """Return how many steps that were launched before still run when a step is decided, as far as the clock says."""
    return int(emulated.outlasts_launch() and scheduler.enable_overlap) + int(ranks.group is not None)


def admission_of(scheduler: Any) -> Admission:
    """Return the scheduler's Admission; create it on first use."""
    found = getattr(scheduler, "batchweave_admission", None)
    if found is None:
        options = mine()
        # A benchmark sets others.
        online, limits = getattr(scheduler, "batchweave_online", (options.online, options.limits))
        found = Admission.of(options.cost, online, limits, scheduler, options.least_share)
        found.scan.cached = lambda key: cached_tokens(scheduler.tree_cache, found.by_key[key].req).on_device
        found.foresees = options.sheds
        scheduler.batchweave_admission = found
    return found


def overlap_of(scheduler: Any) -> Overlap:
    """Return how the scheduler really overlaps prefill and decode, whatever was requested."""
    if scheduler.enable_pdmux:
        return Overlap.PDMUX
    if not scheduler.is_mixed_chunk:
        return Overlap.NONE
    return Overlap.NANO if mine().overlap is Overlap.NANO else Overlap.MIXED
