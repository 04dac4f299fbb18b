"""CacheMachine as part of the tests: few examples here, `scripts/soak_machine.py` for many."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from tests.core.small import cached, computed, ids, small

from kvist import CacheConfig, KVCacheManager, Retention, testing
from kvist.core import rows
from kvist.testing import CacheMachine, cache_configs, cache_machine
from kvist.testing.configs import ALL_POLICIES

# The same examples every time. Shrinking takes minutes: leave it to the soak.
FEW = settings(
    max_examples=60,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "soak_machine.py"


def test_nothing_goes_wrong_whatever_is_done():
    run_state_machine_as_test(CacheMachine, settings=FEW)


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_nothing_goes_wrong_in_tails_that_overflow(block_size, monkeypatch):
    monkeypatch.setattr(rows, "MIN_TAIL_TOKENS", 1)
    run_state_machine_as_test(cache_machine(cache_configs(block_sizes=[block_size])), settings=FEW)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ALL_POLICIES, ids=lambda policy: getattr(policy, "__name__", policy))
def test_nothing_goes_wrong_with_any_policy_in_the_smallest_pools(policy):
    run_state_machine_as_test(cache_machine(cache_configs([policy], max_blocks=5)), settings=FEW)


# -- what the machine found, each as its shortest case ----------------------------------------------------------------


def test_a_table_whose_last_block_is_another_one_has_another_version():
    manager = small()
    sequence = computed(manager, [1, 2, 3, 4, 5])
    before, version = ids(sequence), sequence.version
    manager.rewind(sequence, 1)
    manager.add_sequence([9])
    manager.append([sequence], [[5]])
    assert ids(sequence)[:2] == before[:2]
    assert ids(sequence)[2] != before[2]
    assert sequence.version > version


def test_two_parts_of_one_prompt_may_be_kept_until_the_same_moment():
    now = [0.0]
    manager = KVCacheManager(small().config, clock=lambda: now[0])
    cached(manager, [1, 2, 3, 4, 5, 6], retention=Retention([(0, 2, 80, 5.0), (2, 4, 50, 5.0)]))
    now[0] = 6.0
    assert manager.evict(3) == 3
    manager.check()


def test_a_beam_that_takes_its_leaders_place_leaves_what_the_leader_had_committed():
    manager = small(block_size=4, num_blocks=12)
    prompt = [0] * 8 + [1] * 6
    cached(manager, prompt[:8])
    leader = manager.add_sequence(prompt, num_beams=2)
    manager.commit([leader], 12)
    manager.match_prefix([5] * 9)  # elsewhere in the tree: the leader's blocks are not published yet
    manager.free(leader)
    assert manager.match_prefix(prompt).num_tokens == 12


# -- the machine itself -----------------------------------------------------------------------------------------------


def test_a_machine_has_the_configurations_it_was_made_for():
    seen = []

    class Watched(cache_machine(cache_configs(["fifo"], [8], max_blocks=4))):
        def teardown(self):
            seen.append(self.config)
            super().teardown()

    run_state_machine_as_test(Watched, settings=settings(FEW, max_examples=5, stateful_step_count=5))
    assert seen
    for config in seen:
        assert isinstance(config, CacheConfig)
        assert (config.policy, config.block_size) == ("fifo", 8)
        assert all(3 <= num_blocks <= 4 for num_blocks in config.num_blocks)


def test_every_rule_is_reached_and_so_is_every_outcome_that_matters():
    """A machine that does nothing finds nothing: the few examples above hit, copy, share, evict, refuse and branch."""
    counts = dict.fromkeys(("hits", "copied", "shared", "evicted", "refused", "branches", "pins"), 0)

    class Counted(CacheMachine):
        def attempt(self, call):
            result = super().attempt(call)
            counts["refused"] += type(result).__name__ == "OutOfBlocks"
            counts["branches"] += len(result) if isinstance(result, list) else 0
            counts["pins"] += type(result).__name__ == "Pin"
            return result

        def teardown(self):
            if hasattr(self, "manager"):
                stats = self.manager.stats()
                counts["hits"] += stats.num_hit_tokens
                counts["shared"] += stats.num_shared_blocks
                counts["evicted"] += stats.num_evicted_blocks
                counts["copied"] += self.memory.num_copied_tokens
            super().teardown()

    run_state_machine_as_test(Counted, settings=settings(FEW, max_examples=300))
    assert all(counts.values()), counts


def test_the_soak_says_its_seed_and_how_far_it_came():
    command = [sys.executable, str(SCRIPT), "--examples", "3", "--steps", "5", "--seed", "7", "--policy", "lfu"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "seed 7: 3 examples of 5 steps" in done.stdout
    assert "nothing wrong" in done.stdout


def test_the_oracle_needs_no_hypothesis_and_the_machine_says_what_brings_it():
    code = """
import sys
sys.modules["hypothesis"] = None
from kvist.testing import TokenMemory
try:
    from kvist.testing import CacheMachine
except ModuleNotFoundError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "CacheMachine needs Hypothesis: pip install 'kvist[testing]'" in done.stdout


def test_only_public_names_are_offered():
    with pytest.raises(AttributeError, match="no attribute 'Stage'"):
        testing.Stage  # noqa: B018
