"""Faults that users of cache managers reported, each as the sequence of calls that would show it here.

The letters and numbers are those of the collection of reports; what does not apply is in `facts.py`, with the reason.
"""

import gc
import os
import random
import subprocess
import sys
import weakref

import numpy as np
import pytest
from tests.core.small import cached, computed, ids, moves, refused, small

from kvist import (
    ArgumentError,
    ArgumentTypeError,
    AttentionSpec,
    CacheConfig,
    KVCacheManager,
    NeverFits,
    OutOfBlocks,
    Pin,
    Retention,
    SequenceError,
    StaleMatch,
)
from kvist.core.extents import Extent
from kvist.core.pool import BlockPool
from kvist.testing import TokenMemory


def blocks_of_4(num_blocks, **settings):
    return small(block_size=4, num_blocks=num_blocks, **settings)


def watched(num_blocks, **settings):
    """A manager whose memory raises when anything is read or written that should not be."""
    manager = blocks_of_4(num_blocks, **settings)
    manager.memory = TokenMemory(manager.config)
    manager.memory.attach(manager)
    return manager


def written(manager, tokens, **options):
    sequence = manager.add_sequence(tokens, **options)
    manager.memory.write(sequence)
    manager.commit([sequence])
    return sequence


def generate(manager, sequences, tokens):
    """Append one token each, compute and commit."""
    manager.append(sequences, np.array(tokens))
    for sequence in sequences:
        manager.memory.write(sequence)
    manager.commit(sequences)


def hit(manager, tokens, **options):
    return manager.match_prefix(tokens, **options).num_tokens


# -- A: leaks, counts, double free ------------------------------------------------------------------------------------


def test_B001_B002_B010_every_release_counts_once_and_the_second_is_an_error():
    manager = blocks_of_4(8)
    sequence = computed(manager, range(8))
    [copy] = manager.fork(sequence)
    pin = manager.pin(manager.match_prefix(range(9)))
    free = []
    for release in (lambda: manager.free(sequence), pin.release, lambda: manager.free(copy)):
        release()
        free.append(manager.num_free_blocks)
        with refused(manager, SequenceError, "has been"):
            release()
    assert free == [6, 6, 8]
    assert sorted(ids(manager.add_sequence(range(100, 132)))) == list(range(8))


def test_B003_asking_for_less_than_there_is_takes_nothing():
    manager = blocks_of_4(8)
    sequence = computed(manager, range(17))
    manager.reserve([sequence], 3)
    manager.rewind(sequence, 5)
    manager.reserve([sequence], 8)
    assert (sequence.num_blocks, manager.num_free_blocks) == (5, 3)
    manager.reserve([sequence], 0)
    assert (sequence.num_blocks, manager.num_free_blocks) == (5, 3)
    with refused(manager, ArgumentError, "must not be negative"):
        manager.reserve([sequence], -4)
    pool = BlockPool(4)
    with pytest.raises(AssertionError):
        pool.take(-1)
    assert pool.num_free == 4


def test_B005_B017_B070_whatever_order_things_are_released_in_no_block_is_lost_or_given_twice():
    """Reports of wrong text under cancels and retries were never settled; here every slot that is read is checked."""
    manager = small(block_size=4, num_blocks=12, max_sequences=12)
    manager.memory = TokenMemory(manager.config)
    rng, holders = random.Random(5), []
    for _ in range(600):
        try:
            if rng.random() < 0.45:
                holders.append(written(manager, [rng.randrange(2) for _ in range(rng.randint(1, 14))]))
            elif rng.random() < 0.3:
                prompt = [rng.randrange(2) for _ in range(13)]
                holders.append(manager.pin(manager.match_prefix(prompt)))
            elif rng.random() < 0.2:
                manager.evict(rng.randrange(3))
        except OutOfBlocks:
            pass
        while holders and (manager.num_free_blocks < 3 or rng.random() < 0.4):
            holder = holders.pop(rng.randrange(len(holders)))
            if isinstance(holder, Pin):
                holder.release()
            else:
                manager.memory.verify(holder)
                manager.free(holder)
        manager.check()
    for holder in holders:
        holder.release() if isinstance(holder, Pin) else manager.free(holder)
    assert manager.num_free_blocks == 12
    assert manager.stats().num_hit_tokens > 0


def test_B006_blocks_that_were_given_back_are_handed_out_again_in_that_order_and_once():
    pool = BlockPool(4)
    taken = pool.take(3).tolist()
    pool.give(np.array([taken[2], taken[0], taken[1]], np.int32))
    again = pool.take(4).tolist()
    assert again[:3] == [taken[2], taken[0], taken[1]]
    assert sorted(again) == [0, 1, 2, 3]


def test_B018_a_slot_for_a_draft_is_given_back_once_in_either_order():
    for rewinds in (True, False):
        manager = small(block_size=1, num_blocks=8)
        sequence = computed(manager, range(3))
        manager.reserve([sequence], 1)
        assert manager.num_free_blocks == 4
        if rewinds:
            manager.rewind(sequence, 0)
            assert manager.num_free_blocks == 5
        manager.free(sequence)
        with refused(manager, SequenceError, "freed"):
            manager.rewind(sequence, 0)
        assert manager.num_free_blocks == 8


def test_B009_taking_too_much_takes_nothing():
    pool = BlockPool(4)
    with pytest.raises(AssertionError):
        pool.take(5)
    assert pool.num_free == 4
    assert sorted(pool.take(4).tolist()) == [0, 1, 2, 3]
    manager = blocks_of_4(4)
    first = manager.add_sequence(range(8))
    with refused(manager, OutOfBlocks, "blocks, but only 2 are free or evictable"):
        manager.append([first], [range(12)])
    assert manager.add_sequence(range(50, 58)).num_blocks == 2


def test_B011_a_pinned_block_is_not_free_and_is_free_once_after():
    manager = blocks_of_4(4)
    kept, _ = cached(manager, range(8))
    pin = manager.pin(manager.match_prefix(range(8)))
    assert manager.num_free_blocks == 3
    filler = manager.add_sequence(range(50, 62))
    with refused(manager, OutOfBlocks, "1 pins"):
        manager.add_sequence([99])
    assert hit(manager, range(8)) == 4
    pin.release()
    assert manager.num_free_blocks == 1
    assert ids(manager.add_sequence([99])) == [kept]
    assert kept not in ids(filler)


def test_B013_what_has_ended_is_gone_without_the_garbage_collector():
    manager = blocks_of_4(64)
    gc.collect()
    of_others = {id(extent) for extent in gc.get_objects() if type(extent) is Extent}
    gc.disable()
    try:
        for start in range(1000):
            cached(manager, range(start, start + 7))
        manager.reset()
        left = [each for each in gc.get_objects() if type(each) is Extent and id(each) not in of_others]
        assert left == []
        gone = weakref.ref(manager)
        del manager
        assert gone() is None
    finally:
        gc.enable()


def test_B014_a_chain_deeper_than_the_stack_is_freed_evicted_and_dropped():
    depth = 3000
    manager = small(block_size=1, num_blocks=depth + 1, max_sequence_length=2 * depth, max_sequences=1)
    cached(manager, range(depth))
    for end in range(depth - 1, 0, -1):
        manager.pin(manager.match_prefix(range(end + 1))).release()
    assert manager.stats().num_extents == depth
    assert hit(manager, range(depth + 1)) == depth
    assert manager.evict(depth // 2) == depth // 2
    assert manager.drop(namespace=()) == depth - depth // 2
    assert manager.num_free_blocks == depth + 1
    assert manager.stats().num_extents == 0


def test_B019_two_that_compute_the_same_in_one_step_leave_one_copy():
    manager = blocks_of_4(8)
    first, second = (manager.add_sequence(range(8)) for _ in range(2))
    manager.commit([first, second])
    manager.free(first)
    manager.free(second)
    stats = manager.stats()
    assert (stats.num_free_blocks, stats.num_evictable_blocks) == (8, 2)


def test_B021_splitting_changes_no_count():
    manager = blocks_of_4(8)
    cached(manager, range(1, 9))
    cached(manager, [1, 2, 3, 4, 9, 9, 9, 9])
    assert manager.stats().num_evictable_blocks == 3
    pin = manager.pin(manager.match_prefix([1, 2, 3, 4, 9, 9, 9, 9, 0]))
    assert manager.stats().num_evictable_blocks == 1
    pin.release()
    assert [manager.evict(2), manager.stats().num_evictable_blocks, manager.num_free_blocks] == [2, 1, 8]
    manager.check()


def test_B022_B031_a_match_that_is_given_up_holds_nothing():
    manager = blocks_of_4(8)
    cached(manager, range(12))
    match = manager.match_prefix(range(20))
    assert manager.num_free_blocks == 8
    with pytest.raises(RuntimeError, match="abort"), manager.pin(match):
        assert manager.num_free_blocks == 5
        raise RuntimeError("abort")
    assert manager.num_free_blocks == 8


def test_B023_an_admission_that_fails_after_its_match_holds_nothing_and_ages_nothing():
    manager = blocks_of_4(8, policy="lru")
    cached(manager, range(8))
    cached(manager, range(40, 44))
    computed(manager, range(60, 72))
    with refused(manager, OutOfBlocks, "needs 4 blocks, but only 3"):
        manager.add_sequence(range(24))
    assert manager.num_free_blocks == 5
    manager.add_sequence(range(80, 92))
    assert (hit(manager, range(9)), hit(manager, range(40, 45))) == (4, 4)  # the older one gave its tail


def test_B033_B034_B125_a_hold_ends_when_it_is_released_or_when_its_time_is_over():
    """Blocks for a transfer to which no answer may come: pinned for 480 seconds, in one of two runs released after 1.
    Asking what is free is enough to see that their time is over.
    """
    for answers in (True, False):
        now = [0.0]
        manager = KVCacheManager(blocks_of_4(8).config, clock=lambda now=now: now[0])
        cached(manager, range(32))
        pin = manager.pin(manager.match_prefix(range(33)), lifetime_s=480.0)
        now[0] = 1.0
        if answers:
            pin.release()
        assert manager.num_free_blocks == (8 if answers else 0)
        if not answers:
            with refused(manager, OutOfBlocks, "1 pins"):
                manager.add_sequence([99])
        now[0] = 480.0
        assert manager.num_free_blocks == 8
        if not answers:
            pin.release()  # the answer that comes too late
        assert manager.num_free_blocks == 8
        assert manager.add_sequence(range(50, 82)).num_blocks == 8


def test_B037_B038_what_a_step_says_of_a_sequence_that_has_ended_reaches_nobody():
    """The row has a new owner by then; the late result is an error, not a change of the newcomer's counts."""
    manager = blocks_of_4(8)
    first = manager.add_sequence(range(12))
    manager.commit([first], 4)
    manager.free(first)
    second = manager.add_sequence(range(50, 62))
    with refused(manager, SequenceError, "freed"):
        manager.commit([first], 8)
    assert (second.num_computed_tokens, hit(manager, range(13))) == (0, 4)


def test_B025_two_thousand_requests_leave_no_block_behind():
    manager = blocks_of_4(64)
    rng = random.Random(0)
    for _ in range(2000):
        sequence = computed(manager, [rng.randrange(3) for _ in range(rng.randint(1, 37))])
        for _ in range(rng.randint(0, 9)):
            manager.append([sequence], np.array([rng.randrange(3)]))
            manager.commit([sequence])
        manager.free(sequence)
        assert manager.num_free_blocks == 64
    manager.check()
    assert manager.stats().num_evicted_blocks > 0


def test_B026_a_cache_in_use_never_fills_up_with_what_has_ended():
    manager = blocks_of_4(8)
    for start in range(20):
        cached(manager, range(10 * start, 10 * start + 8))
        assert manager.stats().usage == 0.0


def test_B041_freeing_twice_or_what_was_never_admitted_is_a_plain_error():
    manager = blocks_of_4(8)
    sequence = computed(manager, range(8))
    manager.free(sequence)
    for call in (
        manager.free,
        manager.fork,
        lambda ended: manager.rewind(ended, 1),
        lambda ended: manager.commit([ended]),
    ):
        with refused(manager, SequenceError, "freed"):
            call(sequence)
    with refused(manager, ArgumentTypeError, "expected a Sequence"):
        manager.free(17)


def test_B042_content_that_is_there_stays_and_the_copy_goes_back():
    manager = watched(8)
    first = written(manager, range(8))
    second = written(manager, range(8), reuse=False)
    own = set(ids(second))
    third = manager.add_sequence(range(9))
    assert ids(second) == ids(first) == ids(third)[:2]
    assert not own & set(ids(first))
    manager.free(first)
    manager.free(second)
    assert manager.evict(8) == 0  # the third reads what the first wrote
    manager.memory.verify(third)
    other = manager.add_sequence(range(50, 70))
    assert not set(ids(other)) & set(ids(third))


def test_B043_a_fork_outlives_its_origin():
    manager = watched(8)
    first = written(manager, range(6))
    [second] = manager.fork(first)
    manager.free(first)
    generate(manager, [second], [6])
    manager.memory.verify(second)
    assert second.tokens.tolist() == list(range(7))
    manager.free(second)
    assert manager.num_free_blocks == 8
    manager.check()


def test_B045_a_block_handed_out_is_not_found_under_its_old_content():
    manager = blocks_of_4(2)
    cached(manager, range(8))
    manager.add_sequence(range(50, 58))
    assert hit(manager, range(9)) == 0
    assert manager.stats().num_extents == 0


# -- B: identity ------------------------------------------------------------------------------------------------------


SAYS_DIGEST = """
from kvist import AttentionSpec, CacheConfig, KVCacheManager
manager = KVCacheManager(CacheConfig([AttentionSpec(1, 1)], 4, 32))
for namespace in [(), ("salt", 1), (b"salt",), ("a", "b")]:
    sequence = manager.add_sequence(range(64), namespace=namespace) if not namespace else (
        manager.add_sequence(range(9), namespace=namespace))
    manager.commit([sequence])
print(manager.digest())
"""


def test_B047_what_is_cached_has_one_digest_whatever_the_seed_of_the_process_hashes():
    digests = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        ran = subprocess.run(
            [sys.executable, "-c", SAYS_DIGEST], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(ran.stdout.strip())
    [digest] = digests
    assert len(bytes.fromhex(digest)) == 32


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ((-1,), (-2,)),
        ((1,), ("1",)),
        (("1",), (b"1",)),
        ((1,), (1 + 2**61 - 1,)),
        ((), ("",)),
        ((), (0,)),
        (("a", "b"), ("ab",)),
    ],
)
def test_B046_namespaces_that_some_hash_takes_for_equal_are_not(ours, theirs):
    manager = blocks_of_4(8)
    cached(manager, range(8), namespace=ours)
    assert [hit(manager, range(9), namespace=namespace) for namespace in (ours, theirs)] == [8, 0]


def test_B046_a_namespace_of_values_that_are_equal_across_types_is_refused():
    manager = blocks_of_4(8)
    for namespace in [(True,), (1.0,), [1], "a", (None,)]:
        with refused(manager, ArgumentTypeError, "must be a tuple of strings, ints and bytes"):
            manager.add_sequence([1], namespace=namespace)


def test_B049_B059_B061_every_part_of_an_identity_counts_by_its_place():
    manager = blocks_of_4(32)
    fields = [("lora", "X"), ("salt", "X"), ("image", "X"), ("lora", "X", 1), ("lora", "X", 2), ("X", "lora")]
    for field in fields:
        cached(manager, range(8), namespace=field)
        found = {other: hit(manager, range(8), namespace=other) for other in fields}
        assert found[field] == 7
        assert [found[other] for other in fields[fields.index(field) + 1 :]] == [0] * (
            len(fields) - 1 - fields.index(field)
        )


def test_B050_B051_tokens_are_compared_whole():
    manager = blocks_of_4(32)
    cached(manager, [65] * 8)
    assert hit(manager, [321] * 8) == 0  # 65 + 256
    cached(manager, [70000] * 8)
    assert hit(manager, [70000 - 65536] * 8) == 0
    cached(manager, [2**31 - 1] * 8)
    assert hit(manager, [2**31 - 1] * 8) == 7
    for token in (2**31, 2**32 + 65, -1):
        with refused(manager, ArgumentError, str(token)):
            manager.add_sequence([token] * 8)


def test_B066_nothing_computed_with_old_weights_is_found_after_they_were_dropped():
    """Of every namespace, and of what still runs with them."""
    manager = blocks_of_4(16)
    for adapter in ((), ("adapter",)):
        cached(manager, range(8), namespace=adapter)
    running = computed(manager, range(50, 57))
    for adapter in ((), ("adapter",)):
        manager.drop(namespace=adapter)
    manager.append([running], [[57, 58]])
    manager.commit([running])
    manager.free(running)
    assert [hit(manager, range(9)), hit(manager, range(9), namespace=("adapter",)), hit(manager, range(50, 59))] == [
        0
    ] * 3
    cached(manager, range(8))
    assert hit(manager, range(9)) == 8


# -- C: boundaries ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("partial_reuse", "whole"), [(False, 4), (True, 7)])
def test_B071_a_full_hit_leaves_a_token_to_compute_and_adds_no_copy(partial_reuse, whole):
    manager = watched(8, partial_reuse=partial_reuse)
    manager.free(written(manager, range(8)))
    again = written(manager, range(8))
    longer = written(manager, range(9))
    assert (again.num_cached_tokens, longer.num_cached_tokens) == (whole, 8)
    assert ids(again) == ids(longer)[:2]
    assert manager.num_free_blocks == 8 - 3


@pytest.mark.parametrize(("length", "by_block", "by_token"), [(1, 0, 0), (3, 0, 2), (4, 0, 3), (5, 4, 4), (8, 4, 7)])
def test_B073_at_least_one_token_is_left_at_every_length(length, by_block, by_token):
    for partial_reuse, expected in ((False, by_block), (True, by_token)):
        manager = blocks_of_4(8, partial_reuse=partial_reuse)
        cached(manager, range(length))
        assert manager.add_sequence(range(length)).num_cached_tokens == expected


def test_B074_nothing_is_found_that_is_not_computed():
    manager = watched(8)
    first = manager.add_sequence(range(8))
    assert manager.add_sequence(range(8)).num_cached_tokens == 0
    manager.free(first)  # preempted before its step
    assert hit(manager, range(8)) == 0


def test_B075_what_was_computed_before_an_abort_may_be_found_and_reads_right():
    manager = watched(8)
    first = manager.add_sequence(range(12))
    manager.memory.write(first, 0, 4)
    manager.commit([first], 4)
    manager.free(first)
    second = manager.add_sequence(range(12))
    assert second.num_cached_tokens == 4
    manager.memory.verify(second)


def test_B078_B079_the_tail_of_a_chunked_prompt_is_kept_and_each_block_stored_once():
    manager = watched(8)
    sequence = manager.add_sequence(range(9))
    for stop in (8, 9):
        manager.memory.write(sequence, sequence.num_computed_tokens, stop)
        manager.commit([sequence], stop)
    found = [hit(manager, range(20))]
    for token in (9, 10, 11):
        generate(manager, [sequence], [token])
        found.append(hit(manager, range(20)))
    assert found == [8, 8, 8, 12]
    manager.free(sequence)
    assert manager.stats().num_evictable_blocks == 3


def test_B081_a_tail_that_two_go_on_from_is_copied():
    manager = watched(8)
    first = written(manager, range(6))
    second = manager.add_sequence(range(6))
    assert second.num_cached_tokens == 4  # the half-filled block is the first's alone while it runs
    manager.memory.write(second)
    manager.commit([second])
    generate(manager, [first, second], [7, 8])
    manager.free(first)
    third = manager.add_sequence([*range(6), 7, 9])
    assert third.num_cached_tokens == 7
    manager.memory.verify(second)
    manager.memory.verify(third)


def test_B082_beams_copy_their_tail_once_and_count_right_after_reordering():
    manager = watched(8)
    first = manager.add_sequence(range(6), num_beams=2)
    manager.memory.write(first)
    manager.commit([first])
    beams = first.beams
    assert manager.memory.num_copied_tokens == 2
    generate(manager, beams, [7, 8])
    manager.reorder(beams, [0, 0])
    assert [beam.tokens.tolist() for beam in beams] == [[*range(6), 7]] * 2
    assert manager.memory.num_copied_tokens == 2 + 3
    generate(manager, beams, [9, 10])
    for beam in beams:
        manager.memory.verify(beam)
        manager.free(beam)
    assert manager.num_free_blocks == 8
    manager.reset()
    manager.check()


def test_B083_B239_four_beams_of_ten_tokens_share_two_blocks_and_reuse_them():
    manager = watched(8)
    manager.free(written(manager, range(10)))
    first = manager.add_sequence(range(10), num_beams=4)
    assert first.num_cached_tokens == 9
    assert manager.num_free_blocks == 8 - (2 + 4)
    manager.memory.write(first)
    manager.commit([first])
    assert hit(manager, range(20)) == 10
    assert len({block for beam in first.beams for block in ids(beam)}) == 6


# -- D: drafts and rewinding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accepted", "found"), [(1, [4, 8]), (0, [4, 8])])
def test_B085_a_block_is_found_when_its_last_token_is_accepted(accepted, found):
    """Seven tokens, one draft, one token of the model's own: the eighth position is committed only once it is known."""
    manager = watched(8)
    sequence = written(manager, range(7))
    manager.append([sequence], [[7, 8]])
    manager.memory.write(sequence)
    seen = [hit(manager, range(20))]
    if not accepted:
        manager.rewind(sequence, 2)
        manager.append([sequence], np.array([7]))
        manager.memory.write(sequence)
    manager.commit([sequence])
    assert [*seen, hit(manager, range(20))] == found
    assert sequence.num_tokens == 8 + accepted


def test_B089_B091_target_and_draft_managers_stay_in_step_whatever_is_accepted():
    target, draft = watched(16), watched(16)
    rng = random.Random(1)
    sequences = [(manager, written(manager, range(7))) for manager in (target, draft)]
    for step in range(50):
        accepted = rng.randint(0, 4)
        for manager, sequence in sequences:
            if sequence.num_tokens > 40:
                manager.rewind(sequence, 35)
            manager.append([sequence], [[100 + step] * 5])
            manager.memory.write(sequence)
            manager.rewind(sequence, 4 - accepted)
            manager.commit([sequence])
            manager.memory.verify(sequence)
        assert len({sequence.num_tokens for _, sequence in sequences}) == 1
        assert len({manager.num_free_blocks for manager, _ in sequences}) == 1


def test_B090_a_prompt_is_not_changed_by_the_manager_that_admits_it():
    prompt = np.arange(12, dtype=np.int32)
    first, second = blocks_of_4(8), blocks_of_4(8)
    cached(first, prompt)
    assert first.add_sequence(prompt).num_cached_tokens == 11
    assert second.add_sequence(prompt).num_cached_tokens == 0
    assert prompt.tolist() == list(range(12))


def test_B093_B094_no_row_grows_past_its_end_in_one_step_or_in_many():
    manager = blocks_of_4(16, max_sequence_length=16)
    sequence = computed(manager, range(12))
    with refused(manager, NeverFits, "24 tokens, max_sequence_length is 16"):
        manager.append([sequence], [range(12)])
    assert sequence.num_blocks == 3
    manager.append([sequence], [range(4)])
    with refused(manager, NeverFits, "18 tokens"):
        manager.reserve([sequence], 2)
    assert manager.tables([sequence]).block_table.shape == (1, 4)


# -- F: pressure ------------------------------------------------------------------------------------------------------


def test_B111_a_prompt_larger_than_the_pool_never_fits_and_blocks_nobody():
    manager = blocks_of_4(4)
    with refused(manager, NeverFits, "needs 5 blocks of 4 tokens, the whole pool of group 0 has 4"):
        manager.add_sequence(range(20))
    assert manager.add_sequence(range(4)).num_blocks == 1


def test_B114_what_was_preempted_finds_what_it_had_computed():
    manager = watched(10)
    victim = written(manager, range(21))
    other = written(manager, range(100, 113))
    manager.free(victim)
    generate(manager, [other], [1])
    assert manager.add_sequence(range(21)).num_cached_tokens == 20


def test_B115_a_prompt_that_is_refused_a_thousand_times_writes_no_log(caplog):
    manager = blocks_of_4(2)
    manager.add_sequence(range(8))
    for _ in range(1000):
        with pytest.raises(OutOfBlocks):
            manager.add_sequence([1])
    assert caplog.records == []


def test_B118_what_preemption_costs_is_counted():
    manager = blocks_of_4(8, partial_reuse=False)
    first, second = computed(manager, range(14)), computed(manager, range(50, 64))
    assert manager.cheapest_victims([second, first]) == [first, second]
    manager.suspend(second)
    manager.append([first], [[7] * 3])
    manager.free(first)
    manager.resume(second)
    stats = manager.stats()
    assert (stats.num_suspended, stats.num_resumed, stats.num_recomputed_tokens) == (1, 1, 14 - 12)


def test_B122_whether_victims_would_be_enough_is_known_before_any_is_taken():
    manager = blocks_of_4(8)
    lower = [computed(manager, range(start, start + 8)) for start in (0, 100, 200)]
    forecast = manager.forecast()
    for sequence in lower:
        forecast.release(sequence)
    assert (forecast.free_blocks, forecast.fits(40), forecast.fits(32)) == (8, False, True)
    assert manager.stats().num_sequences == 3


@pytest.mark.parametrize(
    ("policy", "retention"),
    [("slru", None), ("s3fifo", None), ("lfu", None), ("priority", Retention([(0, None, 80, None)]))],
)
def test_B130_a_flood_of_prompts_that_come_once_does_not_wash_out_what_is_used_or_kept(policy, retention):
    """Differs: there are no quotas by tenant; what a tenant reuses, or marks, survives the others' thousand prompts."""
    manager = small(block_size=4, num_blocks=100, policy=policy, max_sequence_length=128)
    hot = range(10_000, 10_080)
    for _ in range(3):
        cached(manager, [*hot, 1], namespace=("t1",), retention=retention)
    for start in range(0, 4000, 4):
        cached(manager, range(start, start + 4 + start % 8), namespace=("t2",))
    assert hit(manager, [*hot, 2], namespace=("t1",)) == 80


def test_B127_B166_a_chain_is_evicted_from_its_end():
    for _ in range(20):
        manager = blocks_of_4(3)
        cached(manager, range(12))
        manager.add_sequence([99])
        assert hit(manager, range(13)) == 8
    manager = blocks_of_4(4)
    for length in (4, 8, 12):  # three extents, the first used last
        cached(manager, range(length))
    computed(manager, range(5))
    assert [manager.evict(1), hit(manager, range(13))] == [1, 8]


def test_B129_what_would_be_reused_is_not_counted_as_room():
    manager = blocks_of_4(5)
    cached(manager, range(8))
    computed(manager, range(50, 54))
    with refused(manager, OutOfBlocks, "needs 3 blocks, but only 2 are free or evictable") as caught:
        manager.add_sequence(range(20))
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (3, 2, 0)
    assert caught.value.held == 1


# -- J: statistics ----------------------------------------------------------------------------------------------------


def test_B189_B193_B197_a_prompt_is_counted_when_it_is_admitted_and_once():
    manager = watched(5, partial_reuse=False)
    manager.free(written(manager, range(8)))
    filler = manager.add_sequence(range(50, 58))
    before = manager.stats()
    for _ in range(3):
        with refused(manager, OutOfBlocks):
            manager.add_sequence(range(16))
    manager.free(filler)
    sequence = manager.add_sequence(range(16))
    for token in range(3):
        manager.append([sequence], np.array([token]))
    after = manager.stats()
    assert (after.num_query_tokens - before.num_query_tokens, after.num_hit_tokens - before.num_hit_tokens) == (16, 8)
    assert after.num_admitted - before.num_admitted == 1
    assert sequence.num_cached_tokens == 8


def test_B194_a_rate_of_hits_is_that_of_what_came_after_the_warm_up():
    """Differs: counts cannot be reset alone, but with the cache; two readings of the counts give the rate between."""
    manager = blocks_of_4(64, partial_reuse=False)
    for start in range(0, 500, 50):
        cached(manager, range(start, start + 8))
    before = manager.stats()
    cached(manager, range(1000, 1008))
    manager.add_sequence(range(1000, 1016))
    after = manager.stats()
    assert before.token_hit_rate == 0.0
    rate = (after.num_hit_tokens - before.num_hit_tokens) / (after.num_query_tokens - before.num_query_tokens)
    assert rate == 8 / 24
    assert after.token_hit_rate == 8 / (80 + 24)


def test_B190_random_prompts_hit_nothing_however_often_blocks_change_hands():
    manager = blocks_of_4(6)
    for start in range(0, 1000, 10):
        cached(manager, range(start, start + 10))
    stats = manager.stats()
    assert stats.num_evicted_blocks > 0
    assert (stats.num_hit_tokens, stats.token_hit_rate) == (0, 0.0)


# -- K: 32 bits -------------------------------------------------------------------------------------------------------


def test_B198_B202_slots_are_counted_in_64_bits():
    manager = small(block_size=2**16, num_blocks=2**16 + 1, max_sequence_length=2**16, max_sequences=1)
    sequence = manager.add_sequence([1])
    manager._state.rows.block_table[0, sequence.row, 0] = 2**16
    assert manager.tables([sequence]).slot_mapping.tolist() == [2**32]


def test_B199_more_blocks_than_ids_can_name_are_refused():
    with pytest.raises(ValueError, match="int32 block ids"):
        CacheConfig([AttentionSpec(1, 1)], num_blocks=2**31).validate()


def test_B203_no_id_is_ever_past_the_pool():
    manager = blocks_of_4(100)
    highest = 0
    for start in range(3000):
        highest = max(highest, *cached(manager, range(start, start + 9)))
    assert highest < 100


# -- L: ranks ---------------------------------------------------------------------------------------------------------


def test_B205_two_managers_that_are_told_the_same_decide_the_same():
    twins = [blocks_of_4(8, policy="lfu") for _ in range(2)]
    live = [[], []]
    rng = random.Random(2)
    for _ in range(400):
        choice, pick, length = rng.random(), rng.random(), rng.randint(1, 20)
        tokens = [rng.randrange(2) for _ in range(length)]
        for manager, sequences in zip(twins, live, strict=True):
            step(manager, sequences, choice, pick, tokens)
        assert twins[0].digest() == twins[1].digest()
    assert twins[0].stats() == twins[1].stats()
    twins[0].evict(1)
    assert twins[0].digest() != twins[1].digest()


def step(manager, sequences, choice, pick, tokens):
    """Admit, decode or end, as the numbers say."""
    try:
        if choice < 0.4:
            sequences.append(computed(manager, tokens))
        elif sequences and choice < 0.7:
            manager.append([sequences[int(pick * len(sequences))]], [tokens[:3]])
            manager.commit(sequences)
        elif sequences:
            manager.free(sequences.pop(int(pick * len(sequences))))
    except (OutOfBlocks, NeverFits):
        pass


# -- M, N: sizes and costs --------------------------------------------------------------------------------------------


def test_B210_B211_B214_memory_is_rounded_down_to_whole_blocks():
    layers = [AttentionSpec(num_kv_heads=8, head_dim=128, dtype="bfloat16")] * 32
    config = CacheConfig(layers, block_size=256, memory="9 GiB")
    assert config.block_bytes == 32 * 2**20
    assert config.group_num_blocks[0] == 288
    config = CacheConfig(layers, block_size=256, memory=int(0.9 * 21.89 * 2**30))
    assert config.group_num_blocks[0] == 630
    assert config.group_num_blocks[0] * config.block_bytes <= config.memory


def test_B217_every_setting_reaches_the_manager_and_unknown_ones_are_refused():
    settings = {
        "block_size": 3, "num_blocks": 11, "max_sequences": 5, "max_sequence_length": 70,
        "reuse": False, "partial_reuse": False, "policy": "fifo",
    }  # fmt: skip
    manager = KVCacheManager(CacheConfig([AttentionSpec(1, 2)], **settings))
    assert {name: getattr(manager.config, name) for name in settings} == settings
    with pytest.raises(TypeError, match="secondary_offload_min_priority"):
        CacheConfig([AttentionSpec(1, 2)], num_blocks=1, secondary_offload_min_priority=30)


def test_B223_blocks_are_not_objects():
    managers, counts = [], []
    for num_blocks in (10, 1_000_000):
        gc.collect()
        before = len(gc.get_objects())
        managers.append(small(block_size=16, num_blocks=num_blocks))
        counts.append(len(gc.get_objects()) - before)
    assert abs(counts[1] - counts[0]) < 20
    assert max(counts) < 200
    assert managers[1].num_free_blocks == 1_000_000


# -- O: reset ---------------------------------------------------------------------------------------------------------


def test_B229_B230_reset_is_refused_aloud_while_anything_runs_and_complete_after():
    manager = watched(8)
    running = written(manager, range(8))
    with refused(manager, SequenceError, "1 sequences run", "row 0 (8 tokens)"):
        manager.reset()
    assert hit(manager, range(9)) == 8
    manager.free(running)
    with manager.pin(manager.match_prefix(range(9))), refused(manager, SequenceError, "1 pins hold"):
        manager.reset()
    match = manager.match_prefix(range(9))
    manager.reset()
    assert (hit(manager, range(9)), manager.num_free_blocks) == (0, 8)
    with refused(manager, StaleMatch):
        manager.pin(match)


def test_B229_what_runs_on_after_its_namespace_was_dropped_is_never_found():
    manager = watched(16)
    running = written(manager, range(8))
    manager.drop(namespace=())
    generate(manager, [running], [8])
    for token in range(9, 13):
        generate(manager, [running], [token])
    manager.memory.verify(running)
    assert hit(manager, range(13)) == 0
    manager.free(running)
    assert (hit(manager, range(13)), manager.stats().num_evictable_blocks) == (0, 0)


# -- P: what users ask for --------------------------------------------------------------------------------------------


def test_B233_what_is_to_stay_stays_until_its_time_is_over():
    now = [0.0]
    manager = KVCacheManager(blocks_of_4(4).config, clock=lambda: now[0])
    cached(manager, range(8), retention=Retention([(0, None, 80, 5.0)]))
    cached(manager, range(10, 18))
    first = manager.add_sequence(range(20, 28))
    assert (hit(manager, range(9)), hit(manager, range(10, 19))) == (8, 0)
    manager.free(first)  # computed nothing, leaves nothing
    computed(manager, range(30, 38), retention=Retention([(0, None, 50, None)]))
    assert hit(manager, range(9)) == 8
    now[0] = 6.0
    manager.add_sequence(range(40, 48))
    assert hit(manager, range(9)) == 0


def test_B234_pins_hold_no_more_than_their_budget_and_the_rest_can_always_be_had():
    """Differs: six of ten blocks are refused, not four of them pinned; who wants four asks for four."""
    manager = blocks_of_4(10, pin_budget=0.4)
    cached(manager, range(24))
    with refused(manager, OutOfBlocks, "pins may hold 4 of the 10 blocks", "would hold 6") as caught:
        manager.pin(manager.match_prefix(range(25)))
    assert (caught.value.needed, caught.value.free) == (6, 4)
    manager.pin(manager.match_prefix(range(17)))
    with refused(manager, OutOfBlocks, "<Pin 16 tokens"):
        manager.pin(manager.match_prefix(range(25)))
    assert manager.add_sequence(range(100, 124)).num_blocks == 6


def test_B029_B235_a_pin_is_its_owners_own():
    manager = blocks_of_4(4)
    cached(manager, range(8))
    ours, theirs = (manager.pin(manager.match_prefix(range(9))) for _ in range(2))
    theirs.release()
    with refused(manager, SequenceError, "released"):
        theirs.release()
    assert manager.evict(4) == 0
    ours.release()
    assert manager.evict(4) == 2


def test_B069_a_prompt_may_ask_not_to_reuse_and_still_leave_its_blocks():
    manager = blocks_of_4(8)
    cached(manager, range(8))
    again = computed(manager, range(8), reuse=False)
    assert again.num_cached_tokens == 0
    assert moves(manager) == []
    assert hit(manager, range(9)) == 8


def test_B039_a_prompt_that_is_not_to_be_cached_keeps_its_own_progress():
    manager = watched(8)
    sequence = manager.add_sequence(range(12), publish=False)
    for stop in (4, 8, 12):
        manager.memory.write(sequence, sequence.num_computed_tokens, stop)
        manager.commit([sequence], stop)
        assert (sequence.num_blocks, hit(manager, range(13))) == (3, 0)
    manager.free(sequence)
    assert (manager.num_free_blocks, manager.stats().num_extents) == (8, 0)
