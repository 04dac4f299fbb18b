"""Faults planted in the core must make CacheMachine fail: by the books, and also where nobody proves the books.

Each plant is small and plausible: one line of the core left out or off by one.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import run_state_machine_as_test

from kvist import KVCacheManager, OutOfBlocks
from kvist.core import admission, branches, growth, holdings, pinning, recurrent, resuming, rewinding, rings
from kvist.core import state as core_state
from kvist.core.groups import Span
from kvist.core.identity import IdentityTable
from kvist.core.lower import LowerTier
from kvist.core.pool import BlockPool
from kvist.core.recording import EventRecorder
from kvist.core.spanned import SpannedGroup
from kvist.core.state import CacheState
from kvist.core.tree import PrefixTree
from kvist.testing import CacheMachine, cache_configs, cache_machine
from kvist.testing.stage import BEFORE_EACH_WRITE

EXAMPLES = settings(
    max_examples=1000,
    stateful_step_count=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)

FAULTS = {}


def fault(plant):
    FAULTS[plant.__name__] = plant
    return plant


def wrap(monkeypatch, owner, name, wrapper):
    """Replace a function by `wrapper(original, *arguments)`."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **options: wrapper(original, *args, **options))


# -- references -------------------------------------------------------------------------------------------------------


@fault
def a_reference_is_lost_on_split(monkeypatch):
    def split(original, tree, extent, num_blocks):
        upper = original(tree, extent, num_blocks)
        if upper is not extent and extent.references:
            upper.references = 0
        return upper

    wrap(monkeypatch, PrefixTree, "split", split)


@fault
def a_referenced_extent_is_evicted(monkeypatch):
    def evict(original, tree, pool, num_blocks):
        held = [
            extent for extent in tree.extents() if extent.references and not extent.children and extent.num_blocks > 1
        ]
        num_free = pool.num_free + num_blocks
        for extent in held[:1]:
            tree.num_evictable += 1
            tree.shrink(extent, extent.num_blocks - 1)
        if num_free > pool.num_free:
            original(tree, pool, num_free - pool.num_free)

    wrap(monkeypatch, PrefixTree, "evict", evict)


@fault
def what_is_held_stays_in_the_eviction_queue(monkeypatch):
    def hold(original, tree, extent):
        tickets = [(each, each.ticket) for each in extent.path()]
        original(tree, extent)
        for each, ticket in tickets:
            each.ticket = ticket

    wrap(monkeypatch, PrefixTree, "hold", hold)


@fault
def releasing_stops_at_the_deepest_extent(monkeypatch):
    def release(original, tree, extent):
        parent = extent.parent
        if parent is not None and extent.references == 1 and parent.parent is not None:
            parent.references += 1
        original(tree, extent)

    wrap(monkeypatch, PrefixTree, "release", release)


@fault
def reordering_does_not_hold_what_it_goes_on_from(monkeypatch):
    def reorder(original, state, beams, parents):
        hold = state.tree.hold
        state.tree.hold = lambda extent: None
        try:
            original(state, beams, parents)
        finally:
            state.tree.hold = hold

    monkeypatch.setattr(PrefixTree, "__slots__", (), raising=False)
    wrap(monkeypatch, branches, "reorder", reorder)


# -- blocks -----------------------------------------------------------------------------------------------------------


@fault
def free_keeps_a_block(monkeypatch):
    def end(original, state, sequence, **options):
        row = sequence.row
        have = state.rows.num_blocks.item(row)
        if have > state.rows.num_published[row] + 1:
            state.rows.num_blocks[row] = have - 1
            state.rows.block_table[:, row, have - 1] = 0
        original(state, sequence, **options)

    wrap(monkeypatch, CacheState, "end", end)


@fault
def blocks_that_were_rebased_do_not_go_back(monkeypatch):
    def rebase(original, state, *arguments):
        give = state.pools[0]
        state.pools[0] = BlockPool(state.pools[0].num_blocks)
        state.pools[0].take(state.pools[0].num_blocks)
        try:
            original(state, *arguments)
        finally:
            state.pools[0] = give

    wrap(monkeypatch, CacheState, "_rebase", rebase)


@fault
def rewinding_goes_on_in_a_published_block(monkeypatch):
    def rewind_published(original, state, sequence, left):
        boundary, inside = divmod(left, state.block_size)
        source = state.rows.block_table.item(0, sequence.row, boundary)
        original(state, sequence, left)
        if inside and state.moves:
            state.pools[0].give(state.rows.block_table[0, sequence.row, boundary : boundary + 1])
            state.rows.block_table[0, sequence.row, boundary] = source
            state.moves.pop()

    wrap(monkeypatch, rewinding, "rewind_published", rewind_published)


@fault
def a_call_that_is_refused_has_evicted(monkeypatch):
    def require(original, state, needs, match=None):
        try:
            original(state, needs, match)
        except OutOfBlocks:
            for pool in state.pools:
                state.tree.evict(pool, state.tree.evictable_in(pool))
            raise

    wrap(monkeypatch, CacheState, "require", require)


# -- contents ---------------------------------------------------------------------------------------------------------


@fault
def an_uncommitted_block_is_hit(monkeypatch):
    def match_prompt(original, state, prompt, namespace, limit=None):
        rows = state.rows
        for sequence in rows.running():
            if sequence.leader is None and sequence.publishes:
                computed = rows.num_computed.item(sequence.row)
                rows.num_computed[sequence.row] = rows.num_tokens[sequence.row]
                state.publish(sequence)
                rows.num_computed[sequence.row] = computed
        return original(state, prompt, namespace, limit)

    wrap(monkeypatch, admission, "match_prompt", match_prompt)


@fault
def a_partial_copy_is_of_one_token_too_many(monkeypatch):
    def order_move(original, state, source, destination, num_tokens, group=0):
        original(state, source, destination, min(num_tokens + 1, state.block_size), group)

    wrap(monkeypatch, CacheState, "order_move", order_move)


@fault
def a_partial_match_is_of_one_token_too_many(monkeypatch):
    def find(original, tree, *arguments, **options):
        match = original(tree, *arguments, **options)
        if 0 < match.num_partial_tokens < tree.block_bytes // 4 - 1:
            match.num_partial_tokens += 1
        return match

    wrap(monkeypatch, PrefixTree, "find", find)


@fault
def a_copy_is_lost(monkeypatch):
    wrap(monkeypatch, CacheState, "order_move", lambda original, *arguments: None)


@fault
def copies_come_in_the_wrong_order(monkeypatch):
    monkeypatch.setattr(CacheMachine, "deliveries", (BEFORE_EACH_WRITE,))
    wrap(monkeypatch, KVCacheManager, "take_moves", lambda original, owner: original(owner)[::-1])


@fault
def a_partly_filled_block_is_published_whole(monkeypatch):
    def publish_last(original, state, sequence):
        rows, row = state.rows, sequence.row
        if rows.num_computed[row] < rows.num_tokens[row]:
            rows.num_computed[row] += 1
        original(state, sequence)

    wrap(monkeypatch, CacheState, "_publish_last", publish_last)


@fault
def namespaces_share_a_root(monkeypatch):
    wrap(monkeypatch, PrefixTree, "root", lambda original, tree, namespace: original(tree, ()))


@fault
def what_was_cached_is_forgotten(monkeypatch):
    def find(original, tree, extent, tokens, limit, *, partial):
        return original(tree, extent, tokens, min(limit, 2 * tree.block_bytes), partial=partial)

    wrap(monkeypatch, PrefixTree, "find", find)


# -- groups -----------------------------------------------------------------------------------------------------------


@fault
def what_has_slid_is_taken_for_what_is_left(monkeypatch):
    def first_blocks(original, span, num_computed):
        return original(span, num_computed) + 1

    wrap(monkeypatch, Span, "first_blocks", first_blocks)


@fault
def a_hit_ends_where_a_window_lacks_a_block(monkeypatch):
    wrap(monkeypatch, PrefixTree, "fit", lambda original, tree, match: match)


@fault
def blocks_in_span_are_not_held(monkeypatch):
    wrap(monkeypatch, holdings, "hold_shared", lambda original, state, row: None)


@fault
def blocks_that_others_have_in_span_are_taken(monkeypatch):
    def take(original, group, *arguments):
        references, group.references = group.references, np.zeros_like(group.references)
        try:
            return original(group, *arguments)
        finally:
            group.references = references

    wrap(monkeypatch, SpannedGroup, "_take", take)


@fault
def sinks_are_let_go(monkeypatch):
    def spans_of(original, config):
        return [replace(span, num_sink_blocks=0) for span in original(config)]

    wrap(monkeypatch, core_state, "spans_of", spans_of)


@fault
def stepping_back_ignores_what_has_slid(monkeypatch):
    wrap(monkeypatch, rewinding, "can_step_back", lambda original, *arguments: True)


@fault
def a_copy_is_of_the_first_groups_blocks(monkeypatch):
    def order_move(original, state, source, destination, num_tokens, group=0):
        original(state, source, destination, num_tokens)

    wrap(monkeypatch, CacheState, "order_move", order_move)


@fault
def an_encoders_blocks_go_with_the_first_that_leaves(monkeypatch):
    def leave_encoder(original, state, sequence):
        if sequence._encoder is not None:
            sequence._encoder.num_holders = 1
        original(state, sequence)

    wrap(monkeypatch, CacheState, "leave_encoder", leave_encoder)


@fault
def a_state_is_kept_that_went_on_meanwhile(monkeypatch):
    def checkpoint(original, state, rows):
        original(state, rows)
        for row in rows.tolist():
            sequence = state.rows.sequence_at(row)
            sequence._checkpoints = [(column + 1, block) for column, block in sequence._checkpoints]

    wrap(monkeypatch, recurrent, "checkpoint", checkpoint)


@fault
def a_ring_overwrites_what_others_have(monkeypatch):
    wrap(monkeypatch, rings, "_make_private", lambda original, *arguments, **options: None)


# -- identity, pins, suspension, drafts, failures ---------------------------------------------------------------------


@fault
def media_are_not_told_apart(monkeypatch):
    for name in ("identify", "look"):
        wrap(
            monkeypatch,
            IdentityTable,
            name,
            lambda original, table, tokens, media=(), extra_ids=None: original(table, tokens, (), extra_ids),
        )


@fault
def extra_ids_are_not_told_apart(monkeypatch):
    for name in ("identify", "look"):
        wrap(
            monkeypatch,
            IdentityTable,
            name,
            lambda original, table, tokens, media=(), extra_ids=None: original(table, tokens, media),
        )


@fault
def a_pin_does_not_hold_what_it_found(monkeypatch):
    def pin(original, state, *arguments):
        made = original(state, *arguments)
        state.tree.release(state.pins[made].extent)
        return made

    wrap(monkeypatch, pinning, "pin", pin)


@fault
def a_pin_never_expires(monkeypatch):
    wrap(monkeypatch, CacheState, "_expire_pins", lambda original, state: None)


@fault
def what_was_lost_in_suspension_counts_as_computed(monkeypatch):
    def resume(original, state, sequence, more):
        num_lost = original(state, sequence, more)
        state.rows.computed_of[sequence.row] += num_lost
        return 0

    wrap(monkeypatch, resuming, "resume", resume)


@fault
def accepted_drafts_stay_where_they_were(monkeypatch):
    wrap(monkeypatch, growth, "_runs", lambda original, *arguments: iter(()))


# -- the machine fails ------------------------------------------------------------------------------------------------


# -- tiers and events -------------------------------------------------------------------------------------------------

TIERS = {}


def fault_of_tiers(plant):
    TIERS[plant.__name__] = plant
    return plant


@fault_of_tiers
def what_goes_to_host_memory_is_not_copied(monkeypatch):
    def order(original, lower, group, sources, destinations, source, destination):
        if destination != "host":
            original(lower, group, sources, destinations, source, destination)

    wrap(monkeypatch, LowerTier, "_order", order)


@fault_of_tiers
def what_comes_from_host_memory_is_that_of_other_blocks(monkeypatch):
    def order(original, lower, group, sources, destinations, source, destination):
        shifted = np.roll(sources, 1) if source == "host" else sources
        original(lower, group, shifted, destinations, source, destination)

    wrap(monkeypatch, LowerTier, "_order", order)


@fault_of_tiers
def host_memory_keeps_what_the_device_publishes_anew(monkeypatch):
    wrap(monkeypatch, LowerTier, "make_way", lambda original, lower, extent: None)


@fault_of_tiers
def host_memory_outlives_the_prefix_that_it_hangs_below(monkeypatch):
    def forget_below(original, lower, extent):
        extent.lower = None

    wrap(monkeypatch, LowerTier, "_forget_below", forget_below)


@fault_of_tiers
def an_eviction_is_not_told(monkeypatch):
    wrap(monkeypatch, EventRecorder, "removed", lambda original, *arguments, **options: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_machine_finds_a_planted_fault(name, monkeypatch):
    FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CacheMachine, settings=EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TIERS))
def test_the_machine_finds_a_fault_of_tiers(name, monkeypatch):
    TIERS[name](monkeypatch)
    configs = cache_configs(block_sizes=(1, 2), max_blocks=8, host=st.just(True))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(cache_machine(configs), settings=EXAMPLES)


@pytest.mark.parametrize(
    "name",
    [
        "a_reference_is_lost_on_split",
        "free_keeps_a_block",
        "an_uncommitted_block_is_hit",
        "a_partial_copy_is_of_one_token_too_many",
        "a_referenced_extent_is_evicted",
        "what_has_slid_is_taken_for_what_is_left",
        "a_hit_ends_where_a_window_lacks_a_block",
        "a_state_is_kept_that_went_on_meanwhile",
        "an_encoders_blocks_go_with_the_first_that_leaves",
        "what_was_lost_in_suspension_counts_as_computed",
    ],
)
def test_contents_and_counts_alone_show_it(name, monkeypatch):
    """Without `check()`: what the model and the memory know of the tree is nothing."""
    FAULTS[name](monkeypatch)
    monkeypatch.setattr(KVCacheManager, "check", lambda core: None)
    with pytest.raises(AssertionError):
        run_state_machine_as_test(CacheMachine, settings=EXAMPLES)
