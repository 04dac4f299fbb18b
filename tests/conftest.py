"""What all tests share: no network, one thread, Hypothesis profiles, and no tests/gpu where there is no device."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Read when torch and transformers are imported, so they must be set before any test module is.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No deadlines: a shared machine may stall any example. `quick` always runs the same examples.
COMMON = settings(deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("default", COMMON, max_examples=100)
settings.register_profile("quick", COMMON, max_examples=25, stateful_step_count=40, derandomize=True)
settings.register_profile("thorough", COMMON, max_examples=2000, stateful_step_count=100)
settings.register_profile("torture", COMMON, max_examples=1500, stateful_step_count=60)
settings.load_profile("default")

# A shell's background jobs ignore it, and so would all processes that tests begin and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).parent
GPU_TESTS = TESTS / "gpu"
ATTACKS = (TESTS / "torture", TESTS / "fuzz", TESTS / "scale", TESTS / "core" / "test_planted_faults.py")
"""What is slow there is left to `make torture`."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("slow") and any(map(item.path.is_relative_to, ATTACKS)):
            item.add_marker(pytest.mark.long)
    on_gpu = [item for item in items if item.path.is_relative_to(GPU_TESTS)]
    reason = missing_device() if on_gpu else None
    for item in on_gpu:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


def missing_device():
    """Why tests/gpu cannot run here, or None where it can."""
    try:
        import torch
    except ModuleNotFoundError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "torch finds no accelerator"
