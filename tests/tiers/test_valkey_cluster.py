import pytest
from tests.tiers.services import Valkey, free_port, needs, running

from kvist.testing.stores import StoreSuite, key_of

needs("redis")

from kvist.tiers.valkey import ValkeyStore  # noqa: E402


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two servers that share the slots of a cluster."""
    ports = [free_port() for _ in range(2)]
    first, second = (node(tmp_path_factory.mktemp("node"), port) for port in ports)
    with running(first), running(second):
        join(first, second, ports[1])
        yield first, second


def node(folder, bus_port):
    options = ["--cluster-enabled", "yes", "--cluster-node-timeout", "60000", "--cluster-port", str(bus_port)]
    return Valkey(folder, *options)


def join(first, second, bus_port):
    with first.client() as one, second.client() as two:
        one.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8191)
        two.execute_command("CLUSTER ADDSLOTSRANGE", 8192, 16383)
        one.execute_command("CLUSTER MEET", "127.0.0.1", second.port, bus_port)
        while not all(is_whole(client) for client in (one, two)):
            pass  # the servers tell each other, a few times a second


def is_whole(client):
    nodes, state = client.cluster("NODES"), client.cluster("INFO")
    return len(nodes) == 2 and state["cluster_state"] == "ok"


class TestValkeyCluster(StoreSuite):
    @pytest.fixture(autouse=True)
    def _serve(self, nodes):
        self.nodes = nodes

    def open_store(self, format, place):
        return ValkeyStore(self.nodes[0].url, format, timeout_s=60, cluster=True)

    def test_entries_are_spread_over_all_nodes(self, tmp_path):
        store = self.opened(tmp_path)
        self.put(store, [key_of(number) for number in range(64)])
        for node in self.nodes:
            with node.client() as client:
                assert 10 < client.dbsize() < 54
        store.close()
