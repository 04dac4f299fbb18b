"""T14, T15: copies under way, ended in every order: nothing is read too early, written too soon, or kept half."""

from random import Random

import pytest
from tests.torture.arenas import KV, WINDOW, Arena
from tests.torture.rig import PATIENT, again, opened

from kvist import OutOfBlocks

LAYERS = {"full": (KV,), "with a window": (KV, WINDOW)}


class RunAhead:
    """An engine that queues passes without waiting for any; `live` are its sequences, at most 3."""

    def __init__(self, arena, chance):
        self.arena, self.chance, self.live = arena, chance, []
        self.acts = [self.admit] * 5 + [self.grow] * 2 + [self.end] * 3 + [self.evict, self.prefetch]

    def step(self):
        try:
            self.chance.choice(self.acts)()
        except OutOfBlocks:
            self.arena.manager.free(self.live.pop())
        complete_some(self.arena, self.chance)
        self.arena.manager.check()

    def prompt(self):
        return [self.chance.randrange(2)] * self.chance.randint(1, 9)

    def admit(self):
        if len(self.live) < 3:
            self.live.append(self.arena.serve(self.prompt()))

    def grow(self):
        if self.live:
            one = self.chance.choice(self.live)
            self.arena.manager.append([one], [[self.chance.randrange(2)]])
            self.arena.read(one)
            self.arena.compute(one)

    def end(self):
        if self.live:
            self.arena.manager.free(self.live.pop(self.chance.randrange(len(self.live))))

    def evict(self):
        self.arena.manager.evict(self.chance.randrange(1, 4))

    def prefetch(self):
        self.arena.manager.prefetch(self.prompt())


def complete_some(arena, chance, most=4):
    """Let a few copies and passes end, of whatever stream."""
    for _ in range(chance.randrange(most)):
        if ready := arena.device.ready:
            arena.device.complete(chance.choice(ready))


@pytest.mark.parametrize("order", ["layer_major", "block_major"])
@pytest.mark.parametrize("layers", LAYERS)
@pytest.mark.parametrize("seed", range(6))
def test_B131_B133_B134_B137_B138_B139_B141_whatever_order_copies_end_in_each_pass_reads_its_own(seed, layers, order):
    """On 6 blocks and 4 of host memory: blocks go down, come up, and change hands while copies are under way."""
    engine = RunAhead(arena := Arena(LAYERS[layers], storage_order=order), chance := Random(seed))
    for _ in range(80):
        engine.step()
    for one in engine.live:
        arena.read(one)
    arena.finish(chance)
    stats = arena.manager.stats()
    assert arena.promises > 20
    assert min(stats.tiers[0].num_demoted_blocks, stats.tiers[0].num_promoted_blocks) > 0


@pytest.mark.parametrize("seed", range(8))
def test_B131_two_blocks_that_go_down_to_one_place_leave_the_second_there(seed):
    """One block of host memory: each block evicted takes the place of the one before, whose copy may not have ended."""
    arena, chance = Arena(num_blocks=4, num_host_blocks=1), Random(seed)
    for number in range(6):
        arena.manager.free(arena.serve([number, number, 9]))
        arena.manager.evict(4)
        complete_some(arena, chance, most=3)
    assert arena.admit([5, 5, 9]).num_cached_tokens == 2
    arena.finish(chance)


@pytest.mark.parametrize("seed", range(8))
def test_B015_B119_B138_B139_a_full_device_and_a_full_host_change_places_again_and_again(seed):
    """2 blocks each, all cached: what comes up sends down what it replaces, into the place that it left or another."""
    arena, chance = Arena(num_blocks=3, num_host_blocks=2), Random(seed)
    for turn in range(12):
        number = turn % 2
        sequence = arena.serve([number] * 4 + [9])
        arena.read(sequence)
        arena.manager.free(sequence, publish=bool(chance.randrange(2)))
        stats = arena.manager.stats().tiers[0]
        assert 0 <= stats.num_free_blocks <= stats.num_blocks
        arena.manager.check()
        complete_some(arena, chance, most=5)
    arena.finish(chance)


def test_B137_B030_what_is_stored_is_what_was_there_when_it_was_handed_over():
    """The store takes its time; the blocks have long been given to others, and rewritten."""
    with opened("full", "store", num_blocks=6) as rig:
        rig.stores[0].hold("put")
        for number in range(8):
            rig.leave([number] * 8 + [9])
            rig.manager.evict(6)
        assert not rig.manager.flush(0.0)
        rig.stores[0].release()
        assert rig.manager.flush(PATIENT)
        fresh = again(rig)
        for number in range(8):
            assert fresh.leave([number] * 8 + [9]) == 8
        fresh.close()


@pytest.mark.parametrize("groups", ["full", "sliding", "mixed"])
def test_B137_B143_a_block_that_cannot_be_read_for_a_store_is_not_stored_and_nothing_else_fails(groups):
    with opened(groups, "store", False, num_blocks=20) as rig:
        rig.memory.fail_reads(2)
        rig.leave(range(17))
        rig.send_down()
        fresh = again(rig)
        assert fresh.leave(range(17)) in (0, 4, 8, 12, 16)
        rig.leave([*range(17), 5])
        rig.send_down()
        fresh.close()
        rig.require_all_back()


@pytest.mark.parametrize("groups", ["full", "sliding", "mixed"])
@pytest.mark.parametrize("times", [1, 2, 5])
def test_B146_B077_blocks_that_could_not_be_filled_from_a_store_are_computed(groups, times):
    """The filling stops half-way: nobody finds the half, and the blocks come back."""
    with opened(groups, "store", False, num_blocks=20) as rig:
        rig.leave(range(17))
        rig.send_down()
        rig.memory.fail_writes(times)
        for _ in range(times + 1):
            sequence = rig.serve(range(17))
            rig.memory.verify(sequence)
            rig.free(sequence, publish=False)
            rig.manager.drop(namespace=("nobody",))
        rig.require_all_back()
