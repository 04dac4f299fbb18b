import pytest
from tests.tiers.services import needs

from kvist.errors import ConfigError
from kvist.tiers.opening import SCHEMES, open_store
from kvist.tiers.protocol import Store, StoreFormat
from kvist.tiers.simulated import SimulatedStore

needs("redis")
needs("obstore")

FORMAT = StoreFormat("a model", block_size=2, block_bytes=(8,))


def a_store(format, timeout_s):
    return SimulatedStore(format, int(timeout_s))


def no_store(format, timeout_s):
    return "no store"


@pytest.mark.parametrize(
    ("place", "kind"),
    [
        ("valkey://127.0.0.1:1/0", "ValkeyStore"),
        ("valkeys://user:word@127.0.0.1:1", "ValkeyStore"),
        ("redis://127.0.0.1?cluster=true&ttl_s=3.5", "ValkeyStore"),
        ("rediss://127.0.0.1?cluster=false", "ValkeyStore"),
        ("s3://bucket/prefix?region=us-east-1&endpoint=http://127.0.0.1:1", "ObjectStore"),
        ("az://container/prefix?account_name=somebody", "ObjectStore"),
        ("gs://bucket/prefix?skip_signature=true", "ObjectStore"),
        ("memory://", "SimulatedStore"),
        ("memory://?capacity_bytes=100", "SimulatedStore"),
        (f"{__name__}:a_store", "SimulatedStore"),
    ],
)
def test_a_place_names_its_store(place, kind):
    store = open_store(place, FORMAT, timeout_s=2.0)
    assert isinstance(store, Store)
    assert type(store).__name__ == kind
    store.close()


def test_a_folder_is_a_store(tmp_path):
    store = open_store(f"file://{tmp_path}/store", FORMAT, timeout_s=60.0)
    assert store.put([(bytes(48), memoryview(b"contents"))]) == 1
    assert store.contains([bytes(48)]) == [True]
    store.close()


def test_settings_reach_the_store():
    assert open_store("memory://?capacity_bytes=100", FORMAT).stats().capacity_bytes == 100
    assert open_store(f"{__name__}:a_store", FORMAT, timeout_s=7.0).stats().capacity_bytes == 7


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("ftp://host", "no store is named by ftp://"),
        ("somewhere", "a store is named by a URL or as package.module:factory, not by 'somewhere'"),
        ("no.such.module:factory", "cannot be imported"),
        (f"{__name__}:no_such_factory", "cannot be imported"),
        (f"{__name__}:no_store", "made str, which lacks some call of the Store protocol"),
        (
            "valkey://host?colour=blue",
            "valkey:// has the settings ttl_s, cluster, ca_file, cert_file, key_file, not colour",
        ),
        ("valkey://host?cluster=maybe", "cluster is 'maybe', but must be true or false"),
        ("valkey://host?ttl_s=0", "ttl_s is '0', but must be a number above 0"),
        ("valkey://host?ttl_s=soon", "ttl_s is 'soon'"),
        ("s3://bucket?colour=blue", "s3://bucket with settings for colour"),
    ],
)
def test_a_place_that_names_none_is_told(place, told):
    with pytest.raises(ConfigError) as caught:
        open_store(place, FORMAT)
    assert told in str(caught.value)


def test_every_scheme_is_in_the_docstring():
    assert all(f"`{scheme}://" in open_store.__doc__ for scheme in SCHEMES)
