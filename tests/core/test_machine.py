"""CacheMachine as part of the tests: few examples here, `kvist soak` for many."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.core.small import cached, computed, ids, small

from kvist import (
    AttentionSpec,
    CacheConfig,
    KVCacheManager,
    NeverFits,
    Retention,
    SequenceError,
    StateSpec,
    TransferError,
    testing,
)
from kvist.core import rows
from kvist.core.misses import MISSES
from kvist.testing import CacheMachine, TokenMemory, cache_configs, cache_machine
from kvist.testing.configs import ALL_POLICIES

# The same examples every time. Shrinking takes minutes: leave it to the soak.
FEW = settings(
    max_examples=60,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def test_nothing_goes_wrong_whatever_is_done():
    run_state_machine_as_test(CacheMachine, settings=FEW)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_nothing_goes_wrong_in_tails_that_overflow(block_size, monkeypatch):
    monkeypatch.setattr(rows, "MIN_TAIL_TOKENS", 1)
    run_state_machine_as_test(cache_machine(cache_configs(block_sizes=[block_size])), settings=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ALL_POLICIES, ids=lambda policy: getattr(policy, "__name__", policy))
def test_nothing_goes_wrong_with_any_policy_in_the_smallest_pools(policy):
    run_state_machine_as_test(cache_machine(cache_configs([policy], max_blocks=5)), settings=FEW)


# -- what the machine found, each as its shortest case ----------------------------------------------------------------


def test_a_table_whose_last_block_is_another_one_has_another_version():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4, 5])
    before, version = ids(sequence), sequence.version
    manager.rewind(sequence, 1)
    manager.add_sequence([9])
    manager.append([sequence], [[5]])
    assert ids(sequence)[:2] == before[:2]
    assert ids(sequence)[2] != before[2]
    assert sequence.version > version


def test_two_parts_of_one_prompt_may_be_kept_until_the_same_moment():
    now = [0.0]
    manager = KVCacheManager(small().config, clock=lambda: now[0])
    cached(manager, [1, 2, 3, 4, 5, 6], retention=Retention([(0, 2, 80, 5.0), (2, 4, 50, 5.0)]))
    now[0] = 6.0
    assert manager.evict(3) == 3
    manager.check()


def test_a_beam_that_takes_its_leaders_place_leaves_what_the_leader_had_committed():
    manager = small(block_size=4, num_blocks=12)
    prompt = [0] * 8 + [1] * 6
    cached(manager, prompt[:8])
    leader = manager.add_sequence(prompt, num_beams=2)
    manager.commit([leader], 12)
    manager.match_prefix([5] * 9)  # elsewhere in the tree: the leader's blocks are not published yet
    manager.free(leader)
    assert manager.match_prefix(prompt).num_tokens == 12


WINDOW, STATE, CROSS = (
    AttentionSpec(1, 1, sliding_window=3),
    StateSpec([(8,)], "uint8"),
    AttentionSpec(1, 1, cross=True),
)


def watched(layers, block_size=2, num_blocks=8, **settings):
    """A manager of several groups and the memory that watches it."""
    settings = {"max_sequences": 4, "max_sequence_length": 30} | settings
    config = CacheConfig(layers, block_size, num_blocks, **settings)
    memory = TokenMemory(config)
    return memory.attach(KVCacheManager(config, memory)), memory


def compute(manager, memory, *sequences):
    for sequence in sequences:
        memory.write(sequence)
        manager.commit([sequence])
    manager.check()


def test_beams_start_from_the_state_after_their_prompt():
    manager, memory = watched([STATE])
    leader = manager.add_sequence([1], num_beams=2)
    manager.append([leader], np.array([2]))
    with pytest.raises(SequenceError, match="commit the prompt first"):
        manager.commit([leader])
    memory.write(leader, 0, 1)
    manager.commit([leader], 1)
    memory.verify(leader.beams[1])


def test_a_state_is_kept_of_a_prompt_that_beams_wait_for():
    manager, memory = watched([STATE], block_size=1, num_blocks=3)
    compute(manager, memory, manager.add_sequence([1], num_beams=2))
    assert manager.match_prefix([1, 2]).num_tokens == 1


def test_groups_of_one_pool_do_not_exchange_what_they_copy_from():
    layers = [AttentionSpec(1, 1, sliding_window=2), AttentionSpec(1, 1, sliding_window=3)]
    manager, memory = watched(layers, block_size=4, num_blocks=[3, 3], shared_pool=True)
    sequence = manager.add_sequence([1, 1, 1, 1, 1, 1])
    compute(manager, memory, sequence)
    manager.free(sequence)
    again = manager.add_sequence([1, 1, 1, 1, 1, 1], num_beams=2)
    assert again.num_cached_tokens == 5
    memory.verify(again)


def test_what_a_window_took_from_a_partly_filled_block_does_not_stand_in_for_another():
    layers = [AttentionSpec(1, 1, chunk_tokens=1), AttentionSpec(1, 1, chunk_tokens=2)]
    manager, memory = watched(layers, block_size=4, num_blocks=3)
    first = manager.add_sequence([1, 1])
    compute(manager, memory, first)
    second = manager.fork(first)[0]
    manager.free(first)
    manager.fork(second, 2)
    manager.free(second)
    manager.check()
    assert manager.match_prefix([1, 1]).num_tokens == 1


def test_stepping_back_leaves_the_encoders_blocks():
    manager, memory = watched([AttentionSpec(1, 1), CROSS], block_size=1)
    sequence = manager.add_sequence([1, 2], encoder_tokens=2, num_beams=2)
    memory.encode(sequence)
    compute(manager, memory, sequence)
    manager.rewind(sequence, 1)
    memory.verify(sequence)


def test_stepping_back_keeps_what_it_goes_on_from_though_room_is_made_meanwhile():
    layers = [AttentionSpec(1, 1), WINDOW]
    manager, memory = watched(layers, num_blocks=[4, 3])
    sequence = manager.add_sequence([1] * 6)
    compute(manager, memory, sequence)
    [other] = manager.fork(sequence)
    manager.rewind(sequence, 1)
    manager.check()
    memory.verify(sequence)
    memory.verify(other)


def test_beams_whose_rings_never_fit_are_refused_at_once():
    layers = [AttentionSpec(1, 1, sliding_window=1), AttentionSpec(1, 1, sliding_window=3, sink_tokens=1)]
    manager, _ = watched(layers, block_size=4, num_blocks=6, ring=True, max_beams=3)
    with pytest.raises(NeverFits):
        manager.add_sequence([1] * 6, num_beams=3)


def test_a_ring_may_be_taken_back_to_nothing():
    manager, memory = watched([AttentionSpec(1, 1, sliding_window=1)], block_size=1, num_blocks=3, ring=True)
    sequence = manager.add_sequence([1])
    compute(manager, memory, sequence)
    for _ in range(3):
        manager.append([sequence], np.array([1]))
    manager.rewind(sequence, 4)
    manager.check()
    manager.free(sequence)
    assert manager.num_free_blocks == 3


@pytest.mark.parametrize("steps", [(2, 4), (6,), (1, 1, 1, 3)])
def test_a_wrapped_prompt_may_be_taken_back_step_by_step(steps):
    ring = AttentionSpec(1, 1, sliding_window=1)
    manager, _ = watched([ring], block_size=4, num_blocks=3, ring=True, max_beams=3)
    sequence = manager.add_sequence([1] * 6)
    for step in steps:
        manager.rewind(sequence, step)
        manager.check()
    assert (sequence.num_tokens, sequence.num_columns) == (0, 0)


def test_accepted_drafts_find_their_places_behind_the_sinks_of_a_ring():
    layers = [AttentionSpec(1, 1, sliding_window=6, sink_tokens=5)]
    manager, memory = watched(layers, block_size=4, num_blocks=3, ring=True)
    sequence = manager.add_sequence([1])
    compute(manager, memory, sequence)
    manager.reserve([sequence], 5)
    memory.write_tree(sequence, [0, 1, 4], tokens=[1, 2, 3, 4])
    manager.accept(sequence, [2, 3, 4], [0, 1, 4])
    memory.verify(sequence)


def test_copies_into_rings_are_made_before_append_returns():
    manager, memory = watched([AttentionSpec(1, 1), WINDOW], ring=True)
    sequence = manager.add_sequence([1, 2, 3])
    compute(manager, memory, sequence)
    other = manager.add_sequence([1, 2, 3])
    manager.append([sequence], np.array([4]))
    assert manager.take_moves() == []
    memory.verify(sequence)
    memory.verify(other)


def test_an_admission_whose_copies_fail_is_not_counted():
    def fail(moves):
        raise OSError("broken")

    manager, memory = watched([AttentionSpec(1, 1)], block_size=4)
    sequence = manager.add_sequence([1, 2, 3])
    compute(manager, memory, sequence)
    manager.free(sequence)
    before, memory.perform = manager.stats(), fail
    with pytest.raises(TransferError):
        manager.add_sequence([1, 2, 9])
    after = manager.stats()
    assert (after.num_admitted, after.num_query_tokens) == (before.num_admitted, before.num_query_tokens)


# -- the machine itself -----------------------------------------------------------------------------------------------


def test_a_machine_has_the_configurations_it_was_made_for():
    seen = []

    class Watched(cache_machine(cache_configs(["fifo"], [8], max_blocks=4))):
        def teardown(self):
            seen.append(self.config)
            super().teardown()

    run_state_machine_as_test(Watched, settings=settings(FEW, max_examples=5, stateful_step_count=5))
    assert seen
    for config in seen:
        assert isinstance(config, CacheConfig)
        assert (config.policy, config.block_size) == ("fifo", 8)
        assert all(3 <= num_blocks <= 4 for num_blocks in config.num_blocks)


@pytest.mark.slow
def test_every_rule_is_reached_and_so_is_every_outcome_that_matters(monkeypatch):
    """A machine that does nothing finds nothing: a thousand examples come to all there is."""
    outcomes = Counter()

    class Counted(CacheMachine):
        def attempt(self, call):
            result = super().attempt(call)
            outcomes[type(result).__name__] += 1
            return result

        def wrapped(self, shadow, num_tokens):
            super().wrapped(shadow, num_tokens)
            outcomes["wrapped"] += shadow.wrapped

        def teardown(self):
            if hasattr(self, "manager"):
                stats = self.manager.stats()
                outcomes.update(
                    hits=stats.num_hit_tokens,
                    shared=stats.num_shared_blocks,
                    evicted=stats.num_evicted_blocks,
                    copied=self.memory.num_copied_tokens,
                    recomputed=stats.num_recomputed_tokens,
                    resumed=stats.num_resumed,
                )
                outcomes.update({f"{reason} missed": num_tokens for reason, num_tokens in stats.misses.items()})
                outcomes.update(f"{group.kind} shared" for group in stats.groups if group.num_reused_blocks)
            super().teardown()

    def write_tree(memory, *arguments, **options):
        outcomes["accepted"] += 1
        original(memory, *arguments, **options)

    original = TokenMemory.write_tree
    monkeypatch.setattr(TokenMemory, "write_tree", write_tree)
    run_state_machine_as_test(Counted, settings=settings(FEW, max_examples=1000))
    errors = {"OutOfBlocks", "OutOfRows", "NeverFits", "SequenceError", "StaleMatch", "TransferError"}
    done = {"list", "Pin", "Sequence", "hits", "shared", "evicted", "copied", "resumed", "recomputed", "accepted"}
    done |= {"wrapped", *(f"{kind} shared" for kind in ("full", "sliding", "ring", "chunked"))}
    missed = {f"{reason} missed" for reason in MISSES}
    missing = [each for each in sorted(errors | done | missed) if not outcomes[each]]
    assert not missing, outcomes


def test_the_oracle_needs_no_hypothesis_and_the_machine_says_what_brings_it():
    code = """
import sys
sys.modules["hypothesis"] = None
from kvist.testing import TokenMemory
try:
    from kvist.testing import CacheMachine
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "CacheMachine needs Hypothesis: pip install 'kvist[testing]'" in done.stdout


def test_only_public_names_are_offered():
    with pytest.raises(AttributeError, match="no attribute 'Stage'"):
        testing.Stage  # noqa: B018
