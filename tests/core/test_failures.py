"""Copies that a memory says it has not made: what they were to bring is a miss, and never wrong contents."""

import random

import pytest
from tests.core.layers import FULL, sliding, state

from kvist import CacheConfig, HostTier, KVCacheManager, TransferError
from kvist.core.moves import Move
from kvist.testing import FaultyMemory, TokenMemory
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
