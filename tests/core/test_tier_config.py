"""Settings of slower tiers: what can be, and what is refused, all at once and by name."""

from pathlib import Path

import pytest
from tests.core.layers import FULL, sliding, state
from tests.core.small import label

from kvist import AttentionSpec, CacheConfig, ConfigError, DiskTier, HostTier, RemoteTier
from kvist.tier_config import POLICY_NAMES


def configured(*tiers, layers=(FULL,), block_size=2, num_blocks=8, model="m", **options):
    return CacheConfig(list(layers), block_size, num_blocks, tiers=tiers, model=model, **options)


def problems(*tiers, **options):
    with pytest.raises(ConfigError) as caught:
        configured(*tiers, **options).validate()
    return caught.value.problems


def test_host_memory_then_stores_in_any_order_can_be():
    config = configured(HostTier(num_blocks=4), RemoteTier(url="memory://"), DiskTier("a"), DiskTier(Path("b")))
    config.validate()
    assert config.host is config.tiers[0]
    assert config.stores == config.tiers[1:]


def test_no_tiers_are_no_tiers():
    config = configured()
    config.validate()
    assert (config.host, config.stores, config.host_num_blocks) == (None, (), ())


def test_settings_have_defaults_that_keep_everything():
    host, disk, remote = HostTier(), DiskTier("a"), RemoteTier(url="memory://")
    assert (host.policy, host.min_priority, host.min_hits, host.write) == ("priority", 0, 0, "back")
    for store in (disk, remote):
        assert (store.write, store.min_priority, store.min_hits, store.timeout_s) == ("through", 0, 0, 2.0)
    assert (disk.capacity, disk.io) == ("1 GiB", "buffered")


@pytest.mark.parametrize("policy", [*POLICY_NAMES, lambda extent: extent.last_use], ids=label)
def test_host_memory_may_have_any_policy(policy):
    configured(HostTier(num_blocks=4, policy=policy)).validate()


BAD = [
    ((HostTier(num_blocks=4), HostTier(num_blocks=4)), "tiers[1]", "comes first"),
    ((DiskTier("a"), HostTier(num_blocks=4)), "tiers[1]", "comes first"),
    ((HostTier(num_blocks=4, policy="best"),), "tiers[0]", "'best'"),
    ((HostTier(num_blocks=4, policy=7),), "tiers[0]", "callable"),
    ((HostTier(num_blocks=4, min_priority=101),), "tiers[0]", "min_priority is 101"),
    ((HostTier(num_blocks=4, min_priority=-1),), "tiers[0]", "min_priority is -1"),
    ((HostTier(num_blocks=4, min_priority=True),), "tiers[0]", "min_priority is True"),
    ((HostTier(num_blocks=4, min_hits=-1),), "tiers[0]", "min_hits is -1"),
    ((HostTier(num_blocks=4, min_hits=1.5),), "tiers[0]", "min_hits is 1.5"),
    ((HostTier(num_blocks=4, write="behind"),), "tiers[0]", "write is 'behind', must be one of through, back"),
    ((DiskTier("a", min_priority=200),), "tiers[0]", "min_priority"),
    ((DiskTier("a", write="sometimes"),), "tiers[0]", "'sometimes'"),
    ((DiskTier("a", io="mapped"),), "tiers[0]", "io is 'mapped', must be one of buffered, direct"),
    ((DiskTier("a", io=None),), "tiers[0]", "io is None, must be one of buffered, direct"),
    ((DiskTier("a", timeout_s=0),), "tiers[0]", "timeout_s is 0"),
    ((DiskTier("a", timeout_s=float("inf")),), "tiers[0]", "timeout_s is inf"),
    ((DiskTier("a", timeout_s=True),), "tiers[0]", "timeout_s is True"),
    ((DiskTier("a", timeout_s="1"),), "tiers[0]", "timeout_s is '1'"),
    ((DiskTier(""),), "tiers[0]", "directory"),
    ((DiskTier(7),), "tiers[0]", "directory is 7"),
    ((DiskTier("a", "much"),), "tiers[0]", "capacity"),
    ((DiskTier("a", -1),), "tiers[0]", "capacity"),
    ((RemoteTier(url=""),), "tiers[0]", "url"),
    ((RemoteTier(url=7),), "tiers[0]", "url is 7"),
    ((RemoteTier(url="server"),), "tiers[0]", "url is 'server'"),
    (("host",), "tiers[0]", "is a str"),
    ((None,), "tiers[0]", "NoneType"),
]


@pytest.mark.parametrize(("tiers", "name", "what"), BAD, ids=label)
def test_what_cannot_be_is_refused_by_name(tiers, name, what):
    [problem] = problems(*tiers)
    assert name in problem
    assert what in problem


@pytest.mark.parametrize("tiers", ["host", 7, None, {HostTier(num_blocks=1)}], ids=label)
def test_tiers_that_are_no_list_are_refused(tiers):
    with pytest.raises(ConfigError, match="tiers is"):
        CacheConfig([AttentionSpec(1, 1)], 2, 8, tiers=tiers).validate()


def test_all_that_is_wrong_is_told_at_once():
    found = problems(DiskTier("a", "much", write="?"), HostTier(policy="?"), RemoteTier(url="x", timeout_s=-1))
    assert len(found) >= 6


@pytest.mark.parametrize("model", [None, 7, b"m"])
def test_a_model_that_is_no_text_is_refused(model):
    assert any("model is" in problem for problem in problems(model=model))


def test_stores_need_a_model_by_name_and_host_memory_does_not():
    """Content that outlives the process must say what it depends on."""
    configured(HostTier(num_blocks=4), model="").validate()
    for tier in (DiskTier("a"), RemoteTier(url="memory://")):
        [problem] = problems(tier, model="")
        assert "model is empty" in problem


# -- the size of host memory ------------------------------------------------------------------------------------------


def test_host_memory_has_one_number_of_blocks_for_all_groups_or_one_for_each():
    layers = [FULL, sliding(4)]
    assert configured(HostTier(num_blocks=5), layers=layers).host_num_blocks == (5, 5)
    assert configured(HostTier(num_blocks=[5, 3]), layers=layers).host_num_blocks == (5, 3)


def test_groups_that_share_a_pool_share_one_in_host_memory():
    config = configured(HostTier(num_blocks=[5, 3]), layers=[FULL, sliding(4)], shared_pool=True, num_blocks=[8, 8])
    assert config.host_num_blocks == (8,)


def test_bytes_are_shared_out_as_on_the_device():
    layers = [AttentionSpec(2, 64)] * 4
    on_device = CacheConfig(layers, 16, memory="1 MiB")
    in_host = configured(HostTier("1 MiB"), layers=layers, block_size=16)
    assert in_host.host_num_blocks == on_device.pool_num_blocks
    assert configured(HostTier(2**21), layers=layers, block_size=16).host_num_blocks == (
        2 * in_host.host_num_blocks[0],
    )


@pytest.mark.parametrize(
    "tier",
    [HostTier(), HostTier(num_blocks=0), HostTier(num_blocks=-1), HostTier(num_blocks=[1, 2]), HostTier("lots"),
     HostTier("1 MiB", num_blocks=4), HostTier(0), HostTier("1 B")],
    ids=label,
)  # fmt: skip
def test_a_size_that_cannot_be_is_refused_as_host_memorys(tier):
    found = problems(tier)
    assert found
    assert all("HostTier" in problem for problem in found)


# -- what stored content depends on -----------------------------------------------------------------------------------


def test_the_fingerprint_depends_on_model_block_size_and_layers_only():
    first = configured(DiskTier("a"))
    same = [
        configured(RemoteTier(url="memory://"), num_blocks=99, max_sequences=3, policy="lru"),
        configured(HostTier(num_blocks=1), storage_order="block_major", partial_reuse=False),
    ]
    others = [
        configured(model="another"),
        configured(block_size=4),
        configured(layers=[AttentionSpec(1, 1)] * 2),
        configured(layers=[AttentionSpec(1, 2)]),
        configured(layers=[AttentionSpec(1, 1, dtype="float32")]),
        configured(layers=[sliding(4)]),
        configured(layers=[state()]),
    ]
    assert {each.fingerprint for each in same} == {first.fingerprint}
    assert len({each.fingerprint for each in [first, *others]}) == len(others) + 1
    assert len(first.fingerprint) == 32


def test_the_fingerprint_is_the_same_in_every_process():
    config = CacheConfig([AttentionSpec(8, 128, dtype="bfloat16")], 16, 8, model="a/model@main")
    assert config.fingerprint.hex() == "a3721005102522b44845cfd70cbe6da2f0cfa335fec12413ebcc417611ce888e"
