"""The index against a model that counts one block at a time; gaps, restarts and what each group needs."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.wire.blocks import EPOCH, Log

from kvist.errors import ArgumentError
from kvist.wire import Gap, PrefixIndex, Recorder, RunNames, Scope
from kvist.wire.hashes import KvistChain, TensorRTChain1, hash_query
from kvist.wire.records import (
    TIERS,
    AllCleared,
    CreatedPools,
    MovedBlocks,
    RemovedBlocks,
    StoredBlocks,
    Unknown,
    UpdatedBlocks,
)

PROMPT = tuple(range(1, 9))
KINDS = {0: ("full", None), 1: ("sliding", 5), 2: ("state", None), 3: ("chunked", 6)}
BLOCK_SIZE = 2


def stored(hashes, tier="device", **more):
    return StoredBlocks(hashes=tuple(hashes), tier=tier, **more)


def removed(hashes, tier="device", **more):
    return RemovedBlocks(hashes=tuple(hashes), tier=tier, **more)


def told(index, hashes, **options):
    """What each worker has: all, and then by tier, without those that leave nothing to a tier."""
    return {
        each.worker: (each.num_blocks, {tier: count for tier, count in each.per_tier if count})
        for each in index.query(hashes, **options)
    }


class Model:
    """What a rank has: a set of names for each group and tier."""

    def __init__(self):
        self.held = {}

    def add(self, group, tier, names):
        self.held.setdefault((group, tier), set()).update(names)

    def drop(self, group, tier, names):
        for (other, place), held in self.held.items():
            if other == group and tier in (None, place):
                held.difference_update(names)

    def reach(self, prompt, tiers, groups):
        """The longest part of a prompt of which each group has all that it needs, looked at one length at a time."""
        return max((n for n in range(len(prompt) + 1) if self.fits(prompt[:n], tiers, groups)), default=0)

    def fits(self, prefix, tiers, groups):
        return all(
            any(name in self.held.get((group, tier), ()) for tier in tiers)
            for group in groups
            for name in prefix[first_needed(group, len(prefix)) :]
        )


def first_needed(group, num_blocks):
    kind, window = KINDS[group]
    tokens = num_blocks * BLOCK_SIZE
    if kind == "sliding":
        return max(tokens + 1 - window, 0) // BLOCK_SIZE
    if kind == "state":
        return max(num_blocks - 1, 0)
    if kind == "chunked":
        return tokens // window * window // BLOCK_SIZE
    return 0


@st.composite
def actions(draw, groups):
    """What one of three workers says next, and what the model does for it."""
    worker, group, tier = draw(st.sampled_from("abc")), draw(st.sampled_from(groups)), draw(st.sampled_from(TIERS))
    names = draw(st.sets(st.sampled_from(PROMPT), min_size=1).map(sorted))
    kind, window = KINDS[group]
    about = {"group": group, "kind": kind, "window": window, "block_size": BLOCK_SIZE}
    other = draw(st.sampled_from(TIERS))
    return worker, draw(
        st.sampled_from(
            [stored(names, tier, **about), stored(PROMPT, tier, **about), stored(PROMPT[:5], tier, **about),
             removed(names, tier, group=group), removed(names, None, group=group),
             MovedBlocks(hashes=tuple(names), tier=tier, source_tier=other, **about),
             UpdatedBlocks(hashes=tuple(names), tier=tier, source_tier=other, group=group),
             AllCleared(), AllCleared(tier=tier), "remove"]
        )
    )  # fmt: skip


def follow(model, record):
    if isinstance(record, RemovedBlocks):
        model.drop(record.group, record.tier, record.hashes)
    elif isinstance(record, AllCleared):
        model.held = {place: names for place, names in model.held.items() if record.tier not in (None, place[1])}
    else:
        model.add(record.group, record.tier, record.hashes)
        if isinstance(record, MovedBlocks | UpdatedBlocks) and record.source_tier != record.tier:
            model.drop(record.group, record.source_tier, record.hashes)


@pytest.mark.parametrize("groups", [(0,), (0, 1), (1, 2), (0, 2, 3), (3,)])
@given(data=st.data())
def test_it_says_what_a_model_says(groups, data):
    index, models, known = PrefixIndex(), {}, {}
    for worker, record in data.draw(st.lists(actions(groups), max_size=16)):
        if record == "remove":
            index.remove(worker)
            models.pop(worker, None)
            known.pop(worker, None)
            continue
        model = models.setdefault(worker, Model())
        if isinstance(record, StoredBlocks):
            known.setdefault(worker, set()).add(record.group)
        elif isinstance(record, UpdatedBlocks) and record.group not in known.get(worker, ()):
            continue
        index.apply(worker, [record])
        follow(model, record)
        if data.draw(st.booleans()):
            index.sweep()
    expected = {}
    for worker, model in models.items():
        held = known.get(worker, set())
        reaches = [model.reach(PROMPT, TIERS[: at + 1], held) if held else 0 for at in range(len(TIERS))]
        if reaches[-1]:
            expected[worker] = reaches
        assert index.blocks(worker) == {place: names for place, names in model.held.items() if names}
    found = {each.worker: [count for _, count in each.per_tier] for each in index.query(PROMPT)}
    assert {worker: [sum(steps[: at + 1]) for at in range(len(TIERS))] for worker, steps in found.items()} == expected


def test_those_with_most_come_first_and_some_can_be_asked_for():
    index = PrefixIndex()
    index.apply("a", [stored([1])])
    index.apply("b", [stored([1, 2, 3], "host")])
    index.apply("c", [stored([2, 3])])
    assert [each.worker for each in index.query([1, 2, 3])] == ["b", "a"]
    assert told(index, [1, 2, 3], workers=["a", "c"]) == {"a": (1, {"device": 1})}
    assert index.query([]) == []


def test_tiers_are_told_apart_where_leading_blocks_lie_in_them():
    index = PrefixIndex()
    index.apply("a", [stored([1, 2]), stored([2, 3, 4], "host"), stored([6], "disk")])
    assert told(index, [1, 2, 3, 4, 5, 6]) == {"a": (4, {"device": 2, "host": 2})}


def test_B175_ranks_of_a_worker_count_for_themselves():
    index = PrefixIndex()
    assert (
        index.apply("a", [stored([1, 2], rank=0, id=0), stored([1], rank=1, id=0), removed([2], rank=0, id=1)]) is None
    )
    assert [(each.rank, each.num_blocks) for each in index.query([1, 2])] == [(0, 1), (1, 1)]
    index.remove("a", rank=0)
    assert [(each.rank, each.num_blocks) for each in index.query([1, 2])] == [(1, 1)]
    index.remove("a")
    assert index.workers == []


def test_a_gap_is_named_and_what_follows_waits_until_it_is_closed():
    index = PrefixIndex()
    assert index.apply("a", [stored([1])], sequence=0) is None
    assert index.apply("a", [removed([1])], sequence=3) == Gap("a", None, 1, 2)
    (found,) = index.query([1])
    assert found.is_stale
    assert index.apply("a", [stored([2])], sequence=1) is None
    assert index.apply("a", [stored([3])], sequence=2) is None
    assert index.apply("a", [removed([1])], sequence=3) is None
    assert index.query([1]) == []
    assert not index.query([2])[0].is_stale


def test_one_who_joins_late_misses_all_before():
    """The first number seen is 7: that is a gap, not a beginning."""
    index = PrefixIndex()
    assert index.apply("a", [stored([1])], sequence=7) == Gap("a", None, 0, 6)
    assert index.query([1]) == []


def test_what_was_taken_already_is_left_out():
    index = PrefixIndex()
    for number, record in enumerate([stored([1]), removed([1]), stored([2])]):
        assert index.apply("a", [record], sequence=number) is None
    assert index.apply("a", [stored([1])], sequence=1) is None
    assert told(index, [1]) == {}


def test_B173_a_snapshot_takes_the_place_of_everything_and_the_stream_goes_on_after_it():
    """Numbers 1 to 10, of which 5 are lost; a snapshot that ends with 10; then 11."""
    index = PrefixIndex()
    index.apply("a", [stored([1, 2])], sequence=0)
    assert index.apply("a", [], sequence=6) == Gap("a", None, 1, 5)
    index.load("a", [stored([3])], sequence=10)
    assert index.apply("a", [stored([9])], sequence=9) is None
    assert index.apply("a", [stored([4])], sequence=11) is None
    assert index.blocks("a") == {(0, "device"): {3, 4}}
    index.load("a", [], sequence=20)
    assert index.apply("a", [stored([5])], sequence=21) is None
    assert index.blocks("a") == {(0, "device"): {5}}


def test_a_snapshot_of_one_rank_leaves_the_others():
    index = PrefixIndex()
    index.apply("a", [stored([1], rank=0), stored([1], rank=1)])
    index.load("a", [stored([2])], rank=0)
    assert [(each.rank, each.num_blocks) for each in index.query([1])] == [(1, 1)]
    assert [(each.rank, each.num_blocks) for each in index.query([2])] == [(0, 1)]


@pytest.mark.parametrize("epochs", [(1, 2), (None, None)])
def test_a_worker_that_starts_anew_leaves_no_ghosts(epochs):
    """Numbers begin at 0 again, with another epoch or without one."""
    index = PrefixIndex()
    for number in range(5):
        index.apply("a", [stored([number])], sequence=number, epoch=epochs[0])
    assert index.apply("a", [stored([7])], sequence=0, epoch=epochs[1]) is None
    assert index.blocks("a") == {(0, "device"): {7}}
    assert index.apply("a", [stored([8])], sequence=1, epoch=epochs[1]) is None


def test_another_epoch_that_was_not_seen_from_its_beginning_is_a_gap():
    index = PrefixIndex()
    index.apply("a", [stored([1])], sequence=0, epoch=1)
    assert index.apply("a", [stored([2])], sequence=4, epoch=2) == Gap("a", None, 0, 3)
    assert index.query([1]) == []


def test_ids_of_events_count_where_batches_have_no_number():
    log = Log()
    run = log.run(range(8))
    events = [log.created(), log.stored(run, columns=(0,)), log.removed(run, 0, 1)]
    records = Recorder().records(events)
    index = PrefixIndex()
    assert [index.apply("a", [each]) for each in records] == [None, None, None]
    late = PrefixIndex()
    assert late.apply("a", records[1:]) == Gap("a", None, 0, 0)
    late.load("a", [], sequence=0, epoch=EPOCH)
    assert late.apply("a", records[1:]) is None


def test_an_event_in_several_parts_is_taken_part_by_part():
    log = Log()
    run = log.run(range(16))
    parts = Recorder().records([log.stored(run, columns=(0, 2))])
    index = PrefixIndex()
    assert [index.apply("a", [part]) for part in parts] == [None, None]
    assert index.blocks("a") == {(0, "device"): {run.digests()[0], run.digests()[2]}}


def test_a_namespace_that_is_cleared_leaves_the_others():
    index = PrefixIndex()
    tenant, other = ("tenant", 7), ("tenant", 8)
    index.apply("a", [stored([1, 2], namespace=()), stored([3, 4], namespace=tenant), stored([5], namespace=other)])
    index.apply("a", [stored([4], "host", namespace=tenant), removed([3], namespace=tenant)])
    index.apply("a", [AllCleared(namespace=tenant)])
    assert index.blocks("a") == {(0, "device"): {1, 2, 5}}
    index.apply("a", [AllCleared(namespace=())])
    assert index.blocks("a") == {(0, "device"): {5}}
    index.apply("a", [stored([3], namespace=tenant), AllCleared()])
    assert index.blocks("a") == {}
    index.apply("a", [stored([6], namespace=tenant), AllCleared(namespace=other)])
    assert index.blocks("a") == {(0, "device"): {6}}


def test_where_blocks_have_come_without_a_namespace_clearing_one_clears_all():
    """What they are in is not known, and a ghost is worse than a miss."""
    index = PrefixIndex()
    index.apply("a", [stored([1, 2]), stored([3], namespace=("tenant", 7)), AllCleared(namespace=("tenant", 7))])
    assert index.blocks("a") == {}


def test_B183_unknown_blocks_do_not_stop_a_removal():
    index = PrefixIndex()
    index.apply("a", [stored([1, 2]), removed([9, 1])])
    assert index.blocks("a") == {(0, "device"): {2}}
    assert index.stats.num_unknown_removals == 1


def test_B178_B179_a_reset_of_one_tier_leaves_the_others():
    index = PrefixIndex()
    index.apply("a", [stored([1]), stored([1, 2], "host"), AllCleared(tier="device")])
    assert index.blocks("a") == {(0, "host"): {1, 2}}
    index.apply("a", [AllCleared()])
    assert index.blocks("a") == {}


def test_tiers_that_do_not_count_are_counted():
    index = PrefixIndex(tiers=("device",))
    index.apply("a", [stored([1]), stored([1, 2], "host"), removed([1], "host"), Unknown(protocol="vllm", raw={})])
    assert index.blocks("a") == {(0, "device"): {1}}
    assert index.stats.num_unknown_tiers == 3
    with pytest.raises(ArgumentError, match="each once"):
        PrefixIndex(tiers=("device", "device"))


def test_B182_a_group_of_coarser_blocks_counts_for_whole_ones_only():
    """A block of 4 tokens is named as the second of two blocks of 2; what is half there is not there."""
    index = PrefixIndex()
    fine = {"group": 0, "kind": "full", "block_size": 2}
    index.apply("a", [stored([1, 2, 3, 4, 5], **fine), stored([2, 4], group=1, kind="full", block_size=4)])
    assert told(index, [1, 2, 3, 4, 5, 6]) == {"a": (4, {"device": 4})}
    index.apply("b", [stored([1, 2, 3], **fine), stored([2, 4], group=1, kind="sliding", window=3, block_size=4)])
    assert told(index, [1, 2, 3, 4, 5, 6], workers=["b"]) == {"b": (2, {"device": 2})}


def test_what_a_group_is_may_be_told_when_it_is_created():
    index = PrefixIndex()
    created = CreatedPools(num_blocks=(("device", 8),), group=0, kind="sliding", window=3, block_size=2)
    index.apply("a", [created, stored([2, 3], group=0)])
    assert told(index, [1, 2, 3]) == {"a": (3, {"device": 3})}
    later = stored([2, 3], group=0, kind="full", block_size=2)
    index.apply("a", [later])
    assert told(index, [1, 2, 3]) == {}


def test_windows_tell_groups_apart_where_no_number_does():
    """The token after 2 blocks of 2 sees 3 tokens with itself: the window has let the first block go."""
    index = PrefixIndex()
    index.apply("a", [stored([1, 2], window=3, block_size=2), stored([1, 2], block_size=2)])
    index.apply("a", [removed([1], window=3)])
    assert told(index, [1, 2, 3]) == {"a": (2, {"device": 2})}
    index.apply("a", [removed([1])])
    assert told(index, [1, 2, 3]) == {}


def test_a_tier_that_is_new_without_a_word_of_the_old_one_leaves_that():
    index = PrefixIndex()
    index.apply("a", [stored([1]), UpdatedBlocks(hashes=(1,), tier="host")])
    assert index.blocks("a") == {(0, "device"): {1}, (0, "host"): {1}}


def test_prompts_can_be_asked_for_by_their_tokens():
    log = Log()
    run = log.run(range(12))
    index = PrefixIndex()
    index.apply("kvist", Recorder().records([log.stored(run)]))
    index.apply("engine", Recorder(RunNames(TensorRTChain1())).records([replace(log.stored(run, 0, 2), id=0)]))
    by_tokens = index.query_tokens(range(13), KvistChain(b"fingerprint", 4), 4)
    assert [(each.worker, each.num_blocks) for each in by_tokens] == [("kvist", 3)]
    assert index.query(hash_query(TensorRTChain1(), range(13), 4))[0].num_blocks == 2
    assert index.query_tokens(range(13), TensorRTChain1(), 4, scope=Scope(lora_id=1)) == []


def test_B181_a_question_in_blocks_of_another_size_is_an_error():
    """Names of blocks of another size are found nowhere, which would look like an empty cache."""
    run = Log(block_size=8).run(range(64))
    index = PrefixIndex()
    index.apply("eight", Recorder().records([Log(block_size=8).stored(run)]))
    index.apply("four", Recorder().records([Log().stored(Log().run(range(64)))]))
    chain = KvistChain(b"fingerprint", 4)
    with pytest.raises(ArgumentError, match="block_size is 4, but eight has blocks of 8 tokens"):
        index.query_tokens(range(65), chain, 4)
    assert [each.worker for each in index.query_tokens(range(65), chain, 4, workers=["four"])] == ["four"]
    index.apply("two sizes", [stored([1], block_size=4, group=0), stored([1], block_size=8, group=1)])
    assert index.query_tokens(range(65), chain, 4, workers=["two sizes"]) == [], "asked in its finest blocks"


def test_what_workers_that_are_gone_had_is_swept():
    index = PrefixIndex()
    for life in range(4):
        index.apply("a", [stored(range(100_000 * life, 100_000 * life + 60_000))])
        index.remove("a")
        assert index.query([100_000 * life]) == []
    assert index.stats.num_dead_blocks <= 120_000
    assert index.stats.num_entries <= 120_000
    index.sweep()
    assert (index.stats.num_entries, index.stats.num_dead_blocks, index.stats.num_workers) == (0, 0, 0)


def test_bits_of_the_gone_are_given_to_others_only_when_nothing_of_them_is_left():
    index = PrefixIndex()
    index.apply("a", [stored([1])])
    index.remove("a")
    index.apply("b", [stored([2])])
    assert told(index, [1]) == {}
    index.sweep()
    index.apply("c", [stored([3])])
    assert (told(index, [1]), told(index, [2]), told(index, [3])) == (
        {},
        {"b": (1, {"device": 1})},
        {"c": (1, {"device": 1})},
    )
