"""Trees of drafts: the accepted nodes move to their places in the sequence, and nothing else does."""

import itertools
from contextlib import suppress

import numpy as np
import pytest
from tests.core.layers import CROSS, FULL, grouped, hit, sliding, state, tables
from tests.core.small import computed, refused, small

from kvist import ArgumentError, CacheConfig, KVCacheManager, SequenceError, TransferError
from kvist.testing import FaultyMemory


class Slots:
    """What lies in every slot of every group, by block and offset; moves are made as a memory would."""

    def __init__(self, manager):
        self.manager = manager
        self.block_size = manager.config.block_size
        self.at = {}

    def write(self, sequence, position, content):
        for group in own_groups(self.manager):
            block = int(sequence.group_blocks(group)[position // self.block_size])
            self.at[group, block, position % self.block_size] = content

    def perform(self):
        for move in self.manager.take_moves():
            rows = [self.at.get((move.group, move.source, move.source_offset + n)) for n in range(move.num_tokens)]
            for n, row in enumerate(rows):
                self.at[move.group, move.destination, move.destination_offset + n] = row

    def read(self, sequence, group, start):
        blocks = sequence.group_blocks(group).tolist()
        return [
            self.at.get((group, blocks[position // self.block_size], position % self.block_size))
            for position in range(start, sequence.num_computed_tokens)
        ]


def own_groups(manager):
    """The groups that keep the sequence's own tokens."""
    return [index for index, group in enumerate(manager.config.groups) if group.kind != "cross"]


def verified(manager, sequence, nodes, num_nodes):
    """Let one forward pass write a tree of drafts, and accept some of its nodes; what is then in their places."""
    slots, start = Slots(manager), sequence.num_computed_tokens
    num_pending = sequence.num_tokens - start
    manager.reserve([sequence], max(num_nodes - num_pending, 0))
    for node in range(num_nodes):
        slots.write(sequence, start + node, f"node {node}")
    pending = sequence.tokens[start:].tolist()
    tokens = pending + [100 + node for node in nodes[len(pending) :]]
    manager.accept(sequence, tokens, nodes)
    slots.perform()
    assert sequence.tokens[start:].tolist() == tokens
    assert (sequence.num_computed_tokens, sequence.num_tokens) == (start + len(nodes), start + len(nodes))
    return [slots.read(sequence, group, start) for group in own_groups(manager)]


@pytest.mark.parametrize("block_size", [1, 2, 4])
@pytest.mark.parametrize("num_before", [1, 2, 3, 4, 5])
def test_every_choice_of_nodes_ends_in_its_places(block_size, num_before):
    for length in range(1, 6):
        for nodes in itertools.combinations(range(5), length):
            manager = small(block_size=block_size, num_blocks=16)
            sequence = computed(manager, range(num_before))
            assert verified(manager, sequence, list(nodes), 5) == [[f"node {node}" for node in nodes]]
            manager.check()


@pytest.mark.parametrize("layers", [[FULL, sliding(3)], [sliding(5, 2)], [FULL, sliding(1), CROSS]])
def test_nodes_move_in_every_group_of_the_sequences_own_tokens(layers):
    manager = grouped(layers, block_size=2)
    sequence = computed(manager, range(7))
    assert verified(manager, sequence, [0, 2, 3], 4) == [["node 0", "node 2", "node 3"]] * len(own_groups(manager))
    manager.check()


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ([0, 3, 4], [(1, 3, 1, 1, 1), (2, 0, 1, 2, 1)]),
        ([0, 4, 5], [(2, 0, 1, 1, 2)]),
        ([2, 3, 5], [(1, 2, 1, 0, 2), (2, 1, 1, 2, 1)]),
        ([0, 2, 3, 5], [(1, 2, 1, 1, 1), (1, 3, 1, 2, 1), (2, 1, 1, 3, 1)]),
    ],
)
def test_neighbours_move_together_unless_they_would_be_written_over_and_what_is_in_its_place_stays(nodes, expected):
    manager = small(block_size=4)
    sequence = computed(manager, range(4))
    manager.reserve([sequence], 8)
    manager.accept(sequence, range(10, 10 + len(nodes)), nodes)
    moves = [
        (move.source, move.source_offset, move.destination, move.destination_offset, move.num_tokens)
        for move in manager.take_moves()
    ]
    assert moves == expected
    assert manager.take_moves() == []


@pytest.mark.parametrize("num_made", range(4))
def test_a_memory_that_fails_late_is_asked_again_for_no_token_that_was_written_over(num_made):
    config = CacheConfig([FULL], block_size=4, num_blocks=3)
    memory = FaultyMemory(config)
    manager = memory.attach(KVCacheManager(config, memory))
    sequence = manager.add_sequence([0])
    memory.write(sequence)
    manager.commit([sequence])
    manager.reserve([sequence], 4)
    memory.write_tree(sequence, [1, 2, 3], tokens=[0, 5, 6, 7])
    memory.fail_next(after=num_made)
    with suppress(TransferError):
        manager.accept(sequence, [5, 6, 7], [1, 2, 3])
    memory.work_again()
    manager.evict(0)
    memory.verify(sequence)


def test_nodes_that_are_in_their_places_need_no_move():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.reserve([sequence], 3)
    manager.accept(sequence, [4, 5, 6], [0, 1, 2])
    assert manager.take_moves() == []
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert hit(manager, [1, 2, 3, 4, 5, 6, 7]) == 6


def test_the_root_may_have_been_appended_already():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.append([sequence], [4])
    assert verified(manager, sequence, [0, 3], 4) == [["node 0", "node 3"]]
    assert sequence.tokens.tolist() == [1, 2, 3, 4, 103]


def test_accepted_tokens_are_published_like_others():
    manager = small(num_blocks=16)
    sequence = computed(manager, [1, 2, 3])
    manager.reserve([sequence], 5)
    manager.accept(sequence, [7, 8, 9], [1, 2, 4])
    manager.free(sequence)
    assert hit(manager, [1, 2, 3, 7, 8, 9, 5]) == 6
    manager.check()


def test_blocks_of_windows_that_the_accepted_tokens_leave_behind_go_back():
    manager = grouped([FULL, sliding(2)], block_size=2)
    sequence = computed(manager, range(4))
    manager.reserve([sequence], 6)
    manager.accept(sequence, [50, 51, 52, 53], [0, 2, 4, 5])
    assert [block >= 0 for block in tables(manager, sequence)[1]] == [False, False, False, True, True]


def test_accepting_again_goes_on_behind_what_was_accepted():
    manager = small(num_blocks=16)
    sequence = computed(manager, [1, 2, 3])
    for _ in range(3):
        verified(manager, sequence, [1, 3], 4)
        manager.check()
    assert sequence.tokens.tolist() == [1, 2, 3, *[101, 103] * 3]


def test_a_fork_is_not_touched_by_what_its_parent_accepts():
    manager = small(num_blocks=16)
    parent = computed(manager, [1, 2, 3])
    (child,) = manager.fork(parent)
    before = child.block_ids.tolist()
    manager.take_moves()
    verified(manager, parent, [2, 3], 4)
    assert child.block_ids.tolist() == before
    assert child.tokens.tolist() == [1, 2, 3]
    manager.check()


@pytest.mark.parametrize(
    ("tokens", "nodes", "part"),
    [
        ([7], [0, 1], "1 tokens, but nodes of shape (2,)"),
        ([], [], "0 tokens"),
        ([7, 8], [1, 1], "must increase"),
        ([7, 8], [2, 1], "must increase"),
        ([7], [-1], "must increase"),
        ([7, 8], [[0], [1]], "nodes of shape (2, 1)"),
        ([7.5], [0], "tokens"),
        ([7], [0.5], "nodes"),
    ],
)
def test_nodes_that_cannot_be_are_refused(tokens, nodes, part):
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.reserve([sequence], 4)
    with refused(manager, ArgumentError, part):
        manager.accept(sequence, tokens, nodes)


def test_a_node_beyond_the_capacity_is_refused():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    with refused(manager, SequenceError, "node 1 is at position 4, capacity is 4"):
        manager.accept(sequence, [7, 8], [0, 1])


def test_tokens_that_are_not_those_of_the_sequence_are_refused():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.append([sequence], [[4, 5]])
    manager.reserve([sequence], 3)
    for tokens, nodes in (([9, 5], [0, 1]), ([4], [0])):
        with refused(manager, SequenceError, "goes on with [4, 5]"):
            manager.accept(sequence, tokens, nodes)


def test_a_state_cannot_be_taken_from_the_middle_of_a_forward_pass():
    manager = grouped([FULL, state()], block_size=2)
    sequence = computed(manager, [1, 2, 3])
    manager.reserve([sequence], 4)
    with refused(manager, SequenceError, "recurrent state"):
        manager.accept(sequence, [4], [0])


def test_a_leader_whose_beams_wait_accepts_nothing():
    manager = small()
    leader = manager.add_sequence([1, 2, 3], num_beams=2)
    manager.reserve([leader], 2)
    with refused(manager, SequenceError, "1 beams wait"):
        manager.accept(leader, [1, 2, 3, 4], [0, 1, 2, 3])
    with refused(manager, SequenceError, "is a beam that waits"):
        manager.accept(leader.beams[1], [1, 2, 3], [0, 1, 2])


def test_nodes_may_be_arrays_of_any_int():
    manager = small()
    sequence = computed(manager, [1, 2, 3])
    manager.reserve([sequence], 3)
    manager.accept(sequence, np.array([7, 8], np.int64), np.array([0, 2], np.uint8))
    assert sequence.tokens.tolist() == [1, 2, 3, 7, 8]
