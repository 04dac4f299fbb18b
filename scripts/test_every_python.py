"""Run the tests that need only NumPy on every other Python found here, and on the oldest NumPy that is supported.

Virtual environments are kept in .venvs/ and made anew only when the versions in them change.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = ROOT / ".venvs"
TESTS = ["tests/core", "tests/test_imports.py", "tests/test_readme.py"]
LEFT_OUT = ["tests/core/test_planted_faults.py", "tests/core/test_soak.py"]
"""They prove the tests, not the library, and take long."""
TOOLS = ["pytest", "pytest-xdist", "hypothesis"]
PROBE = """
import sys
print(sys.implementation.name, sys.version_info.releaselevel, *sys.version_info[:3], sys.executable)
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A CPython that ran when it was tried."""

    path: Path
    version: tuple[int, int, int]

    @property
    def minor(self) -> tuple[int, int]:
        """The version that decides compatibility, such as (3, 12)."""
        return self.version[:2]


@dataclass(frozen=True, slots=True)
class Trial:
    """One interpreter with one NumPy."""

    interpreter: Interpreter
    numpy: str

    @property
    def name(self) -> str:
        """Which versions are tried, in words."""
        return f"Python {'.'.join(map(str, self.interpreter.version))}, NumPy {self.numpy}"

    @property
    def folder(self) -> Path:
        """Where the environment of this trial is kept."""
        return ENVIRONMENTS / f"{'.'.join(map(str, self.interpreter.version))}-numpy-{self.numpy}"

    @property
    def python(self) -> Path:
        """The interpreter of that environment."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def commands() -> Iterator[Path]:
    """Every python3.N on PATH and among pyenv's versions; some may not run."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    on_path = [Path(folder) for folder in os.environ.get("PATH", "").split(os.pathsep) if folder]
    for folder in [*on_path, *sorted(pyenv.glob("versions/*/bin"))]:
        yield from sorted(path for path in folder.glob("python3.*") if re.fullmatch(r"python3\.\d+", path.name))


def probe(command: Path) -> Interpreter | None:
    """Run a command and say which final CPython it is; None if it does not run or is something else."""
    try:
        result = subprocess.run([command, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    implementation, level, major, minor, micro, path = result.stdout.rstrip("\n").split(" ", 5)
    if (implementation, level) != ("cpython", "final"):
        return None
    return Interpreter(Path(path), (int(major), int(minor), int(micro)))


def interpreters() -> dict[tuple[int, int], Interpreter]:
    """The interpreters to try by minor version, oldest first: this one, and the first other one found of each."""
    this = Interpreter(Path(sys.executable), sys.version_info[:3])
    found = {this.minor: this}
    for interpreter in filter(None, map(probe, commands())):
        found.setdefault(interpreter.minor, interpreter)
    return dict(sorted(found.items()))


def supported(project: dict[str, list[str]]) -> set[tuple[int, int]]:
    """The minor versions that the project's classifiers name."""
    matches = [re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", line) for line in project["classifiers"]]
    return {(3, int(match[1])) for match in matches if match}


def oldest_numpy(project: dict[str, list[str]]) -> str:
    """The lower bound of the NumPy dependency, as a full version: 1.26.0 for `numpy>=1.26`."""
    (bound,) = (line.removeprefix("numpy>=") for line in project["dependencies"] if line.startswith("numpy>="))
    return ".".join([*bound.split("."), "0", "0"][:3])


def pins() -> dict[str, str]:
    """The versions in constraints.txt by package name."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def trials() -> list[Trial]:
    """What to run: the pinned NumPy on every other supported Python, and the oldest NumPy on the oldest Python."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = supported(project)
    found = {minor: interpreter for minor, interpreter in interpreters().items() if minor in wanted}
    others = [interpreter for minor, interpreter in found.items() if minor != sys.version_info[:2]]
    oldest = next(iter(found.values()))
    return [Trial(oldest, oldest_numpy(project)), *(Trial(other, pins()["numpy"]) for other in others)]


def prepare(trial: Trial) -> None:
    """Make the trial's environment, unless it is there with the same versions.

    The environment has no pip of its own: a distribution's Python may come without the means to put one there.
    """
    requirements = [f"numpy=={trial.numpy}", *(f"{tool}=={pins()[tool]}" for tool in TOOLS)]
    stamp = trial.folder / "installed.txt"
    if stamp.exists() and stamp.read_text().splitlines() == requirements:
        return
    shutil.rmtree(trial.folder, ignore_errors=True)
    subprocess.run([trial.interpreter.path, "-m", "venv", "--without-pip", trial.folder], check=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(trial.python)]
    subprocess.run([*pip, "install", "--quiet", "--only-binary=:all:", *requirements], check=True)
    stamp.write_text("\n".join(requirements) + "\n")


def run(trial: Trial) -> bool:
    """Run the NumPy-only tests in the trial's environment; True if they pass."""
    print(f"== {trial.name}", flush=True)
    prepare(trial)
    # What takes long is about the core, not about a version of Python.
    options = ["-q", "-n", "auto", "--maxprocesses", "4", "-m", "not slow", "--hypothesis-profile=quick"]
    left_out = [f"--ignore={each}" for each in LEFT_OUT]
    pytest = [str(trial.python), "-m", "pytest", "-p", "no:cacheprovider", *options, *left_out, *TESTS]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(pytest, cwd=ROOT, env=environment, check=False).returncode == 0


def main() -> int:
    """Run every trial and return the exit status: 1 if any failed."""
    failed = [trial.name for trial in trials() if not run(trial)]
    if failed:
        print(f"failed on: {'; '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
