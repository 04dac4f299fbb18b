import pytest
import torch
from tests.edge.models import recurrent_config

from kvist.edge import RecurrentConfig, RecurrentStates
from kvist.edge.mappings import survivors_of
from kvist.errors import ArgumentError, ConfigError, LayoutError


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def kept_planes(states):
    layers = range(states.num_layers)
    return [plane for layer in layers for plane in (states.recurrent(layer), states.conv(layer))]


def filled(num_layers=2, max_batch_size=3, **settings):
    states = RecurrentStates(recurrent_config(num_layers, max_batch_size, **settings))
    for number, plane in enumerate(kept_planes(states)):
        plane.copy_(torch.arange(plane.numel()).view(plane.shape) + 100 * number)
    return states


def drafted(num_active=3, num_tokens=4, **settings):
    states = filled(max_verify_tokens=6, **settings)
    states.verify(num_active, num_tokens)
    for layer in range(states.num_layers):
        for plane in states.verified(layer):
            plane.copy_(torch.randn(plane.shape, generator=torch.Generator().manual_seed(layer)))
    return states


def test_states_are_zeros_of_their_own_dtypes_at_first():
    states = RecurrentStates(recurrent_config(2, 3, dtype="float32", conv_dtype="bfloat16"))
    for layer in (0, 1):
        assert states.recurrent(layer).shape == (3, 2, 3, 4)
        assert states.recurrent(layer).dtype == torch.float32
        assert states.conv(layer).shape == (3, 5, 6)
        assert states.conv(layer).dtype == torch.bfloat16
    assert not any(plane.any() for plane in kept_planes(states))


def test_E15_two_layers_keep_216_bytes_of_each_slot():
    states = RecurrentStates(recurrent_config(2, 3))
    assert sum(plane[0].nbytes for plane in kept_planes(states)) == 216
    assert sum(plane.nbytes for plane in kept_planes(states)) == 3 * states.config.slot_bytes


def test_no_recurrent_layers_have_no_states():
    states = RecurrentStates(RecurrentConfig())
    assert states.num_layers == 0
    states.clear()
    with pytest.raises(ArgumentError, match=r"layer must be in \[0, 0\)"):
        states.recurrent(0)
    with pytest.raises(ConfigError):
        RecurrentStates(RecurrentConfig(1))


def test_one_slot_or_all_are_cleared():
    states = filled()
    states.clear(1)
    assert all(not plane[1].any() and plane[2].any() for plane in kept_planes(states))
    states.clear()
    assert not any(plane.any() for plane in kept_planes(states))
    with pytest.raises(ArgumentError):
        states.clear(3)


def test_captured_states_are_copies_that_can_be_restored_to_any_slot():
    states = filled()
    recurrent, conv = states.capture(2)
    assert [tuple(state.shape) for state in recurrent] == [(1, 2, 3, 4)] * 2
    assert [tuple(state.shape) for state in conv] == [(1, 5, 6)] * 2
    states.clear()
    states.restore(recurrent, conv, 0)
    assert all(torch.equal(states.recurrent(layer)[0], recurrent[layer][0]) for layer in (0, 1))
    assert all(torch.equal(states.conv(layer)[0], conv[layer][0]) for layer in (0, 1))
    assert not any(plane[1:].any() for plane in kept_planes(states))


def test_states_of_another_model_are_not_restored():
    states, before = filled(), [plane.clone() for plane in kept_planes(filled())]
    recurrent, conv = states.capture(0)
    wrong = [(recurrent[:1], conv), (conv, recurrent), ([state.float() for state in recurrent], conv)]
    for saved in wrong:
        with pytest.raises(LayoutError, match="states are"):
            states.restore(*saved, 1)
    with pytest.raises(ArgumentError):
        states.restore(recurrent, conv, 3)
    assert all(torch.equal(*pair) for pair in zip(kept_planes(states), before, strict=True))


def test_rows_that_go_on_take_their_states_along():
    states, before = filled(), [plane.clone() for plane in kept_planes(filled())]
    states.compact(survivors_of([1, -1, 0], 2, 3))
    assert all(torch.equal(plane[:2], old[[2, 0]]) for plane, old in zip(kept_planes(states), before, strict=True))


def test_a_verification_has_any_shape_that_there_is_room_for():
    states = filled(max_verify_tokens=6)
    recurrent, conv = states.verified(1)
    assert recurrent.shape == (3, 6, 2, 3, 4)
    assert conv.shape == (3, 6, 5, 6)
    address = recurrent.data_ptr()
    states.verify(2, 5)
    recurrent, conv = states.verified(1)
    assert recurrent.shape == (2, 5, 2, 3, 4)
    assert recurrent.is_contiguous()
    assert recurrent.data_ptr() == address
    for asked in ((4, 1), (1, 7), (-1, 1)):
        with pytest.raises(ArgumentError):
            states.verify(*asked)
    assert states.verified(0)[0].shape[:2] == (2, 5)


def test_a_row_goes_on_from_the_state_after_its_last_accepted_token():
    states = drafted()
    before = [plane.clone() for plane in kept_planes(states)]
    states.accept(ints(4, 0, 1))
    verified = [plane for layer in (0, 1) for plane in states.verified(layer)]
    for plane, old, drafts in zip(kept_planes(states), before, verified, strict=True):
        assert torch.equal(plane[0], drafts[0, 3])
        assert torch.equal(plane[1], old[1])
        assert torch.equal(plane[2], drafts[2, 0])


def test_a_row_goes_on_from_the_state_of_the_last_node_of_its_path():
    states = drafted()
    before = [plane.clone() for plane in kept_planes(states)]
    states.accept_tree(ints(0, 3, -1, 0, 1, 2, 0, -1, -1).view(3, 3), ints(2, 0, 2))
    verified = [plane for layer in (0, 1) for plane in states.verified(layer)]
    for plane, old, drafts in zip(kept_planes(states), before, verified, strict=True):
        assert torch.equal(plane[0], drafts[0, 3])
        assert torch.equal(plane[1:], old[1:])  # none accepted, and a node that is none


def test_a_smaller_batch_leaves_the_other_slots():
    states = drafted(num_active=2)
    before = states.recurrent(0)[2].clone()
    states.accept(ints(1, 2))
    assert torch.equal(states.recurrent(0)[2], before)
    assert torch.equal(states.recurrent(0)[1], states.verified(0)[0][1, 1])


def test_what_was_not_verified_is_not_accepted():
    states = drafted()
    before = [plane.clone() for plane in kept_planes(states)]
    acts = [
        lambda: states.accept(ints(1, 2)),
        lambda: states.accept(ints(1, 2, 5)),
        lambda: states.accept(ints(1, 2, -1)),
        lambda: states.accept_tree(ints(0, 1, 2), ints(1, 1, 1)),
        lambda: states.accept_tree(ints(0, 1, 2, 3).view(2, 2), ints(1, 1, 1)),
        lambda: states.accept_tree(ints(0, 4, 0).view(3, 1), ints(1, 1, 1)),
    ]
    for act in acts:
        with pytest.raises(ArgumentError):
            act()
    assert all(torch.equal(*pair) for pair in zip(kept_planes(states), before, strict=True))


def test_without_room_for_drafts_nothing_is_accepted():
    states = filled()
    states.accept(ints(0, 0, 0))
    with pytest.raises(ArgumentError):
        states.accept(ints(1, 0, 0))
