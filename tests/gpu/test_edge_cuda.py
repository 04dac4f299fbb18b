"""Edge-LLM's cache on a CUDA device: contents as on CPU, tables and lengths at one address, no waiting host."""

import pytest
import torch
from tests.edge.models import alike, bits, cache, fill, planes

from kvist.edge import KVPageTable, LayerConfig, SequenceLengths, SparsePageTable

LAYERS = (LayerConfig(4, 64), LayerConfig(2, 128), LayerConfig(4, 64, shares_layer=0))
WINDOWED = (LayerConfig(2, 32), LayerConfig(2, 32, capacity=40))
BATCH, CAPACITY, PAGE_SIZE = 8, 512, 16


def both(layers=LAYERS, **settings):
    """The same cache on CPU and on the device, filled alike."""
    sizes = {"max_batch_size": BATCH, "max_sequence_length": CAPACITY, "page_size": PAGE_SIZE, "max_verify_tokens": 6}
    kept = [cache(layers, num_recurrent=2, device=device, **(sizes | settings)) for device in ("cpu", "cuda")]
    for each in kept:
        fill_alike(each)
    return kept


def fill_alike(kept):
    """Fill pools and states with numbers made on CPU."""
    generator = torch.Generator().manual_seed(0)
    for plane in planes(kept):
        plane.copy_(torch.randn(plane.shape, generator=generator))


def on(kept, *numbers):
    return torch.tensor(numbers, dtype=torch.int32, device=kept.kv.device)


def tokens(kept, num_rows, num_tokens, layer, dtype=torch.float16):
    config = kept.kv.layer_config(layer)
    shape = (num_rows, num_tokens, config.num_kv_heads, config.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(layer)).to(dtype).to(kept.kv.device)


def assert_alike(on_cpu, on_device):
    assert alike(planes(on_cpu), [plane.cpu() for plane in planes(on_device)])
    assert on_device.lengths.tensor.tolist() == on_cpu.lengths.tensor.tolist()
    assert on_device.page_table.device_table.tolist() == on_cpu.page_table.device_table.tolist()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float8_e4m3fn", "float8_e5m2"])
def test_a_step_of_everything_equals_that_on_cpu(dtype):
    pair = both(dtype=dtype)
    for kept in pair:
        kept.page_table.set_rows([(1, [200, 7, 201]), (3, list(range(100, 132)))])
        kept.lengths.reset([0, 20, 45, 100])
        for layer in (0, 1):
            keys = tokens(kept, 4, 30, layer, getattr(torch, dtype))
            kept.write(layer, keys, keys)
        kept.lengths.commit(on(kept, 10, 5, 0, 30))
        kept.accept(on(kept, *[0, 3, 4, 0, 1, 5, 0, 2, 1, 0, 5, 2]).view(4, 3), on(kept, 3, 2, 0, 1))
        kept.restore(kept.capture(3, 50), 5)
    gathered = [[kept.gather(layer, 120) for layer in range(3)] for kept in pair]
    for expected, got in zip(*gathered, strict=True):
        assert alike(expected, [part.cpu() for part in got])
    for kept in pair:
        kept.remap([1, -1, 0, 2], 3)
        kept.page_table.upload()
    assert_alike(*pair)


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
@pytest.mark.parametrize("num_pages", [0, 300])
def test_compaction_equals_that_on_cpu(dtype, num_pages):
    pair = both(dtype=dtype, num_pages=num_pages)
    for kept in pair:
        kept.lengths.reset([0, 511, 5, 20, 300])
        kept.compact(on(kept, -1, 0, -1, 1, 2), 3)
    assert pair[0].lengths.tensor.tolist() == [511, 20, 300]
    assert_alike(*pair)


def test_floats_are_quantized_as_on_cpu():
    pair = both([LayerConfig(4, 64, scales=(1.0, 0.5, 4.0))], dtype="float8_e4m3fn")
    for kept in pair:
        kept.lengths.reset([3, 40])
        keys = 1000 * tokens(kept, 2, 20, 0, torch.bfloat16)
        kept.write(0, keys, keys)
    assert_alike(*pair)


def test_windows_go_through_their_own_table_as_on_cpu():
    pair = both(WINDOWED)
    for kept in pair:
        kept.lengths.reset([35, 60])
        for slot, column, page in ((0, 2, 11), (0, 3, 4), (1, 3, 30)):
            kept.sliding_table.set_entry(slot, column, page)
        keys = tokens(kept, 2, 20, 1)
        kept.write(1, keys, keys)
    expected, got = [kept.gather(1, 80) for kept in pair]
    assert alike(expected, [part.cpu() for part in got])
    assert_alike(*pair)


def test_states_of_drafts_are_accepted_as_on_cpu():
    pair = both()
    for kept in pair:
        kept.states.verify(4, 5)
        for layer in (0, 1):
            for number, plane in enumerate(kept.states.verified(layer)):
                plane.copy_(torch.randn(plane.shape, generator=torch.Generator().manual_seed(number)))
        kept.states.accept(on(kept, 5, 0, 1, 3))
        kept.states.accept_tree(on(kept, *[0, 4, -1, 0, 1, 2, 0, -1, -1, 0, 2, 1]).view(4, 3), on(kept, 2, 0, 2, 3))
    assert_alike(*pair)


def test_a_step_never_makes_the_host_wait():
    _, kept = both()
    kept.lengths.reset([3, 40, 0, 100])
    keys = [tokens(kept, 4, 6, layer) for layer in (0, 1)]
    nodes, accepted = on(kept, *[0, 3, 5] * 4).view(4, 3), on(kept, 3, 1, 0, 2)
    rows = torch.tensor([2, 0], device="cuda")
    kept.states.verify(4, 6)
    step(kept, 8, keys, nodes, accepted, rows)  # the first time, libraries and buffers are set up
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(kept, 9, keys, nodes, accepted, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def step(kept, page, keys, nodes, accepted, rows):
    kept.page_table.set_rows([(0, [5, 6]), (1, [7, page])])
    kept.lengths.reset([3, 20, 0, 100])
    for layer in (0, 1):
        kept.write(layer, keys[layer], keys[layer])
        kept.gather(layer, 64)
    kept.accept(nodes, accepted)
    kept.lengths.commit(1)
    kept.states.accept_tree(nodes, accepted)
    kept.page_table.gather_rows(rows)


def test_uploads_in_a_row_arrive_in_order_while_the_stream_is_busy():
    table = KVPageTable(BATCH, 32, 4096, device="cuda")
    address, seen = table.device_table.data_ptr(), []
    busy = torch.randn(2048, 2048, device="cuda")
    for turn in range(50):
        busy = busy @ busy.T / 2048
        table.set_row(turn % BATCH, [turn, turn + 1])
        assert table.upload()
        seen.append((table.device_table.clone(), table.host.copy()))
    assert table.device_table.data_ptr() == address
    assert all((got.cpu().numpy() == expected).all() for got, expected in seen)


def test_a_sparse_table_arrives_entry_by_entry():
    table = SparsePageTable(BATCH, 32, 4096, device="cuda")
    for turn in range(40):
        table.set_entry(turn % BATCH, turn % 32, turn)
        table.clear_entry((turn + 3) % BATCH, (turn + 1) % 32)
        table.upload()
    assert (table.device_table.cpu().numpy() == table.host).all()


def test_a_captured_graph_sees_what_is_uploaded_and_committed_later():
    table, lengths = KVPageTable(2, 4, 16, device="cuda"), SequenceLengths(2, 64, device="cuda")
    table.set_identity()
    table.upload()
    lengths.reset([1, 2])
    read = torch.empty_like(table.device_table)
    counts = torch.empty_like(lengths.tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        read.copy_(table.device_table)
        counts.copy_(lengths.tensor)
    table.set_row(1, [9, 3])
    table.upload()
    lengths.commit(5)
    graph.replay()
    assert (read.cpu().numpy() == table.host).all()
    assert counts.tolist() == [6, 7]


def test_a_prefix_saved_on_the_device_is_restored_on_cpu_and_back():
    on_cpu, on_device = both(dtype="float8_e4m3fn")
    fill(on_cpu, seed=1)
    on_device.restore(on_cpu.capture(2, 77), 4)
    on_cpu.restore(on_device.capture(4, 77), 6)
    for layer in (0, 1):
        slots = on_cpu.slots(layer)
        assert torch.equal(bits(slots[:, 6, :77]), bits(slots[:, 2, :77]))
