"""Run every benchmark, each in a process of its own, and say which targets hold."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from report import machine, machine_line, table

BENCHMARKS = (
    "match",
    "admit",
    "decode",
    "scale",
    "groups",
    "policies",
    "transfer",
    "disk",
    "events",
    "lab",
    "import",
    "pauses",
)


def main() -> None:
    """Print the tables and a summary; arguments are those of the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes, few repetitions: shows that it runs, not how fast"
    )
    parser.add_argument("--trace", type=Path, help="request trace (JSON lines with hash_ids)")
    arguments = parser.parse_args()
    passed_on = (["--quick"] if arguments.quick else []) + (
        ["--trace", str(arguments.trace)] if arguments.trace else []
    )
    results = {}
    if not arguments.json:
        print(machine_line(machine()))
    for name in BENCHMARKS:
        results[name] = result = run(name, passed_on)
        if not arguments.json:
            print(f"\n{name}\n\n{table(result['rows'])}", flush=True)
    print(json.dumps(results, indent=2) if arguments.json else f"\n{summary(results)}")


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run one benchmark and read what it measured."""
    script = Path(__file__).with_name(f"bench_{name}.py")
    command = [sys.executable, str(script), "--json", *arguments]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result: dict[str, Any] = json.loads(output)
    return result


def summary(results: dict[str, dict[str, Any]]) -> str:
    """How many targets hold, and which do not."""
    rows = [row for result in results.values() for row in result["rows"] if row["holds"] is not None]
    missed = [
        f"  missed: {row['name']}: {row['target']}, against {row['reference_name']}" for row in rows if not row["holds"]
    ]
    return "\n".join([f"{len(rows) - len(missed)} of {len(rows)} targets hold", *missed])


if __name__ == "__main__":
    main()
