"""Run everything that attacks Kvist, for long, and print a table: class, cases, faults found, faults mended.

    python scripts/torture.py --minutes 10 --seed 1

The tests of tests/torture, tests/fuzz and tests/scale with many examples, planted faults, then a soak. A class is a
file of tests; found is what fails now, and what was mended of that kind, as tests/torture/mended.json lists it. Exits 1
if anything fails.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET  # of a file that pytest has just written here
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MENDED = ROOT / "tests" / "torture" / "mended.json"
FOLDERS = (
    "tests/torture",
    "tests/fuzz",
    "tests/scale",
    "tests/core/test_planted_faults.py",
    "tests/tiers/test_engine_tiers.py",
)
SOAK = "soak"


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the soak")
    parser.add_argument("--seed", type=int, default=1, help="of the soak and of the tests")
    parser.add_argument("--profile", default="torture", help="how many examples: a Hypothesis profile of the tests")
    return parser.parse_args(arguments)


def tested(profile: str, seed: int, xml: Path) -> int:
    """Run the tests, and return their exit status."""
    folders = [each for each in FOLDERS if (ROOT / each).exists()]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "auto", "--maxprocesses", "4", "-m", "slow or not slow"]
    command += [f"--hypothesis-profile={profile}", f"--hypothesis-seed={seed}", f"--junit-xml={xml}", *folders]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def counted(xml: Path) -> tuple[Counter[str], Counter[str]]:
    """Count the cases and the failures of each class in what pytest has written."""
    cases, failures = Counter[str](), Counter[str]()
    for case in ET.parse(xml).iter("testcase"):
        if case.find("skipped") is not None:
            continue
        name = case.get("classname", "").removeprefix("tests.").removesuffix(".py")
        cases[name] += 1
        failures[name] += case.find("failure") is not None or case.find("error") is not None
    return cases, failures


def soaked(minutes: float, seed: int) -> tuple[int, bool]:
    """Run a soak; returns how many examples it had, and whether it found a fault."""
    options = ["--minutes", str(minutes), "--seed", str(seed), "--journal", str(ROOT / "kvist-soak.journal"), "--json"]
    command = [sys.executable, "-m", "kvist.cli", "soak", *options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode not in (0, 1):
        raise SystemExit(f"the soak ended with status {done.returncode}")
    told = json.loads(done.stdout)
    if told["fault"] is not None:
        print(json.dumps(told["fault"], indent=1))
    return int(told["examples"]), told["fault"] is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, print the table, and return 1 if anything is wrong."""
    options = parsed(arguments)
    with tempfile.TemporaryDirectory() as folder:
        xml = Path(folder) / "results.xml"
        status = tested(options.profile, options.seed, xml)
        cases, failures = counted(xml)
    cases[SOAK], failed = soaked(options.minutes, options.seed)
    failures[SOAK] += failed
    shown(cases, failures)
    return 1 if status or failed else 0


def shown(cases: Counter[str], failures: Counter[str]) -> None:
    """Print the table."""
    mended = {name: len(faults) for name, faults in json.loads(MENDED.read_text(encoding="utf-8")).items()}
    table = Table("class", "cases", "faults found", "faults mended")
    names = sorted(cases.keys() | mended.keys())
    for name in names:
        fixed = mended.get(name, 0)
        table.add_row(name, f"{cases[name]:,}", str(failures[name] + fixed), str(fixed))
    fixed = sum(mended.values())
    table.add_row("all", f"{cases.total():,}", str(failures.total() + fixed), str(fixed), style="bold")
    Console(width=100).print(table)


if __name__ == "__main__":
    sys.exit(main())
