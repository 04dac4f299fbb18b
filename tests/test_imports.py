"""The layers import downwards only, and `import kvist` brings NumPy and nothing else."""

import ast
import inspect
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import kvist

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "kvist"


@dataclass(frozen=True)
class Layer:
    """What one layer may import: `ours` as modules of the package, `theirs` besides the standard library."""

    ours: set[str]
    theirs: set[str]
    forbidden: frozenset[str] = frozenset()  # of the standard library


VALUES = {"errors", "sizes", "tier_config", "config"}
# What would make a decision depend on more than its arguments.
IMPURE = frozenset(
    {"asyncio", "concurrent", "datetime", "io", "multiprocessing", "os", "pathlib", "random", "secrets", "shutil"}
    | {"signal", "socket", "subprocess", "tempfile", "threading", "time", "uuid"}
)

# The longest name that fits a module decides; "" is the package itself, whose names the upper layers may use.
LAYERS = {
    "errors": Layer(set(), set(), IMPURE),
    "sizes": Layer({"errors"}, set(), IMPURE),
    "tier_config": Layer({"errors", "sizes"}, set(), IMPURE),
    "config": Layer({"errors", "sizes", "tier_config"}, set(), IMPURE),
    "core": Layer({"core", *VALUES}, {"numpy"}, IMPURE),
    "memory": Layer({"memory", "core", *VALUES}, {"numpy", "torch"}),
    "memory.layout": Layer({*VALUES}, set(), IMPURE),
    "memory.tables": Layer({"memory.dialects", "core", *VALUES}, {"numpy"}, IMPURE),
    "memory.dialects": Layer({"core.arguments", *VALUES}, {"numpy"}, IMPURE),
    "planning": Layer({"planning", *VALUES}, set(), IMPURE),
    "tiers": Layer({"tiers", *VALUES}, {"numpy"}),
    "tiers.disk": Layer({"tiers", *VALUES}, {"numpy", "xxhash"}),
    "tiers.valkey": Layer({"tiers", *VALUES}, {"redis"}),
    "tiers.valkey_servers": Layer({"tiers", *VALUES}, {"redis"}),
    "tiers.objects": Layer({"tiers", *VALUES}, {"obstore"}),
    "wire": Layer({"wire", "core", *VALUES}, {"numpy"}),
    "wire.msgpack": Layer({"wire", *VALUES}, {"msgspec"}),
    "wire.dynamo": Layer({"wire", "core", *VALUES}, {"numpy", "xxhash"}),
    "wire.zmq": Layer({"wire", "core", *VALUES}, {"numpy", "zmq"}),
    "wire.metrics": Layer({"wire", "core", *VALUES}, {"numpy", "prometheus_client"}),
    "wire.tracing": Layer({*VALUES}, {"opentelemetry"}),
    "wire.gather_mpi": Layer({"wire", *VALUES}, {"mpi4py"}),
    "wire.gather_torch": Layer({"wire", *VALUES}, {"torch", "numpy"}),
    "event_log": Layer({"core", *VALUES}, set()),
    "journal": Layer({"", "journal", "manager", "storing", "event_log", "core", *VALUES}, {"numpy"}),
    "storing": Layer({"core", "tiers", *VALUES}, {"numpy"}),
    "manager": Layer({"core", "memory.tables", "storing", "event_log", "tiers.protocol", *VALUES}, {"numpy"}),
    "edge": Layer({"edge", "memory", "core", *VALUES}, {"numpy", "torch"}),
    "edge.config": Layer({"edge.geometry", *VALUES}, set(), IMPURE),
    "edge.geometry": Layer(set(), set(), IMPURE),
    "": Layer({"manager", "core", "memory.tables", *VALUES}, {"numpy"}),
    "testing": Layer(
        {"", "testing", "wire", "journal", "tiers", "storing", "event_log", "manager", "memory", "core", *VALUES},
        {"numpy", "torch", "hypothesis"},
    ),
    "serve": Layer(
        {"", "serve", "manager", "memory", "core", *VALUES}, {"numpy", "torch", "transformers", "rich", "gguf"}
    ),
    "lab": Layer(
        {"", "lab", "journal", "wire", "planning", "tiers", "storing", "manager", "core", *VALUES},
        {"numpy", "tokenizers", "zstandard", "matplotlib", "pyarrow", "rich", "prometheus_client"},
    ),
    "lab.report": Layer({"lab", *VALUES}, {"numpy", "matplotlib"}),
    "cli_errors": Layer(VALUES, {"typer"}),
    "cli_lab": Layer({"cli_errors", "cli_replays", "cli_traces", "lab", *VALUES}, {"numpy", "typer", "rich"}),
    "cli_replays": Layer({"cli_errors", "cli_traces", "lab", "core", *VALUES}, {"typer", "rich"}),
    "cli_traces": Layer({"cli_errors", "cli_models", "lab", *VALUES}, {"typer", "rich"}),
    "cli_plan": Layer({"cli_errors", "planning", "lab", *VALUES}, {"typer", "transformers"}),
    "cli_models": Layer({"serve", *VALUES}, {"transformers", "rich"}),
    "cli_events": Layer({"cli_errors", "wire", "journal", "testing.odd_policies", *VALUES}, {"typer", "zmq"}),
    "cli_soak": Layer({"cli_errors", "testing", *VALUES}, {"typer", "rich"}),
    "cli": Layer(
        {
            "",
            "cli",
            "cli_errors",
            "cli_events",
            "cli_lab",
            "cli_models",
            "cli_plan",
            "cli_soak",
            "serve",
            "manager",
            "memory",
            "core",
            *VALUES,
        },
        {"numpy", "transformers", "typer", "rich"},
    ),
}


def violations(module, source, modules):
    """The imports in `source`, the text of `module`, that its layer may not have; `modules` are all of the package."""
    name = fitting(module, LAYERS)
    if name is None:
        return [f"{module}: no layer of this name in the table"]
    layer = LAYERS[name]
    return [
        f"{module}:{line} ({name or 'kvist'}) imports {target}"
        for line, target in imports(module, ast.parse(source), modules)
        if not allowed(target, layer)
    ]


def allowed(target, layer):
    root = target.partition(".")[0]
    if root == "kvist":
        return fitting(target, LAYERS) in layer.ours or fitting(target, layer.ours) not in (None, "")
    if root in sys.stdlib_module_names:
        return root not in layer.forbidden
    return root in layer.theirs


def fitting(module, names):
    """The longest of `names` that is `module`, or a package around it, below kvist; "" fits only kvist itself."""
    parts = module.split(".")[1:]
    prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)] or [""]
    return next((prefix for prefix in prefixes if prefix in names), None)


def imports(module, tree, modules):
    """Line and absolute name of every module that `tree` imports, wherever in it, also for type checking only."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                origin = absolute(module, node, modules)
                named = [f"{origin}.{alias.name}" for alias in node.names]
                yield from ((node.lineno, name if name in modules else origin) for name in named)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(str(name)), *_]):
                if called in ("import_module", "__import__"):
                    yield node.lineno, name


def absolute(module, node, modules):
    """The module that `from ... import` names, with the leading dots resolved."""
    if not node.level:
        return node.module
    is_package = any(other.startswith(f"{module}.") for other in modules)
    parents = module.split(".")
    base = parents[: len(parents) - node.level + is_package]
    return ".".join([*base, node.module] if node.module else base)


def module_name(path):
    parts = ["kvist", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = {"kvist", "kvist.core", "kvist.core.pool", "kvist.manager", "kvist.memory", "kvist.memory.arena"} | set(
    SOURCES
)


@pytest.mark.parametrize("module", SOURCES)
def test_every_module_imports_only_what_its_layer_may(module):
    assert violations(module, SOURCES[module].read_text(encoding="utf-8"), SOURCES.keys()) == []


@pytest.mark.parametrize(
    ("module", "source", "reported"),
    [
        ("kvist.core.pool", "import torch", "torch"),
        ("kvist.core.pool", "import numpy.typing, torch.nn as nn", "torch.nn"),
        ("kvist.core.pool", "import time", "time"),
        ("kvist.core.pool", "from kvist.manager import KVCacheManager", "kvist.manager"),
        ("kvist.core.pool", "from kvist import manager", "kvist.manager"),
        ("kvist.core.pool", "from kvist import KVCacheManager", "kvist"),
        ("kvist.core.pool", "from ..manager import KVCacheManager", "kvist.manager"),
        ("kvist.core.pool", "from .. import manager", "kvist.manager"),
        ("kvist.core", "from ..memory import arena", "kvist.memory.arena"),
        ("kvist.core.pool", "if TYPE_CHECKING:\n    from kvist.memory import arena", "kvist.memory.arena"),
        ("kvist.core.pool", "def f():\n    import kvist.memory.arena", "kvist.memory.arena"),
        ("kvist.core.pool", "importlib.import_module('kvist.serve.engine')", "kvist.serve.engine"),
        ("kvist.config", "import numpy", "numpy"),
        ("kvist.errors", "from kvist.config import CacheConfig", "kvist.config"),
        ("kvist.memory.arena", "import kvist.serve", "kvist.serve"),
        ("kvist.memory.tables", "import torch", "torch"),
        ("kvist.manager", "from kvist.memory.arena import TorchMemory", "kvist.memory.arena"),
        ("kvist", "from kvist.memory.arena import TorchMemory", "kvist.memory.arena"),
        ("kvist.serve.engine", "from kvist.cli import main", "kvist.cli"),
        ("kvist.testing", "import kvist.serve.engine", "kvist.serve.engine"),
        ("kvist.core.pool", "import kvist.corelike", "kvist.corelike"),
    ],
)
def test_a_planted_import_is_reported(module, source, reported):
    (violation,) = violations(module, source, MODULES)
    assert violation.endswith(f"imports {reported}")


def test_a_module_outside_every_layer_is_reported():
    assert violations("kvist.helpers", "", MODULES) == ["kvist.helpers: no layer of this name in the table"]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "kvist.core.pool",
            "from __future__ import annotations\nimport numpy as np\nfrom kvist.errors import OutOfBlocks",
        ),
        ("kvist.core.pool", "from . import pool\nfrom ..errors import OutOfBlocks\nfrom .. import config"),
        ("kvist.core", "from .pool import BlockPool"),
        ("kvist.manager", "from kvist.memory.tables import BatchTables\nfrom kvist.memory import tables"),
        ("kvist.memory.arena", "import torch\nfrom kvist.core.pool import BlockPool"),
        ("kvist.serve.engine", "from kvist import KVCacheManager\nimport kvist.memory"),
    ],
)
def test_an_import_from_below_is_not_reported(module, source):
    assert violations(module, source, MODULES | {"kvist.memory.tables", "kvist.config"}) == []


def modules_after(statement):
    """The names in sys.modules after a new interpreter has run `statement`."""
    program = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(result.stdout))


def test_import_kvist_loads_nothing_but_numpy_and_the_standard_library():
    loaded = modules_after("import kvist") - modules_after("import numpy")
    roots = {name.partition(".")[0] for name in loaded}
    assert "kvist" in roots
    assert roots - sys.stdlib_module_names <= {"kvist", "numpy"}


def test_import_kvist_loads_no_optional_package_or_layer():
    optional = [
        "torch",
        "redis",
        "obstore",
        "xxhash",
        "zmq",
        "msgspec",
        "prometheus_client",
        "mpi4py",
        "opentelemetry",
        "transformers",
        "tokenizers",
        "safetensors",
        "gguf",
        "typer",
        "rich",
        "hypothesis",
        "pytest",
    ]
    heavy = ["kvist.testing", "kvist.cli", "kvist.serve", "kvist.memory.arena", "asyncio", "multiprocessing"]
    assert not modules_after("import kvist").intersection([*optional, *heavy])


def test_the_public_names_are_listed_once_and_exist():
    assert len(kvist.__all__) == len(set(kvist.__all__))
    assert [name for name in kvist.__all__ if not hasattr(kvist, name)] == []


def documented(name, thing):
    """Whether a class or function has a docstring of its own; dataclasses make one that only repeats the signature."""
    text = inspect.cleandoc(thing.__doc__ or "")
    return bool(text) and not text.startswith(f"{name}(")


@pytest.mark.parametrize("name", [name for name in kvist.__all__ if callable(getattr(kvist, name, None))])
def test_every_public_name_and_its_public_members_have_docstrings(name):
    thing = getattr(kvist, name)
    assert documented(name, thing), name
    members = {member: value for member, value in vars(thing).items() if not member.startswith("_")}
    acts = {m: v for m, v in members.items() if inspect.isfunction(v) or isinstance(v, property | classmethod)}
    assert [f"{name}.{member}" for member, value in acts.items() if not documented(member, value)] == []
