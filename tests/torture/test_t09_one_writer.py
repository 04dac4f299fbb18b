"""T09: a block that is written has one owner: tails are copied where forks, beams and partial hits part ways."""

from random import Random

from tests.torture.over import EVERYWHERE, over, without_groups


@over(EVERYWHERE)
def test_B043_B081_copies_of_a_half_filled_tail_each_read_their_own(rig):
    first = rig.serve(range(10))
    copies = [first, *rig.manager.fork(first, 2)]
    for step in range(6):
        rig.decode(copies, [[100 * number + step] for number in range(3)])
        for one in copies:
            rig.memory.verify(one)
    rig.free(first)
    for one in copies[1:]:
        rig.decode([one], [[7]])
        rig.memory.verify(one)
        rig.free(one)
    rig.require_all_back()


@over(EVERYWHERE)
def test_B081_two_that_begin_with_the_same_half_block_part_ways_in_it(rig):
    rig.leave(range(10))
    both = [rig.serve([*range(10), 50]), rig.serve([*range(10), 60])]
    for step in range(5):
        rig.decode(both, [[step], [step + 10]])
        for one in both:
            rig.memory.verify(one)
    for one in both:
        rig.free(one)
    rig.free(rig.serve([*range(10), 50, 0, 1]))
    rig.require_all_back()


@over(without_groups(EVERYWHERE, "cross"), num_blocks=40)
def test_B082_B083_B239_beams_that_are_reordered_at_random_read_what_they_went_on_from(rig):
    """Against plain lists of tokens, over 12 steps, then once more over what was left in the cache."""
    for seed in range(3):
        chance = Random(seed)
        leader = rig.add(range(10), num_beams=4)
        rig.compute(leader)
        beams = list(leader.beams)
        texts = [list(range(10)) for _ in beams]
        for step in range(12):
            parents = [chance.randrange(4) for _ in beams]
            rig.manager.reorder(beams, parents)
            rig.check()
            texts = [[*texts[parent], 100 * number + step] for number, parent in enumerate(parents)]
            rig.decode(beams, [[text[-1]] for text in texts])
            for beam, text in zip(beams, texts, strict=True):
                assert beam.tokens.tolist() == text
                rig.memory.verify(beam)
        for beam in beams:
            rig.free(beam)
        rig.require_all_back()


@over(without_groups(EVERYWHERE, "cross", "ring"), num_blocks=24)
def test_B083_four_beams_of_ten_tokens_share_two_blocks(rig):
    leader = rig.add(range(10), num_beams=4)
    rig.compute(leader)
    beams = list(leader.beams)
    tables = [beam.group_blocks(0).tolist() for beam in beams]
    if rig.manager.config.groups[0].kind == "full":
        assert len({tuple(table[:2]) for table in tables}) == 1
        assert len({table[2] for table in tables}) == 4
    assert rig.manager.match_prefix([*range(10), 99]).num_tokens <= 8
    for beam in beams:
        rig.free(beam)
    rig.require_all_back()


@over(EVERYWHERE)
def test_B042_content_that_two_computed_is_kept_once_and_both_read_on(rig):
    both = [rig.add(range(13), reuse=False), rig.add(range(13), reuse=False)]
    for one in both:
        rig.compute(one)
    rig.manager.stats()
    for one in both:
        rig.memory.verify(one)
        rig.decode([one], [[7 + both.index(one)]])
        rig.memory.verify(one)
    third = rig.serve([*range(13), 99])
    rig.free(both[0])
    rig.manager.evict(rig.manager.num_blocks)
    for one in (both[1], third):
        rig.memory.verify(one)
        rig.free(one)
    rig.require_all_back()
