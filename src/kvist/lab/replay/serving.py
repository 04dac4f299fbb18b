"""An engine with continuous batching and no model: it asks a manager for what such an engine would ask it for.

Time is simulated and goes from event to event, so that many equal steps are one stride; nothing here loops over tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from math import ceil, inf

import numpy as np
from numpy.typing import NDArray

from kvist.core.extents import Extent, Namespace
from kvist.core.sequences import Sequence
from kvist.core.tokens import MAX_TOKEN
from kvist.errors import NeverFits, OutOfBlocks
from kvist.lab.replay.config import ReplayConfig
from kvist.lab.replay.result import ReplayResult, Tally
from kvist.lab.replay.stores import simulated_manager
from kvist.lab.traces.requests import HashedPrompt, Request

__all__ = ["Serving"]

QUERY_TOKEN = np.zeros(1, np.int32)
"""What follows whole blocks: it is computed, never shared, and so may be any token."""

LINE_STRIDE = 1_000_003
"""Between the first tokens that are made up for requests of neighbouring lines; they follow their own prompts."""

DEVICE, HOST = "device", "host"


class _Running:
    """A request with a sequence: what of it is still to be computed and generated.

    A request that decodes got its place in the batch after step `began_step`; it has `num_left` tokens to go from
    there. `ready_s` is when what it found in slower tiers has come.
    """

    __slots__ = (
        "arrival_s",
        "began_step",
        "is_decoding",
        "made",
        "num_left",
        "order",
        "ready_s",
        "request",
        "sequence",
    )

    def __init__(self, request: Request, sequence: Sequence, arrival_s: float, ready_s: float, order: int) -> None:
        self.request, self.sequence = request, sequence
        self.arrival_s, self.ready_s, self.order = arrival_s, ready_s, order
        self.num_left = max(request.num_output_tokens - 1, 0)  # the last is never an input
        self.made = 0
        self.began_step = 0
        self.is_decoding = False

    def __lt__(self, other: _Running) -> bool:
        return self.end_step < other.end_step

    @property
    def end_step(self) -> int:
        """The step with which it ends, once it decodes."""
        return self.began_step + self.num_left


class Serving:
    """Serves requests of a trace with one configuration, first come first served.

    A step computes prompts in chunks, in order of arrival, and a token of every sequence that decodes, as many tokens
    as the cost model's `max_step_tokens` in all. A request whose blocks come from slower tiers waits for them while
    others run. Without blocks for those that decode, the latest arrival is preempted; it is resumed before others are
    admitted. Tokens that are generated take blocks as they come, and are given to the manager when a sequence ends or
    is preempted.
    """

    def __init__(self, config: ReplayConfig, block_size: int) -> None:
        self.config = config
        self.block_size = block_size
        self.tally = Tally()
        self.now = 0.0
        settings = config.cache_config(block_size)
        self.manager, self.stack = simulated_manager(
            settings, config.slow_tiers, lambda: self.now, config.cost.prefill_tokens_per_s
        )
        self._num_groups = len(settings.groups)
        self._is_plain = self._num_groups == 1 and settings.groups[0].kind == "full"
        self._token_bytes = settings.block_bytes / block_size
        self._longest = settings.max_sequence_length
        self._waiting: deque[tuple[Request, float]] = deque()
        self._preempted: list[_Running] = []
        self._prefilling: list[_Running] = []
        self._decoding: list[_Running] = []  # a heap: what ends first
        self._step = 0
        self._num_admitted = 0
        self._is_full = False  # nothing has ended since an admission found no room
        # By row, of those that decode: tokens less steps when it began, and how many tokens its blocks have room for.
        self._base_of_row, self._capacity_of_row = np.zeros((2, config.concurrency), np.int64)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def run(self, trace: Iterator[Request]) -> Iterator[None]:
        """Serve all requests; yields each time that some have been taken from the trace."""
        coming = next(trace, None)
        while coming is not None or self._waiting or self._preempted or self._num_running:
            while coming is not None and self._has_come(coming):
                arrival_s = coming.arrival_s if self.config.arrivals == "trace" else self.now
                self._waiting.append((coming, arrival_s))
                coming = next(trace, None)
            num_before = self.tally.num_requests
            self._admit()
            if coming is not None and self._has_come(coming):
                pass
            elif self._num_running:
                self._stride(coming.arrival_s if coming is not None and self.config.arrivals == "trace" else inf)
            elif coming is not None and not self._waiting and self.config.arrivals == "trace":
                self.now = max(self.now, coming.arrival_s)
            if self.tally.num_requests > num_before:
                yield

    @property
    def _num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def _has_come(self, request: Request) -> bool:
        if self.config.arrivals == "trace":
            return request.arrival_s <= self.now
        return not self._waiting and not self._preempted and self._num_running < self.config.concurrency

    # -- admission ----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Let requests in, those that were preempted first, as long as there is room."""
        while self._num_running < self.config.concurrency and not self._is_full:
            if self._preempted:
                self._is_full = not self._resume(self._preempted[-1])
            elif self._waiting:
                self._is_full = not self._begin(*self._waiting[0])
            else:
                return

    def _begin(self, request: Request, arrival_s: float) -> bool:
        """Admit the request that waits first, or pass it over if it can never fit; False if it has to wait."""
        seconds_before = 0.0 if self.stack is None else self.stack.seconds
        from_before = self._num_from_tiers()
        try:
            self._refuse_never_fitting(request)
            prompt = self._prompt(request)
            sequence = (
                self.manager.add_sequence(prompt, namespace=request.namespace, retention=self.config.retention)
                if len(prompt)
                else None
            )
        except NeverFits:
            self.tally.num_never_fit += 1
            sequence = None
        except OutOfBlocks:
            if self._num_running:
                return False
            self.tally.num_never_fit += 1
            sequence = None
        self._waiting.popleft()
        self.tally.num_requests += 1
        if sequence is None:
            return True
        load_s = self._count_found(request, sequence, from_before, seconds_before)
        self._num_admitted += 1
        self._prefilling.append(_Running(request, sequence, arrival_s, self.now + load_s, self._num_admitted))
        if self.tally.is_point_due:
            self._add_point()
        return True

    def _prompt(self, request: Request) -> NDArray[np.int32]:
        """Return the tokens that the manager is given for a prompt; none where there is not one whole block."""
        prompt = request.prompt
        if self.config.content == "tokens":
            return prompt.tokens()
        if isinstance(prompt, HashedPrompt) and prompt.block_size == self.block_size:
            num_tokens = self._num_blocks(request) * self.block_size
            whole = HashedPrompt(prompt.hash_ids, prompt.block_size, num_tokens, prompt.salt).tokens()
        else:
            whole = prompt.tokens()[: prompt.num_tokens // self.block_size * self.block_size]
        return np.concatenate([whole, QUERY_TOKEN]) if len(whole) else whole

    def _num_blocks(self, request: Request) -> int:
        """Return how many references a prompt is: of hashed ones of this block size every id is one."""
        prompt = request.prompt
        if isinstance(prompt, HashedPrompt) and prompt.block_size == self.block_size:
            return len(prompt.hash_ids)
        return prompt.num_tokens // self.block_size

    def _refuse_never_fitting(self, request: Request) -> None:
        """Raise NeverFits for what is too long, before its tokens are made; of whole blocks, one more is computed."""
        num_prompt_tokens = request.prompt.num_tokens
        if self.config.content == "blocks":
            num_prompt_tokens = self._num_blocks(request) * self.block_size + 1
        # A sequence whose output takes no place needs none for it.
        num_made = max(request.num_output_tokens - 1, 0) if self._takes_place else 0
        if num_prompt_tokens + num_made > self._longest:
            raise NeverFits(f"{num_prompt_tokens} tokens and {num_made} generated ones, at most {self._longest} fit")

    @property
    def _takes_place(self) -> bool:
        """Whether generated tokens take blocks."""
        return self.config.outputs != "none" and self.config.content == "tokens"

    def _num_from_tiers(self) -> dict[str, int]:
        """Return how many blocks have come up from each slower tier so far; from stores, those of one group."""
        lower = self.manager._state.lower
        from_stores = {} if self.stack is None else self.stack.num_blocks_from
        counts = {name: count // self._num_groups for name, count in from_stores.items()}
        return counts if lower is None else {HOST: lower.num_promoted} | counts

    def _count_found(
        self, request: Request, sequence: Sequence, from_before: dict[str, int], seconds_before: float
    ) -> float:
        """Count what a prompt found, and where; returns how long it takes to come."""
        tally, num_cached = self.tally, sequence.num_cached_tokens
        num_tokens = sequence.num_prompt_tokens - (1 if self.config.content == "blocks" else 0)
        tally.admitted(request.namespace, num_tokens, num_cached)
        tally.num_output_tokens += request.num_output_tokens
        tally.num_references += self._num_blocks(request)
        tally.num_hit_blocks += num_cached // self.block_size
        self._note_peak()
        load_s, left = 0.0, num_cached
        for name, count in self._num_from_tiers().items() if from_before else ():
            num_blocks = count - from_before[name]
            came = min(num_blocks * self.block_size, left)
            tally.found(name, came)
            left -= came
            if name == HOST and came:
                cost = self.config.cost
                load_s += cost.host_latency_s + came * self._token_bytes / cost.host_bytes_per_s
        tally.found(DEVICE, left)
        return load_s if self.stack is None else load_s + self.stack.seconds - seconds_before

    def _resume(self, running: _Running) -> bool:
        """Let the sequence that was preempted last go on; False without room."""
        seconds_before = 0.0 if self.stack is None else self.stack.seconds
        try:
            self.manager.resume(running.sequence)
        except OutOfBlocks:
            if self._num_running:
                return False
            self._preempted.pop()
            self.manager.free(running.sequence)
            self.tally.num_never_fit += 1
            return True
        self._preempted.pop()
        running.ready_s = self.now + (0.0 if self.stack is None else self.stack.seconds - seconds_before)
        running.is_decoding = False
        self._prefilling.append(running)
        self._prefilling.sort(key=lambda each: each.order)
        return True

    # -- steps --------------------------------------------------------------------------------------------------------

    def _stride(self, next_arrival_s: float) -> None:
        """Take as many steps as are alike: until a prompt is computed, a sequence ends, or a request can be let in."""
        ready = [each for each in self._prefilling if each.ready_s <= self.now]
        budget = max(self.config.cost.max_step_tokens - len(self._decoding), 1)
        if not ready and not self._decoding:
            self.now = min(*(each.ready_s for each in self._prefilling), max(next_arrival_s, self.now))
            return
        head = self._num_uncomputed(ready[0]) if ready else 0
        if ready and head <= budget:
            num_steps, num_prefill_tokens = 1, 0
        else:
            num_steps = head // budget if ready else self._decoding[0].end_step - self._step
            num_prefill_tokens = budget if ready else 0
        step_s = self.config.cost.seconds(num_prefill_tokens, len(self._decoding))
        num_steps = self._make_room(self._bounded(num_steps, step_s, next_arrival_s))
        if not num_steps:
            return
        if ready and head <= budget:
            self._finish_prompts(ready, budget)
        else:
            self.now += num_steps * step_s
            self._step += num_steps
            if ready:
                self._compute(ready[0], num_steps * budget)
        self._end_done()

    @staticmethod
    def _num_uncomputed(running: _Running) -> int:
        return running.sequence.num_tokens - running.sequence.num_computed_tokens

    def _bounded(self, num_steps: int, step_s: float, next_arrival_s: float) -> int:
        """Return how many equal steps to take until something else is to be done."""
        if self._decoding:
            num_steps = min(num_steps, self._decoding[0].end_step - self._step)
        until = min((each.ready_s for each in self._prefilling if each.ready_s > self.now), default=inf)
        if self._num_running < self.config.concurrency and not self._waiting:
            until = min(until, next_arrival_s)
        if until < inf:
            num_steps = min(num_steps, ceil((until - self.now) / step_s) if step_s else 1)
        return max(num_steps, 1)

    def _make_room(self, num_steps: int) -> int:
        """Get blocks for what is generated in so many steps, or in fewer; 0 if the latest was preempted for it."""
        if not self._decoding or not self._takes_place:
            return num_steps
        rows = np.array([each.sequence.row for each in self._decoding], np.int64)
        while True:
            ends = self._base_of_row[rows] + self._step + num_steps
            if (ends <= self._capacity_of_row[rows]).all():
                return num_steps
            try:
                self.manager.reserve(rows, ends - self.manager.num_tokens[rows])
            except OutOfBlocks:
                if num_steps == 1:
                    self._preempt_latest()
                    return 0
                num_steps //= 2
            else:
                self._capacity_of_row[rows] = -(-ends // self.block_size) * self.block_size
                self._note_peak()

    def _preempt_latest(self) -> None:
        """Take the blocks of the latest arrival away, until there is room again; the only one there is has to end."""
        latest = max([*self._prefilling, *self._decoding], key=lambda each: each.order)
        is_only = self._num_running == 1
        if latest.is_decoding:
            self._decoding.remove(latest)
            heapify(self._decoding)
            num_made = self._step - latest.began_step
            self._give_generated(latest, num_made)
            latest.num_left -= num_made
        else:
            self._prefilling.remove(latest)
        if is_only:
            self.manager.free(latest.sequence)
            self.tally.num_never_fit += 1
            self._is_full = False
            return
        self.manager.suspend(latest.sequence)
        self._preempted.append(latest)
        self._is_full = True

    def _finish_prompts(self, ready: list[_Running], budget: int) -> None:
        """Take one step, with which at least the first prompt is computed and as much of the next as it may compute."""
        num_decoding, num_prefill_tokens, done = len(self._decoding), 0, []
        for running in ready:
            num_tokens = min(self._num_uncomputed(running), budget - num_prefill_tokens)
            if num_tokens <= 0 and num_prefill_tokens:
                break
            num_prefill_tokens += num_tokens
            self._compute(running, num_tokens)
            if not self._num_uncomputed(running):
                done.append(running)
        self.now += self.config.cost.seconds(num_prefill_tokens, num_decoding)
        self._step += 1
        for running in done:
            self._prefilling.remove(running)
            self._begin_decoding(running)

    def _compute(self, running: _Running, num_tokens: int) -> None:
        """Commit the next tokens of a prompt; where states are kept on the way, in pieces that end there."""
        sequence, manager = running.sequence, self.manager
        end = sequence.num_computed_tokens + num_tokens
        if self._is_plain:
            manager.commit([sequence], None if end == sequence.num_tokens else end)
            return
        while (start := sequence.num_computed_tokens) < end:
            manager.commit([sequence], start + max(manager.chunk_limit(sequence, end - start), 1))

    def _begin_decoding(self, running: _Running) -> None:
        """Note the first token, which came with the last of the prompt, and go on with the others."""
        if not running.made:
            self.tally.ttft_s.append(self.now - running.arrival_s)
            running.made = 1
        running.is_decoding = True
        running.began_step = self._step
        row, num_tokens = running.sequence.row, running.sequence.num_tokens
        self._base_of_row[row] = num_tokens - self._step
        self._capacity_of_row[row] = -(-num_tokens // self.block_size) * self.block_size
        heappush(self._decoding, running)

    def _end_done(self) -> None:
        """End the sequences that have generated all they should."""
        while self._decoding and self._decoding[0].end_step <= self._step:
            running = heappop(self._decoding)
            if self._keeps(running.request):
                self._give_generated(running, running.num_left)
            self.manager.free(running.sequence)
            self._is_full = False

    def _keeps(self, request: Request) -> bool:
        """Say whether what was generated stays in the cache."""
        return self._takes_place and (self.config.outputs == "all" or request.output is not None)

    def _give_generated(self, running: _Running, num_tokens: int) -> None:
        """Tell the manager the tokens that were generated, for which there are blocks already."""
        if not num_tokens or not self._takes_place:
            return
        request, sequence = running.request, running.sequence
        start = max(request.num_output_tokens - 1, 0) - running.num_left
        if request.output is not None:
            tokens = request.output[start : start + num_tokens]
        else:
            first = request.line * LINE_STRIDE + start
            tokens = (np.arange(first, first + num_tokens, dtype=np.int64) & MAX_TOKEN).astype(np.int32)
        self.manager.append([sequence], [tokens])
        self.manager.commit([sequence])

    # -- numbers ------------------------------------------------------------------------------------------------------

    def result(self, trace: str, *, wall_s: float, is_complete: bool) -> ReplayResult:
        """Return what has been found so far."""
        stats = self.manager.stats()
        evictions = dict(stats.evictions)
        evictions |= {f"{tier.name} evicted": tier.num_evicted_blocks for tier in stats.tiers}
        evictions |= {f"{name} evicted": each.num_evicted for name, each in self.manager.store_stats().items()}
        return self.tally.result(
            trace,
            self.config,
            evictions=evictions,
            misses=stats.misses,
            num_recomputed_tokens=stats.num_recomputed_tokens,
            num_preemptions=stats.num_suspended,
            duration_s=self.now,
            wall_s=wall_s,
            is_complete=is_complete,
        )

    def _note_peak(self) -> None:
        state = self.manager._state
        held = sum(pool.num_blocks - pool.num_free - state.tree.evictable_in(pool) for pool in state.pools)
        self.tally.num_peak_blocks = max(self.tally.num_peak_blocks, held)

    def _add_point(self) -> None:
        by_namespace = self._blocks_by_namespace() if len(self.tally.by_namespace) > 1 else {}
        occupancy = self._occupancy()
        if not by_namespace:
            by_namespace = dict.fromkeys(self.tally.by_namespace, occupancy[DEVICE])
        self.tally.add_point(self.now, occupancy, by_namespace)

    def _occupancy(self) -> dict[str, int]:
        """Return the blocks that hold something, by tier."""
        state = self.manager._state
        counts = {DEVICE: sum(pool.num_blocks - pool.num_free for pool in state.pools)}
        if state.lower is not None:
            counts[HOST] = sum(pool.num_blocks - pool.num_free for pool in state.lower.pools)
        return counts if self.stack is None else counts | self.stack.num_entries

    def _blocks_by_namespace(self) -> dict[Namespace, int]:
        """Return the blocks on the device that the tree has of each namespace."""
        roots = self.manager._state.tree.roots
        return {namespace: _num_blocks_below(root) for namespace, root in roots.items()}


def _num_blocks_below(root: Extent) -> int:
    return sum(int(np.count_nonzero(extent.blocks >= 0)) for extent in root.subtree() if extent is not root)
