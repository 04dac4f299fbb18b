"""What is written, and where: in the places given only, without tokens or names, and each tenant's apart."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.services import S3, Valkey, needs, running
from tests.tiers.test_stored import PATIENT, Bytes, configured

from kvist import DiskTier, HostTier, RemoteTier

TOKENS = [0x41424344, 0x45464748, 0x494A4B4C, 0x4D4E4F50, 0x51525354, 0x55565758, 0x595A6162, 0x63646566]
"""Ids that would be seen in any byte order."""
TENANT = ("tenant-of-ours", "salt-of-theirs", 0x6A6B6C6D)

PROGRAM = """
import sys

given = sys.argv[1:3]
written = set()

def note(event, arguments):  # by absolute path; what is opened below a directory that is open has no path here
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & 3 and isinstance(arguments[0], str):
        written.add(arguments[0])

import numpy as np
from kvist import AttentionSpec, CacheConfig, DiskTier, HostTier, KVCacheManager, RemoteTier, StateSpec
from kvist.memory import TorchMemory
from kvist.tiers import disk, objects, opening, stack

sys.addaudithook(note)
layers = [AttentionSpec(1, 4), AttentionSpec(1, 4, sliding_window=5), StateSpec([(3,)], "float32", 4)]
tiers = [HostTier(num_blocks=3, write="through"), DiskTier(given[0], "1 MiB"), RemoteTier("file://" + given[1])]
config = CacheConfig(layers, 4, [6, 6, 6], tiers=tiers, model="m", max_sequence_length=64, event_buffer=100)
for turn in range(2):
    with KVCacheManager(config, TorchMemory(config)) as manager:
        for first in (0, 100, 0):
            sequence = manager.add_sequence(range(first, first + 20))
            manager.commit([sequence])
            manager.suspend(sequence)
            manager.evict(4)
            manager.resume(sequence)
            manager.commit([sequence])
            manager.free(sequence)
        assert manager.flush(60.0)
        manager.drop(namespace=("another",))
        assert sum(stats.num_entries for stats in manager.store_stats().values()) > 0
elsewhere = [path for path in written if path.startswith("/") and not path.startswith((*given, "/dev/"))]
assert not elsewhere, elsewhere
"""


def tree(folder):
    """All that is in a folder, as paths."""
    return {path.relative_to(folder).as_posix() for path in Path(folder).rglob("*")}


def test_nothing_is_written_outside_the_directories_given(tmp_path):
    """With a home, a working directory and a place for temporary files that would be seen to change."""
    needs("obstore")
    places = {name: tmp_path / name for name in ("home", "work", "temporary", "disk", "shared")}
    for place in places.values():
        place.mkdir()
    names = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME"), str(places["home"]))
    names |= dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(places["temporary"]))
    path = os.pathsep.join(str(Path(each).resolve()) for each in sys.path if each)
    command = [sys.executable, "-B", "-c", PROGRAM, str(places["disk"]), str(places["shared"])]
    subprocess.run(command, cwd=places["work"], env=os.environ | names | {"PYTHONPATH": path}, check=True)
    assert [tree(places[name]) for name in ("home", "work", "temporary")] == [set(), set(), set()]
    assert tree(tmp_path) - {f"disk/{each}" for each in tree(places["disk"])} == {
        *places,
        *(f"shared/{each}" for each in tree(places["shared"])),
    }
    assert tree(places["disk"])
    assert tree(places["shared"])


def secrets():
    """What must be nowhere: four tokens in a row in any byte order or as text, and the parts of a namespace."""
    ids = np.array(TOKENS[:4])
    packed = [ids.astype(kind).tobytes() for kind in ("<i4", ">i4", "<i8", ">i8")]
    names = [str(part).encode() for part in TENANT] + [int(TENANT[2]).to_bytes(4, order) for order in ("little", "big")]
    return [*packed, *(separator.join(map(str, TOKENS[:4])).encode() for separator in (" ", ",", ", ")), *names]


def assert_no_secrets(name, contents):
    assert [secret for secret in secrets() if secret in name + b"|" + contents] == []


def test_neither_keys_nor_values_of_a_valkey_server_nor_files_hold_tokens_or_names(tmp_path):
    needs("redis")
    with running(Valkey(tmp_path)) as server, server.client() as client:
        disk = DiskTier(tmp_path / "blocks", "1 MiB", timeout_s=PATIENT)
        machine = Bytes(configured(HostTier(num_blocks=2), disk, RemoteTier(server.url, timeout_s=PATIENT)))
        machine.leave(TOKENS, TENANT)
        machine.manager.close()
        keys = list(client.scan_iter())
        assert len(keys) >= 4
        for key in keys:
            assert_no_secrets(key, client.dump(key) + (client.get(key) if client.type(key) == b"string" else b""))
    files = [path for path in (tmp_path / "blocks").rglob("*") if path.is_file()]
    assert files
    for path in files:
        assert_no_secrets(path.relative_to(tmp_path).as_posix().encode(), path.read_bytes())


def test_what_would_be_a_secret_is_seen():
    with pytest.raises(AssertionError):
        assert_no_secrets(b"key", np.array(TOKENS, "<i4").tobytes())
    with pytest.raises(AssertionError):
        assert_no_secrets(b"a/salt-of-theirs", b"")


@pytest.fixture(params=["disk", "folder", "valkey", "s3"])
def store(request, tmp_path, monkeypatch):
    """Each kind of store that tenants may share."""
    if request.param == "disk":
        yield DiskTier(tmp_path / "blocks", "1 MiB", timeout_s=PATIENT)
    elif request.param == "folder":
        needs("obstore")
        yield RemoteTier(f"file://{tmp_path / 'shared'}", timeout_s=PATIENT)
    elif request.param == "valkey":
        needs("redis")
        with running(Valkey(tmp_path)) as server:
            yield RemoteTier(server.url, timeout_s=PATIENT)
    else:
        needs("obstore")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "anybody")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a secret")
        with running(S3()) as server:
            server.make_bucket("bucket")
            yield RemoteTier(server.url("bucket"), timeout_s=PATIENT)


def test_a_namespaces_salt_keeps_tenants_apart_in_every_store(store):
    """Each finds its own only, after a restart, too; and what one forgets, the other still has."""
    ours, theirs, prompt = ("tenant", "salt 1"), ("tenant", "salt 2"), [*TOKENS, 1, 2]
    machine = Bytes(configured(store))
    assert machine.leave(TOKENS, ours) == 0
    machine.manager.evict(12)
    assert machine.leave(prompt, theirs) == 0
    assert machine.leave(prompt, ours) == 8
    machine.manager.close()
    machine = Bytes(machine.manager.config, machine.written)
    for other in ((), ("tenant",), ("tenant", "salt 3"), ("tenant", b"salt 1"), ("tenantsalt 1",)):
        assert machine.leave(prompt, other) == 0
    machine.manager.drop(namespace=theirs)
    machine.manager.evict(12)
    assert machine.leave([*prompt, 3, 4], ours) == 10
    assert machine.leave([*prompt, 3, 4], theirs) == 0
    machine.manager.close()
