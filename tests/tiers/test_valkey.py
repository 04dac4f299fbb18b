"""ValkeyStore and GuardedStore against real servers, which are paused, killed, filled and restarted."""

import pytest
from tests.tiers.remote import FORMAT, PATIENT, entries, found
from tests.tiers.services import Valkey, needs, running

from kvist.errors import ArgumentError, TransferError
from kvist.testing.stores import StoreSuite, key_of

needs("redis")

from kvist.tiers.valkey import ValkeyStore  # noqa: E402

KEYS = [key_of(number) for number in range(100)]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with running(Valkey(tmp_path_factory.mktemp("valkey"))) as server:
        yield server


@pytest.fixture
def server(tmp_path):
    with running(Valkey(tmp_path)) as server:
        yield server


class TestValkey(StoreSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, shared):
        self.server = shared

    def open_store(self, format, place):
        return ValkeyStore(self.server.url, format, timeout_s=PATIENT)

    def damage(self, store, key, change):
        with self.server.client() as client:
            (name,) = client.keys(f"kvist:*:{key[:16].hex()}:{key[16:].hex()}")
            client.set(name, change(client.get(name)))
        return True


def test_two_machines_share_one_server(shared):
    stores = [ValkeyStore(shared.url, FORMAT, timeout_s=PATIENT) for _ in range(2)]
    stores[0].put(entries(KEYS[:5]))
    assert found(stores[1], KEYS[:6]) == [True] * 5 + [False]
    stores[1].drop(KEYS[0][:16])
    assert found(stores[0], KEYS[:6]) == [False] * 6
    for store in stores:
        store.close()


def test_keys_name_format_and_namespace_and_no_token(shared):
    store = ValkeyStore(shared.url, FORMAT, timeout_s=PATIENT)
    store.put(entries(KEYS[:1]))
    with shared.client() as client:
        name = f"kvist:{FORMAT.fingerprint.hex()[:16]}:{b'namespace number'.hex()}:{KEYS[0][16:].hex()}"
        assert client.exists(name) == 1
        assert client.ttl(name) == -1
    store.close()


def test_entries_live_as_long_as_was_said(shared):
    store = ValkeyStore(shared.url, FORMAT, timeout_s=PATIENT, ttl_s=1000)
    store.put(entries(KEYS[1:2]))
    with shared.client() as client:
        (name,) = client.keys(f"*{KEYS[1][16:].hex()}")
        assert 900 < client.ttl(name) <= 1000
    store.close()


def test_what_others_have_put_under_our_keys_is_a_miss_and_removed(shared):
    store = ValkeyStore(shared.url, FORMAT, timeout_s=PATIENT)
    store.put(entries(KEYS[:3]))
    with shared.client() as client:
        names = [client.keys(f"kvist:*:{key[16:].hex()}")[0] for key in KEYS[:2]]
        client.delete(*names)
        client.lpush(names[0], "a list")
        client.set(names[1], "")
    assert found(store, KEYS[:3]) == [False, False, True]
    assert store.stats().num_corrupt == 2
    assert store.contains(KEYS[:3]) == [False, False, True]
    assert store.put(entries(KEYS[:2])) == 2
    assert found(store, KEYS[:3]) == [True] * 3
    store.close()


def test_what_a_full_server_refuses_is_counted_and_the_rest_comes_back(tmp_path):
    with running(Valkey(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction")) as server:
        store = ValkeyStore(server.url, FORMAT, timeout_s=PATIENT)
        keys = [key_of(number) for number in range(4000)]
        num_put = sum(store.put(entries(keys[at : at + 100])) for at in range(0, 4000, 100))
        stats = store.stats()
        assert 0 < num_put < 4000
        assert (stats.num_put, stats.num_refused, stats.num_errors) == (num_put, 4000 - num_put, 0)
        assert sum(found(store, keys)) == num_put
        store.drop(b"")
        assert store.put(entries(keys[:100])) == 100
        store.close()


def test_what_a_full_server_evicts_is_a_miss(tmp_path):
    with running(Valkey(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru")) as server:
        store = ValkeyStore(server.url, FORMAT, timeout_s=PATIENT)
        keys = [key_of(number) for number in range(4000)]
        assert sum(store.put(entries(keys[at : at + 100])) for at in range(0, 4000, 100)) == 4000
        assert 0 < sum(found(store, keys)) < 4000
        store.close()


def test_a_stopped_server_costs_the_time_limit_and_no_more(server):
    store = ValkeyStore(server.url, FORMAT, timeout_s=0.05)
    patient = ValkeyStore(server.url, FORMAT, timeout_s=PATIENT)
    patient.put(entries(KEYS[:3]))
    server.pause()
    for act in (lambda: found(store, KEYS[:3]), lambda: store.contains(KEYS[:3]), lambda: store.put(entries(KEYS[:3]))):
        with pytest.raises(TimeoutError, match="no answer from the server in time"):
            act()  # returns while the server is still stopped
    with pytest.raises(TimeoutError):
        store.drop(b"")
    assert store.stats().num_timeouts == 4
    server.resume()
    assert found(patient, KEYS[:3]) == [True] * 3
    patient.close()
    store.close()


def test_a_killed_server_is_an_error_and_a_restarted_one_serves_the_same_store(server):
    store = ValkeyStore(server.url, FORMAT, timeout_s=PATIENT)
    store.put(entries(KEYS[:3]))
    server.kill()
    with pytest.raises(TransferError):
        found(store, KEYS[:3])
    assert store.stats().num_errors == 1
    server.start()
    assert found(store, KEYS[:3]) == [False] * 3
    assert store.put(entries(KEYS[:3])) == 3
    assert found(store, KEYS[:3]) == [True] * 3
    store.close()


def test_a_server_that_is_not_there_is_no_error_before_the_first_call():
    for cluster in (False, True):
        store = ValkeyStore("valkey://127.0.0.1:1", FORMAT, timeout_s=PATIENT, cluster=cluster)
        with pytest.raises(TransferError):
            store.contains(KEYS[:1])
        store.close()


def test_what_does_not_fit_the_format_is_refused_before_anything_is_put(shared):
    store = ValkeyStore(shared.url, FORMAT, timeout_s=PATIENT)
    store.drop(b"")
    with pytest.raises(ArgumentError):
        store.put([*entries(KEYS[:1]), (KEYS[1], memoryview(bytes(999)))])
    assert store.contains(KEYS[:1]) == [False]
    store.close()


def test_of_a_value_that_others_have_made_too_long_no_more_is_read_than_tells_so(server):
    store = ValkeyStore(server.url, FORMAT, timeout_s=PATIENT)
    store.put(entries(KEYS[:2]))
    with server.client() as client:
        (name,) = client.keys(f"kvist:*:{KEYS[0][16:].hex()}")
        client.append(name, bytes(20_000_000))
        before = client.info("stats")["total_net_output_bytes"]
        assert found(store, KEYS[:2]) == [False, True]
        assert client.info("stats")["total_net_output_bytes"] - before < 100_000
        assert not client.exists(name)
    store.close()
