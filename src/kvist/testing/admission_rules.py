"""The rules of CacheMachine that admit sequences, and forecast whether they can be."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvist.core.extents import Namespace
from kvist.core.forecast import Forecast
from kvist.core.retention import Retention
from kvist.core.sequences import Sequence
from kvist.errors import KvistError, NeverFits, OutOfBlocks, OutOfRows, TransferError
from kvist.testing.bills import Counts
from kvist.testing.branch_rules import BranchRules
from kvist.testing.configs import Draft, Keeping, drafts, few_beams, keepings, lefts, often, rare, some
from kvist.testing.growth_rules import GrowthRules
from kvist.testing.model import Shadow
from kvist.testing.prompts import Prompt
from kvist.testing.stage import NAMESPACES, require

__all__ = ["AdmissionRules"]


class AdmissionRules(GrowthRules, BranchRules):
    """How prompts get in. A rule makes the call, says which outcomes are right, and notes them in the model."""

    @rule(
        draft=drafts,
        namespace=rare,
        beams=few_beams,
        reuse=often,
        publish=often,
        keeping=keepings,
        room=st.integers(0, 7),
    )
    def admit(
        self, draft: Draft, namespace: bool, beams: int, reuse: bool, publish: bool, keeping: Keeping, room: int
    ) -> None:
        """Add a prompt that begins as an earlier one does; what the forecast said must come true."""
        prompt, beams, num_encoder_tokens = self.prompt(draft), self.beams(beams), self.num_encoder_tokens(draft)
        if room % 4:
            self.make_room(self.bill.prompt(len(prompt), beams, num_encoder_tokens), beams)
        space, forecast = NAMESPACES[namespace], None
        if self.num_calls % 2:
            self.all_published()
            forecast = self.manager.forecast().fits(
                prompt.tokens,
                namespace=space,
                media=prompt.media,
                extra_ids=prompt.extra_ids or None,
                reuse=reuse,
                num_beams=beams,
                encoder_tokens=num_encoder_tokens,
            )
        added = self.add(prompt, space, beams, reuse, publish, self.retention(keeping), num_encoder_tokens)
        right = forecast in (None, added) or (forecast and self.memory_failed)
        require(right, f"the forecast was {forecast} for {len(prompt)} tokens, not {added}")

    def add(
        self,
        prompt: Prompt,
        namespace: Namespace = (),
        beams: int = 1,
        reuse: bool = True,
        publish: bool = True,
        retention: Retention | None = None,
        num_encoder_tokens: int = 0,
    ) -> bool:
        """Add a prompt, or prove that there is no room for it; say which."""
        must, may = self.reusable.bounds(namespace, prompt, self.live)
        if not reuse or num_encoder_tokens:
            must = may = 0
        bill = self.bill.prompt(len(prompt), beams, num_encoder_tokens)
        must = self.surely(must, bill)
        added = self.allocate(
            lambda: self.manager.add_sequence(
                np.array(prompt.tokens, np.int32),
                namespace=namespace,
                media=prompt.media,
                extra_ids=prompt.extra_ids or None,
                retention=retention,
                reuse=reuse,
                publish=publish,
                num_beams=beams,
                encoder_tokens=num_encoder_tokens,
            ),
            bill,
        )
        if isinstance(added, TransferError):
            return False
        if isinstance(added, KvistError):
            self.require_true_refusal(added, len(prompt), bill, beams)
            return False
        cached = added.num_cached_tokens
        require(must <= cached <= may, f"{cached} tokens of {prompt} were reused; {must} must be, {may} may be")
        self.admitted(added, prompt, publish and not num_encoder_tokens, reuse, num_encoder_tokens)
        return True

    def require_true_refusal(self, error: KvistError, num_tokens: int, bill: Counts, beams: int) -> None:
        """A prompt is refused for the reason given, and only for that."""
        config = self.config
        too_long = num_tokens > config.max_sequence_length or beams > config.max_sequences
        if too_long or (bill > config.pool_num_blocks).any():
            # Where blocks are counted at most, it may be that they would do.
            right = NeverFits if too_long or self.bill.is_exact else NeverFits | OutOfBlocks
            require(isinstance(error, right), f"{num_tokens} tokens in {beams} beams never fit, but: {error!r}")
        elif beams > self.num_free_rows():
            require(isinstance(error, OutOfRows), f"{self.num_free_rows()} rows are free, but: {error!r}")
        else:
            self.require_no_room(error, bill)

    def admitted(self, sequence: Sequence, prompt: Prompt, publish: bool, reuse: bool, num_encoder_tokens: int) -> None:
        """Note a new sequence and its beams, and let its encoder run."""
        self.num_asked += len(prompt)
        self.num_hit += sequence.num_cached_tokens
        self.prompts.append(prompt)
        num_blocks, publishes = (
            self.bill.num_columns(len(prompt)),
            publish and self.config.reuse and not self.bill.bubble,
        )
        first = Shadow(sequence, prompt, prompt.symbols(), sequence.num_cached_tokens, num_blocks, publishes)
        first.landed, first.num_reused = {sequence.num_cached_tokens}, sequence.num_cached_tokens
        first.reuses = reuse and not num_encoder_tokens
        self.wrapped(first, len(prompt))
        first.num_evictions = self.reusable.num_evictions
        if num_encoder_tokens:
            first.encoder = self.num_encoders = self.num_encoders + 1
            first.num_encoder_tokens = num_encoder_tokens
            self.encode(first)
        self.live.append(first)
        for beam in sequence.beams[1:]:
            waiting = Shadow.of(beam, first, num_blocks)
            waiting.num_computed, waiting.leader = 0, first
            self.live.append(waiting)

    @rule(draft=drafts, namespace=rare, beams=few_beams, publish=often, keeping=keepings, left=lefts)
    def prefill(
        self, draft: Draft, namespace: bool, publish: bool, keeping: Keeping, beams: int = 1, left: int = 0
    ) -> None:
        """Add a prompt and compute it: all of it, all but the last few tokens, or chunk by chunk."""
        prompt, beams, num_encoder_tokens = self.prompt(draft), self.beams(beams), self.num_encoder_tokens(draft)
        self.make_room(self.bill.prompt(len(prompt), beams, num_encoder_tokens), beams)
        space, retention = NAMESPACES[namespace], self.retention(keeping)
        if self.add(prompt, space, beams, True, publish, retention, num_encoder_tokens):
            self.compute(1 << len(self.running()) - 1, left, by_rows=False)

    @rule(draft=drafts, namespace=rare, steps=st.integers(0, 4), keeping=keepings)
    def serve(self, draft: Draft, namespace: bool, steps: int, keeping: Keeping) -> None:
        """Take a request from beginning to end."""
        before = list(self.live)
        self.prefill(draft, namespace, publish=True, keeping=keeping)
        if self.live and self.live[-1] not in before:
            self.decode(1 << len(self.running()) - 1, draft[2], steps)
            self.free(len(self.live) - 1, publish=True)

    def beams(self, wanted: int) -> int:
        """Return how many beams a prompt gets: one where the configuration is for one only."""
        return wanted if self.config.max_beams > 1 or not self.has_kind("ring") else 1

    def num_encoder_tokens(self, draft: Draft) -> int:
        """Return how many tokens the encoder of a prompt has: none at all where nothing attends to them."""
        return draft[3] % (2 * self.block_size + 1) if self.has_kind("cross") else 0

    def retention(self, keeping: Keeping) -> Retention | None:
        """Return the retention of a prompt whose first blocks are kept so."""
        size = self.block_size
        ranges = [(at * size, (at + 1) * size, *keep) for at, keep in enumerate(keeping)]
        return Retention(ranges, *keeping[-1]) if keeping else None

    # -- forecasts ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.alone())
    @rule(picks=some, draft=drafts, n=st.integers(0, 3), at_once=st.booleans())
    def foresee(self, picks: int, draft: Draft, n: int, at_once: bool) -> None:
        """Forecast that some sequences end, and one grows or a prompt is added; then do it, and compare."""
        ending = [shadow for shadow in self.pick(picks) if shadow in self.alone()]
        prompt, growing = self.prompt(draft), ending.pop() if ending and n else None
        self.all_published()
        forecast = self.manager.forecast()
        try:
            for shadow in ending:
                forecast.release(shadow.sequence)
            if growing:
                forecast.append(growing.sequence, [0] * n)
            else:
                forecast.add(prompt.tokens, media=prompt.media, extra_ids=prompt.extra_ids or None)
        except KvistError:
            return
        if at_once:
            self.realize(forecast, ending, growing, prompt, n)
        else:
            self.follow(ending, growing, prompt, n)
        free_blocks, free_rows = self.manager.num_free_blocks, self.num_free_rows()
        require(free_blocks == forecast.free_blocks, f"{forecast.free_blocks} blocks forecast, {free_blocks} are free")
        require(free_rows == forecast.free_rows, f"{forecast.free_rows} rows forecast, {free_rows} are free")

    def follow(self, ending: list[Shadow], growing: Shadow | None, prompt: Prompt, n: int) -> None:
        """Do what was forecast, call by call; the memory may not fail."""
        self.breaks_next = False
        for shadow in ending:
            self.free(self.live.index(shadow), publish=True)
        if growing:
            self.grow([growing], [[0] * n], False, lambda batch: self.manager.append(batch, [[0] * n]))
        else:
            self.add(prompt)

    def realize(self, forecast: Forecast, ending: list[Shadow], growing: Shadow | None, prompt: Prompt, n: int) -> None:
        """Do what was forecast in one call."""
        self.breaks_next = False
        if growing:
            self.before_wrapping(growing, growing.num_tokens + n)
        added = self.attempt(lambda: self.manager.perform(forecast))
        if isinstance(added, KvistError):
            raise AssertionError(f"what was forecast was not done: {added!r}")
        for shadow in ending:
            self.live.remove(shadow)
            self.note_end(shadow, publish=True)
        if growing:
            growing.append([0] * n)
            growing.num_blocks = max(growing.num_blocks, self.bill.num_columns(growing.num_tokens))
            self.wrapped(growing, growing.num_tokens)
        for sequence in added:
            self.admitted(sequence, prompt, True, True, 0)
        self.count_evictions()
        self.reusable.evicted()
