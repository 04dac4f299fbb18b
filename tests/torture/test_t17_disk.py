"""T17: a disk that fails, fills up, loses and garbles files, under a manager: fewer hits, no wrong slot, no error."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from tests.torture.disks import PATIENT, disk

from kvist import AttentionSpec, CacheConfig, DiskTier, KVCacheManager
from kvist.testing import Fault, FaultyFiles, Prefixes, TokenMemory

ROOT = Path(__file__).resolve().parents[2]


class Life:
    """One life of a process: a manager, an oracle whose numbers mean the same in all lives, and what was found."""

    def __init__(self, tier, prefixes, num_blocks=16):
        config = CacheConfig(
            [AttentionSpec(1, 1)], 4, num_blocks, max_sequences=4, max_sequence_length=64, partial_reuse=False,
            tiers=[tier], model="a model@1",
        )  # fmt: skip
        self.memory = TokenMemory(config)
        self.memory.prefixes = prefixes
        self.manager = self.memory.attach(KVCacheManager(config, self.memory))

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.manager.close()

    def leave(self, tokens):
        sequence = self.manager.add_sequence(tokens)
        self.memory.verify(sequence)
        self.memory.write(sequence)
        self.manager.commit([sequence])
        self.manager.free(sequence)
        self.manager.check()
        return sequence.num_cached_tokens

    def leave_all(self, numbers):
        found = [self.leave([number] * 8 + [9]) for number in numbers]
        assert self.manager.flush(PATIENT)
        return found


OPERATIONS = ("write", "read", "open", "open_direct", "create", "allocate", "sync", "sync_names", "rename", "remove")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ENOENT])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_B150_B153_whatever_a_file_system_refuses_each_prompt_reads_its_own(tmp_path, operation, number):
    """From the 3rd such call on, 5 times; then it works again, and after a restart as well."""
    prefixes = Prefixes()
    files = FaultyFiles(Fault(operation, number, skip=3, times=5))
    with disk(tmp_path / "cache", files) as (tier, _), Life(tier, prefixes) as life:
        for _ in range(3):
            life.leave_all(range(6))
    with disk(tmp_path / "cache") as (tier, _), Life(tier, prefixes) as life:
        life.leave_all(range(6))
    with disk(tmp_path / "cache") as (tier, _), Life(tier, prefixes) as life:
        assert life.leave_all(range(6)) == [8] * 6


@pytest.mark.parametrize("short", [0, 1, 31, 100])
@pytest.mark.parametrize("operation", ["write", "read"])
def test_B151_short_writes_and_reads_are_gone_on_with_or_a_miss(tmp_path, operation, short):
    prefixes = Prefixes()
    files = FaultyFiles(Fault(operation, short=short, skip=2, times=6))
    with disk(tmp_path / "cache", files) as (tier, _), Life(tier, prefixes) as life:
        for _ in range(2):
            life.leave_all(range(6))
    with disk(tmp_path / "cache") as (tier, _), Life(tier, prefixes) as life:
        life.leave_all(range(6))


def truncated(path, size):
    os.truncate(path, min(size, path.stat().st_size))


DAMAGES = {
    "gone": lambda path, chance: path.unlink(),
    "empty": lambda path, chance: truncated(path, 0),
    "one byte": lambda path, chance: truncated(path, 1),
    "a byte short": lambda path, chance: truncated(path, max(path.stat().st_size - 1, 0)),
    "half": lambda path, chance: truncated(path, path.stat().st_size // 2),
    "zeros": lambda path, chance: path.write_bytes(bytes(path.stat().st_size)),
    "noise": lambda path, chance: path.write_bytes(chance.randbytes(path.stat().st_size)),
    "a flipped byte": lambda path, chance: flipped(path, chance),
    "longer": lambda path, chance: path.write_bytes(path.read_bytes() + bytes(5000)),
}


def flipped(path, chance):
    content = bytearray(path.read_bytes())
    if content:
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize("while_open", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_B149_B150_B153_each_file_of_a_cache_may_be_harmed_in_any_way(tmp_path, damage, while_open):
    chance, prefixes = Random(damage), Prefixes()
    directory = tmp_path / "cache"
    tier = DiskTier(directory, "1 MiB", timeout_s=PATIENT)
    with Life(tier, prefixes) as life:
        life.leave_all(range(6))
    for path in sorted(each for each in directory.iterdir() if each.is_file()):
        if while_open:
            with Life(tier, prefixes) as life:
                DAMAGES[damage](path, chance)
                life.leave_all(range(6))
                life.leave_all(range(6))
        elif path.exists():
            DAMAGES[damage](path, chance)
        with Life(tier, prefixes) as life:
            life.leave_all(range(6))


def test_B165_B166_a_full_directory_keeps_what_is_new_and_the_beginnings_of_prompts(tmp_path):
    prefixes = Prefixes()
    with Life(DiskTier(tmp_path / "cache", "80 KiB", timeout_s=PATIENT), prefixes) as life:
        for number in range(300):
            life.leave_all([number])
        stats = life.manager.store_stats()["disk"]
        assert stats.num_evicted > 0
        assert stats.num_bytes <= 80 * 1024
    with Life(DiskTier(tmp_path / "cache", "80 KiB", timeout_s=PATIENT), prefixes) as life:
        assert life.leave([299] * 8 + [9]) == 8
    assert sum(path.stat().st_blocks * 512 for path in (tmp_path / "cache").iterdir()) <= 96 * 1024


KILLED = """
import sys
sys.path.insert(0, {root!r})
from tests.torture.test_t17_disk import Life, PATIENT
from kvist import DiskTier
from kvist.testing import Prefixes
life = Life(DiskTier({directory!r}, "1 MiB", timeout_s=PATIENT), Prefixes())
for number in range(10_000):
    life.leave_all([number % 40])
    if number == 5:
        print("at work", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("again", range(4))
def test_B149_B151_B154_a_process_that_is_killed_leaves_a_directory_that_can_be_read(tmp_path, again):
    """The oracle's numbers are those of the dead process: it made them in the same order."""
    directory = tmp_path / "cache"
    code = KILLED.format(root=str(ROOT), directory=str(directory))
    settings = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=settings) as process:
        assert process.stdout.readline().strip() == b"at work"
        for _ in range(again * 3):
            os.sched_yield()
        process.send_signal(signal.SIGKILL)
    prefixes, found = Prefixes(), 0
    for number in range(40):
        prefixes.along((), [number] * 8 + [9])
    with Life(DiskTier(directory, "1 MiB", timeout_s=PATIENT), prefixes, num_blocks=200) as life:
        found = life.leave_all(range(40))
    assert found[:5] == [8] * 5
