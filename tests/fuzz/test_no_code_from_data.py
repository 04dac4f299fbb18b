"""Nothing that is read from a disk, a network or a file can execute code: no module of Kvist calls what could do it."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "yaml", "_pickle", "runpy", "code"}
CALLS = {"eval", "exec", "compile", "__import__", "load_module", "exec_module", "import_module"}
LOADS = {"torch.load", "np.load", "numpy.load", "np.loadtxt", "torch.jit.load", "torch.hub.load"}
SWITCHES = {"trust_remote_code", "allow_pickle", "shell"}

ALLOWED = {
    ("kvist/wire/hashes.py", "pickle"): "vLLM's block names are hashes over pickled bytes: it writes, and never reads",
    ("kvist/wire/hashes.py", "pickle.dumps"): "the same",
    ("kvist/edge/__init__.py", "import_module"): "names of this package's own modules, from a table",
    ("kvist/serve/__init__.py", "import_module"): "the same",
    ("kvist/testing/__init__.py", "import_module"): "the same",
    ("kvist/wire/conversion.py", "import_module"): "the same",
    ("kvist/lab/__init__.py", "import_module"): "the same",
    ("kvist/tiers/opening.py", "import_module"): "a store of the user's own, by the import path in the settings",
}


def dangers(tree):
    """What in a module could execute what it is given, as (line, name)."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, each.name) for each in names if each.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in MODULES:
                yield node.lineno, module
            case ast.Call():
                yield from called(node)


def called(node):
    name = ast.unparse(node.func)
    options = {each.arg: each.value for each in node.keywords}
    origin, _, last = name.rpartition(".")
    is_call = last in CALLS and (origin in ("", "builtins") or last not in ("compile", "eval"))
    if is_call or name.split(".")[0] in MODULES:
        yield node.lineno, name.removeprefix("importlib.")
    if name in LOADS and not is_constant(options.get("weights_only"), True) and "allow_pickle" not in options:
        yield node.lineno, name
    yield from (
        (node.lineno, option)
        for option, value in options.items()
        if option in SWITCHES and not is_constant(value, False)
    )


def is_constant(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def found_in(path):
    name = path.relative_to(SOURCE).as_posix()
    return [(name, line, danger) for line, danger in dangers(ast.parse(path.read_text(encoding="utf-8")))]


def test_no_module_executes_what_it_reads():
    found = [each for path in sorted(SOURCE.rglob("*.py")) for each in found_in(path)]
    assert [each for each in found if (each[0], each[2]) not in ALLOWED] == []


@pytest.mark.parametrize(
    ("source", "danger"),
    [
        ("import pickle", "pickle"),
        ("from yaml import load", "yaml"),
        ("pickle.loads(x)", "pickle.loads"),
        ("marshal.load(f)", "marshal.load"),
        ("eval(text)", "eval"),
        ("exec(compile(a, b, c))", "compile"),
        ("builtins.exec(x)", "builtins.exec"),
        ("importlib.import_module(name)", "import_module"),
        ("torch.load(f)", "torch.load"),
        ("torch.load(f, weights_only=False)", "torch.load"),
        ("np.load(f)", "np.load"),
        ("np.load(f, allow_pickle=True)", "allow_pickle"),
        ("AutoModel.from_pretrained(x, trust_remote_code=True)", "trust_remote_code"),
        ("subprocess.run(x, shell=True)", "shell"),
    ],
)
def test_a_planted_danger_is_reported(source, danger):
    assert danger in [name for _, name in dangers(ast.parse(source))]


@pytest.mark.parametrize(
    "source", ["re.compile(x)", "torch.load(f, weights_only=True)", "model.eval()", "np.load(f, allow_pickle=False)"]
)
def test_what_is_harmless_is_not_reported(source):
    assert list(dangers(ast.parse(source))) == []
