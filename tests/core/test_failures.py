"""Copies that a memory says it has not made: what they were to bring is a miss, and never wrong contents."""

import random

import pytest
from tests.core.layers import FULL, sliding, state

from kvist import CacheConfig, HostTier, KVCacheManager, RemoteTier, TransferError
from kvist.core.moves import Move
from kvist.testing import FAULTY_URL, FaultyMemory, TokenMemory, faulty_stores
from kvist.testing.token_memory import NOTHING


class NotCopied(TransferError):
    """Names the moves that were not made."""

    def __init__(self, moves):
        super().__init__(f"{len(moves)} copies failed")
        self.moves = moves


def within(move):
    return move.source_tier == move.destination_tier


def between(move):
    return not within(move)


class LosingMemory(TokenMemory):
    """Loses each copy that `loses` says; what would read a lost block is lost, too, and all others are made."""

    def __init__(self, config, loses=lambda move: False):
        super().__init__(config)
        self.loses, self.lost, self.untold = loses, set(), []

    def perform(self, moves, *, late=False):
        failed, self.untold = self.untold, []
        for move in list(moves):
            written = (move.destination_tier, move.group, move.destination)
            if (move.source_tier, move.group, move.source) in self.lost or self.loses(move):
                failed.append(move)
                self.lost |= set() if within(move) and move.source == move.destination else {written}
                begin, slots = move.destination_offset, self.group_slots(move.group, move.destination_tier)
                slots[move.destination, begin : begin + move.num_tokens] = NOTHING
            else:
                super().perform([move], late=True)
                self.lost.discard(written)
        if failed:
            raise NotCopied(failed)

    def forget(self, moves):
        self.lost -= {(move.destination_tier, move.group, move.destination) for move in moves}


def losing(layers=(FULL,), num_blocks=4, num_host_blocks=8, write="back", kind=LosingMemory, **settings):
    settings = {"max_sequences": 8, "max_sequence_length": 64} | settings
    tiers = [HostTier(num_blocks=num_host_blocks, write=write)]
    config = CacheConfig(list(layers), 2, num_blocks, tiers=tiers, **settings)
    memory = kind(config)
    return memory.attach(KVCacheManager(config, memory)), memory


def leave(manager, memory, tokens):
    sequence = manager.add_sequence(tokens)
    memory.verify(sequence)
    while (missing := sequence.num_tokens - sequence.num_computed_tokens) > 0:
        end = sequence.num_computed_tokens + manager.chunk_limit(sequence, missing)
        memory.write(sequence, stop=end)
        manager.commit([sequence], end)
    manager.free(sequence)
    return sequence.num_cached_tokens


def test_what_could_not_go_down_is_a_miss_and_said_once():
    manager, memory = losing()
    leave(manager, memory, range(6))
    memory.loses = lambda move: move.source == 1
    with pytest.raises(TransferError, match="could not make 1 copies"):
        manager.evict(3)
    memory.loses = lambda move: False
    manager.check()
    assert manager.match_prefix([*range(6), 9]).num_tokens == 2
    assert leave(manager, memory, [*range(6), 9]) == 2
    assert leave(manager, memory, [*range(6), 9]) == 6


def test_what_could_not_come_up_is_a_miss_and_its_blocks_are_free():
    manager, memory = losing()
    leave(manager, memory, range(6))
    manager.evict(3)
    memory.loses = lambda move: move.source_tier == "host"
    with pytest.raises(TransferError) as raised:
        manager.add_sequence([*range(6), 9])
    assert raised.value.sequences == ()
    memory.loses = lambda move: False
    manager.check()
    assert manager.num_free_blocks == 4
    assert manager.stats().num_sequences == 0
    assert leave(manager, memory, [*range(6), 9]) == 0
    assert leave(manager, memory, [*range(6), 9]) == 6


def test_a_sequence_whose_blocks_are_found_to_be_lost_later_is_suspended_and_computes_them_again():
    manager, memory = losing(num_blocks=8)
    leave(manager, memory, range(6))
    manager.evict(3)
    sequence = manager.add_sequence([*range(6), 9])
    leave(manager, memory, [20, 21, 22])
    block = sequence.group_blocks(0).item(1)
    memory.untold, memory.lost = [Move(1, block, 2, 0, "host", "device")], {("device", 0, block)}
    with pytest.raises(TransferError, match="suspended, since they had what is lost") as raised:
        manager.evict(2)
    assert raised.value.sequences == (sequence,)
    assert not sequence.is_live
    manager.check()
    assert manager.match_prefix([*range(6), 9]).num_tokens == 2
    assert manager.resume(sequence) == 4
    assert (sequence.num_tokens, sequence.num_computed_tokens) == (7, 2)
    memory.write(sequence)
    manager.commit([sequence])
    manager.free(sequence)
    assert leave(manager, memory, [*range(6), 9, 10]) == 7


def test_the_end_of_a_sequence_says_who_was_suspended_by_the_copies_that_it_had_made(monkeypatch):
    manager, memory = losing(num_blocks=8, write="through")
    leave(manager, memory, range(6))
    manager.evict(3)
    sequence, other = manager.add_sequence([*range(6), 9]), manager.add_sequence([20, 21, 22])
    block = sequence.group_blocks(0).item(1)
    memory.write(other)
    with monkeypatch.context() as broken, pytest.raises(TransferError, match="bus"):
        broken.setattr(memory, "perform", lambda moves: (_ for _ in ()).throw(OSError("bus")))
        manager.commit([other])
    memory.untold, memory.lost = [Move(1, block, 2, 0, "host", "device")], {("device", 0, block)}
    with pytest.raises(TransferError) as raised:
        manager.free(other)
    assert raised.value.sequences == (sequence,)
    assert not other.is_live
    manager.check()


@pytest.mark.parametrize("num_beams", [1, 2])
def test_a_state_that_could_not_be_copied_is_not_found_though_its_block_was_published_in_the_same_call(num_beams):
    """The next chunk is computed before the next call: by then the copy would be of another state."""
    manager, memory = losing([FULL, state(2)], num_blocks=16, num_host_blocks=16, write="through", kind=FaultyMemory)
    sequence = manager.add_sequence(range(4), num_beams=num_beams)
    for end in (2, 4):
        memory.write(sequence, stop=end)
        memory.fail_next(times=end // 2)
        with pytest.raises(TransferError):
            manager.commit([sequence], end)
        memory.work_again()
        manager.check()
    manager.evict(0)
    manager.append([sequence], [[9]])
    memory.write(sequence)
    manager.commit([sequence])
    assert leave(manager, memory, [0, 1, 7]) == 0


def test_an_accepted_token_that_could_not_move_moves_before_another_takes_its_place():
    manager, memory = losing(num_blocks=8)
    sequence = manager.add_sequence([1, 2])
    memory.write(sequence)
    manager.commit([sequence])
    manager.reserve([sequence], 7)
    memory.write_tree(sequence, [1, 3, 6], tokens=[1, 2, 5, 6, 7])
    memory.loses = lambda move: move.destination_offset == 1
    with pytest.raises(TransferError):
        manager.accept(sequence, [5, 6, 7], [1, 3, 6])
    memory.loses = lambda move: False
    manager.evict(0)
    memory.verify(sequence)


def test_what_is_written_through_of_accepted_tokens_comes_after_the_tokens_that_could_not_move_at_once():
    manager, memory = losing(num_blocks=8, write="through", kind=FaultyMemory)
    sequence = manager.add_sequence([1])
    memory.write(sequence)
    manager.commit([sequence])
    manager.reserve([sequence], 7)
    memory.write_tree(sequence, [2], tokens=[1, 5])
    memory.fail_next()
    with pytest.raises(TransferError):
        manager.accept(sequence, [5], [2])
    memory.work_again()
    assert manager.stats().tiers[0].num_copied_blocks == 1
    manager.evict(0)
    memory.verify(sequence)
    manager.free(sequence)
    manager.evict(1)
    again = manager.add_sequence([1, 5, 6])
    memory.verify(again)
    assert again.num_cached_tokens == 2


def test_a_copy_made_again_leaves_what_was_copied_behind_it_in_its_block():
    manager, memory = losing(num_blocks=8)
    sequence = manager.add_sequence([1, 2])
    memory.write(sequence)
    manager.commit([sequence])
    manager.reserve([sequence], 7)
    memory.write_tree(sequence, [2, 5], tokens=[1, 2, 5, 6])
    memory.loses = lambda move: move.destination_offset == 0
    with pytest.raises(TransferError):
        manager.accept(sequence, [5, 6], [2, 5])
    memory.loses = lambda move: False
    manager.evict(0)
    memory.verify(sequence)


class ToldLate(TokenMemory):
    """Does not make the copies of its first `perform`, and says so in the next, whose own it makes."""

    untold = None

    def perform(self, moves, *, late=False):
        if self.untold is None:
            self.untold = list(moves)
            return
        told, self.untold = self.untold, []
        super().perform(moves, late=True)
        if told:
            raise NotCopied(told)


def test_a_move_inside_a_block_that_is_told_late_is_not_taken_for_another_one_there():
    config = CacheConfig([FULL], 4, 8)
    memory = ToldLate(config)
    manager = memory.attach(KVCacheManager(config, memory))
    sequence = manager.add_sequence([1])
    memory.write(sequence)
    manager.commit([sequence])
    manager.reserve([sequence], 3)
    memory.write_tree(sequence, [1, 2], tokens=[1, 5, 6])
    with pytest.raises(TransferError) as raised:
        manager.accept(sequence, [5, 6], [1, 2])
    assert raised.value.sequences == (sequence,)
    assert not manager.take_moves()
    manager.resume(sequence)
    memory.write(sequence)
    memory.verify(sequence)
    manager.check()


def test_copies_that_a_reset_forgets_are_told_to_the_memory():
    manager, memory = losing(num_blocks=8)
    sequence = manager.add_sequence(range(6))
    memory.write(sequence)
    manager.commit([sequence])
    manager.stats()
    memory.loses = within
    with pytest.raises(TransferError):
        manager.rewind(sequence, 3)
    assert memory.lost
    memory.loses = lambda move: False
    manager.free(sequence)
    manager.reset()
    assert not memory.lost


def test_what_was_said_not_to_be_made_before_all_failed_is_told_when_it_is_given_up():
    class Failing(LosingMemory):
        def perform(self, moves, *, late=False):
            moves = list(moves)
            if self.loses is within and any(map(between, moves)):
                raise OSError("the bus")
            super().perform(moves, late=late)

    with faulty_stores():
        tiers = [HostTier(num_blocks=8, write="through"), RemoteTier(url=FAULTY_URL)]
        config = CacheConfig([FULL, state(2)], 2, 8, tiers=tiers, model="a model")
        memory = Failing(config)
        manager = memory.attach(KVCacheManager(config, memory))
        sequence = manager.add_sequence([1, 2])
        memory.write(sequence)
        memory.loses = within
        with pytest.raises(TransferError, match="bus"):
            manager.commit([sequence])
        memory.loses = lambda move: False
        manager.evict(0)
        assert not memory.lost
        manager.check()


def test_what_was_copied_from_what_is_found_to_be_lost_is_lost_though_it_has_been_published():
    manager, memory = losing(num_blocks=8)
    leave(manager, memory, range(4))
    manager.evict(2)
    manager.prefetch([*range(4), 9])
    sequence = manager.add_sequence([0, 1, 2, 9, 9])
    source = next(extent for extent in manager._state.tree.extents() if not extent.children).blocks.item(0, -1)
    copy = sequence.group_blocks(0).item(1)
    memory.write(sequence)
    manager.commit([sequence])
    manager.stats()
    memory.untold = [Move(1, source, 2, 0, "host", "device"), Move(source, copy, 1)]
    memory.lost = {("device", 0, source), ("device", 0, copy)}
    memory.slots[[source, copy]] = NOTHING
    with pytest.raises(TransferError) as raised:
        manager.evict(1)
    assert raised.value.sequences == (sequence,)
    manager.check()
    assert leave(manager, memory, [0, 1, 2, 9, 9]) == 2


def test_a_fork_whose_copy_of_a_ring_is_found_to_be_lost_is_suspended():
    """The ring has wrapped: what is the fork's own there comes before what is published."""
    manager, memory = losing([FULL, sliding(5)], num_blocks=16, ring=True, max_beams=2)
    sequence = manager.add_sequence(range(12))
    memory.write(sequence)
    manager.commit([sequence])
    ordered = []
    memory.loses = lambda move: ordered.append(move) or False
    [child] = manager.fork(sequence)
    memory.loses = lambda move: False
    leave(manager, memory, [20, 21])
    move = next(move for move in ordered if move.group == 1)
    memory.untold, memory.lost = [move], {("device", 1, move.destination)}
    with pytest.raises(TransferError) as raised:
        manager.evict(1)
    assert raised.value.sequences == (child,)
    manager.check()
    memory.verify(sequence)


def test_a_leader_whose_blocks_are_lost_is_suspended_with_its_tokens_and_waits_for_nobody_when_it_is_resumed():
    manager, memory = losing(num_blocks=12)
    leave(manager, memory, range(6))
    manager.evict(3)
    leader, beam = manager.add_sequence([*range(6), 9], num_beams=2).beams
    manager.append([leader], [[10, 11]])
    block = leader.group_blocks(0).item(1)
    memory.untold, memory.lost = [Move(1, block, 2, 0, "host", "device")], {("device", 0, block)}
    leave(manager, memory, [20, 21])
    with pytest.raises(TransferError) as raised:
        manager.evict(2)
    assert set(raised.value.sequences) == {leader, beam}
    manager.check()
    manager.free(beam)
    manager.resume(leader)
    assert leader.tokens.tolist() == [*range(6), 9, 10, 11]
    assert leader.leader is None
    memory.write(leader)
    manager.commit([leader])
    manager.free(leader)
    manager.check()
    assert manager.num_free_blocks == 12


def test_new_sequences_of_a_forecast_have_ended_if_a_later_step_of_it_fails():
    manager, memory = losing(num_blocks=4)
    leave(manager, memory, range(6))
    forecast = manager.forecast()
    forecast.add([50, 51], num_beams=1)
    forecast.add(range(60, 64))
    memory.loses = between
    with pytest.raises(TransferError) as raised:
        manager.perform(forecast)
    memory.loses = lambda move: False
    assert raised.value.sequences == ()
    manager.check()
    assert (manager.stats().num_sequences, manager.num_free_blocks) == (0, 4)


def test_copies_that_others_wait_for_do_not_hide_what_a_new_sequence_has_lost():
    """Copies of others wait when it ends, and fail late for a third: what was lost first is lost as well."""
    manager, memory = losing(num_blocks=16, num_host_blocks=16, write="through")
    for tokens in (range(6), range(20, 26)):
        leave(manager, memory, tokens)
    manager.evict(6)
    third, second = manager.add_sequence([*range(20, 26), 9]), manager.add_sequence(range(40, 44))
    memory.write(second)
    manager.commit([second])
    memory.loses = within
    with pytest.raises(TransferError):
        manager.rewind(second, 1)
    block = third.group_blocks(0).item(1)

    def loses(move):
        if between(move):
            memory.untold = [Move(9, block, 2, 0, "host", "device")]
        return True

    memory.loses = loses
    with pytest.raises(TransferError):
        manager.add_sequence([*range(6), 9])
    memory.loses = lambda move: False
    while manager._state.moves:
        manager.evict(0)
    manager.check()
    assert leave(manager, memory, [*range(6), 9]) == 6


@pytest.mark.parametrize("write", ["back", "through"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("layers", [[FULL], [FULL, sliding(4)], [FULL, state(2)]], ids=["full", "window", "state"])
def test_no_content_is_ever_wrong_and_the_books_are_right_whatever_copies_fail(layers, seed, write):
    chance = random.Random(seed)
    manager, memory = losing(layers, num_blocks=9, num_host_blocks=10, write=write, partial_reuse=seed % 2 == 0)
    memory.loses = lambda move: between(move) and chance.random() < 0.2
    num_hit = num_failed = 0
    for _ in range(150):
        tokens = [chance.randrange(2) for _ in range(chance.randrange(2, 11))]
        try:
            num_hit += leave(manager, memory, [*tokens, 9])
            if chance.random() < 0.3:
                manager.evict(chance.randrange(1, 6))
        except TransferError:
            num_failed += 1
        for sequence in manager._state.rows.running():
            manager.free(sequence, publish=False)
        for sequence in list(manager._state.suspended):
            manager.free(sequence)
        manager.check()
    assert num_hit > 50
    assert num_failed > 5
