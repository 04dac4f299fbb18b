"""ValkeyStore on a real cluster of three servers, of which one is paused, killed, replaced, or loses slots."""

from contextlib import ExitStack, contextmanager
from functools import partial

import pytest
from tests.tiers.remote import FORMAT, PATIENT, entries, found
from tests.tiers.services import Valkey, free_port, needs, running

from kvist.errors import TransferError
from kvist.testing.stores import StoreSuite, key_of
from kvist.tiers.breaker import CircuitBreaker
from kvist.tiers.guard import GuardedStore

needs("redis")

from kvist.tiers import valkey_servers  # noqa: E402
from kvist.tiers.valkey import ValkeyStore  # noqa: E402

KEYS = [key_of(number) for number in range(64)]
SLOTS = ((0, 5460), (5461, 10922), (10923, 16383))


class Node(Valkey):
    """A server of a cluster, which never gives up on the others, and serves what it has when they are gone."""

    def __init__(self, folder):
        self.bus_port = free_port()
        options = ["--cluster-enabled", "yes", "--cluster-port", str(self.bus_port), "--cluster-node-timeout", "60000"]
        super().__init__(folder, *options, "--cluster-require-full-coverage", "no", "--repl-diskless-sync-delay", "0")

    def ask(self, *command):
        with self.client() as client:
            return client.execute_command(*command)

    def meet(self, other):
        self.ask("CLUSTER MEET", "127.0.0.1", other.port, other.bus_port)

    def knows(self, num_nodes):
        """Whether it knows so many, and that every slot has one that serves it."""
        with self.client() as client:
            state = client.cluster("INFO")
            assigned = (state["cluster_state"], state["cluster_slots_assigned"]) == ("ok", "16384")
            return assigned and len(client.cluster("NODES")) == num_nodes


def until(is_so):
    while not is_so():
        pass  # the servers tell each other, a few times a second


def joined(nodes):
    """Make a cluster of three servers, which share its slots."""
    for node, slots in zip(nodes, SLOTS, strict=True):
        node.ask("CLUSTER ADDSLOTSRANGE", *slots)
        node.meet(nodes[0])
    until(lambda: all(node.knows(3) for node in nodes))
    return nodes


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with ExitStack() as stack:
        yield joined([stack.enter_context(running(Node(tmp_path_factory.mktemp("node")))) for _ in SLOTS])


@pytest.fixture
def nodes(tmp_path_factory):
    with ExitStack() as stack:
        yield joined([stack.enter_context(running(Node(tmp_path_factory.mktemp("node")))) for _ in SLOTS])


def opened(nodes, timeout_s=PATIENT):
    return ValkeyStore(nodes[0].url, FORMAT, timeout_s=timeout_s, cluster=True)


def kept_by(node):
    """Say of each key whether a node has it."""
    with node.client() as client:
        names = {name.rpartition(b":")[2] for name in client.scan_iter(f"*:{FORMAT.fingerprint.hex()[:16]}:*")}
    return [key[16:].hex().encode() in names for key in KEYS]


def filled(store, node):
    """Put all contents, and say which of them one node does not have."""
    store.drop(b"")
    assert store.put(entries(KEYS)) == 64
    return [not is_kept for is_kept in kept_by(node)]


@contextmanager
def stopped(node):
    node.pause()
    try:
        yield
    finally:
        node.resume()


class TestValkeyCluster(StoreSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, shared):
        self.nodes = shared

    def open_store(self, format, place):
        return ValkeyStore(self.nodes[0].url, format, timeout_s=PATIENT, cluster=True)

    def damage(self, store, key, change):
        for node in self.nodes:
            with node.client() as client:
                for name in client.keys(f"kvist:*:{key[:16].hex()}:{key[16:].hex()}"):
                    client.set(name, change(client.get(name)))
        return True

    def test_entries_are_spread_over_all_nodes(self, tmp_path):
        store = self.opened(tmp_path)
        self.put(store, KEYS)
        for node in self.nodes:
            with node.client() as client:
                assert 10 < client.dbsize() < 34
        store.close()


def test_a_stopped_node_costs_half_the_time_limit_once_and_what_it_has(shared):
    """A call waits for it once, and not for each of its keys, so that a guard with the same limit gets the others."""
    store = opened(shared, timeout_s=2.0)
    there = filled(store, shared[1])
    guarded = GuardedStore(store, timeout_s=2.0)
    with stopped(shared[1]):
        assert found(guarded, KEYS) == there
        assert store.stats().num_timeouts == 1
        assert found(guarded, KEYS) == guarded.contains(KEYS) == there
        assert store.put(entries(KEYS)) == sum(there)
        assert store.stats().num_timeouts == 1  # it was asked no more
        assert (guarded.stats().num_timeouts, guarded.stats().num_errors) == (0, 0)
    guarded.close()


def test_a_node_that_answers_again_is_asked_again(shared, monkeypatch):
    monkeypatch.setattr(valkey_servers, "CircuitBreaker", partial(CircuitBreaker, retry_s=0))
    store = opened(shared, timeout_s=0.4)
    there = filled(opened(shared), shared[1])
    with stopped(shared[1]):
        for _ in range(2):
            assert not any(
                is_found and not is_there for is_found, is_there in zip(found(store, KEYS), there, strict=True)
            )
    assert store.stats().num_timeouts >= 2
    while found(store, KEYS) != [True] * 64:
        pass
    store.close()


def test_slots_that_have_moved_are_followed(shared):
    store = opened(shared)
    filled(store, shared[2])  # it knows the slots by now
    for node in shared:
        node.ask("FLUSHALL")
    there = shared[2].ask("CLUSTER MYID")
    for node in (shared[2], *shared[:2]):
        with node.client() as client, client.pipeline(transaction=False) as pipe:
            for slot in range(*SLOTS[0], 2):
                pipe.execute_command("CLUSTER SETSLOT", slot, "NODE", there)
            pipe.execute()
    assert store.put(entries(KEYS)) == 64
    assert found(store, KEYS) == [True] * 64
    assert sum(kept_by(shared[2])) > 1.5 * sum(kept_by(shared[0]))
    assert (store.stats().num_errors, store.stats().num_refused) == (0, 0)
    store.close()


def test_a_killed_node_costs_what_it_has_and_all_of_them_are_an_error(nodes):
    store = opened(nodes)
    there = filled(store, nodes[0])  # the one that the URL names
    nodes[0].kill()
    assert found(store, KEYS) == store.contains(KEYS) == there
    assert store.put(entries(KEYS)) == sum(there)
    stats = store.stats()
    assert (stats.num_errors, stats.num_refused, stats.num_corrupt) == (3, 64 - sum(there), 0)
    with pytest.raises(TransferError, match="has failed, and is not asked for some time"):
        store.drop(KEYS[0][:16])
    assert found(store, KEYS) == [False] * 64  # the others have dropped it
    for node in nodes[1:]:
        node.kill()
    with pytest.raises(TransferError):
        found(store, KEYS)
    store.close()


def test_a_replica_that_takes_over_is_asked_from_then_on(nodes, tmp_path):
    with running(Node(tmp_path)) as replica:
        replica.meet(nodes[0])
        until(lambda: all(node.knows(4) for node in (*nodes, replica)))
        replica.ask("CLUSTER REPLICATE", nodes[1].ask("CLUSTER MYID"))
        store = opened(nodes)
        filled(store, nodes[1])
        until(lambda: kept_by(replica) == kept_by(nodes[1]))
        nodes[1].kill()
        replica.ask("CLUSTER FAILOVER", "TAKEOVER")
        until(lambda: all(str(replica.port) in str(node.ask("CLUSTER SLOTS")) for node in (nodes[0], nodes[2])))
        found(store, KEYS)  # the old one fails, and another is asked who has its keys
        assert found(store, KEYS) == [True] * 64
        store.close()
