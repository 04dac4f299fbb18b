"""How much longer does `import kvist` take than `import numpy`, which it needs?

Each import is timed inside a fresh interpreter, the two in turns. Reference: the import of NumPy.
"""

from __future__ import annotations

import statistics
import subprocess
import sys

from report import AtMostTimes, Options, Row, main

TIMED_IMPORT = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"


def measure(options: Options) -> list[Row]:
    """Median over interpreters; the first of each kind only warms the file cache."""
    times: dict[str, list[float]] = {"numpy": [], "kvist": []}
    for _ in range(2 if options.quick else 16):
        for module, samples in times.items():
            samples.append(import_ms(module))
    numpy, kvist = (statistics.median(samples[1:]) for samples in times.values())
    return [
        Row(
            name="import kvist",
            value=kvist,
            unit="ms",
            reference=numpy,
            reference_name="import numpy",
            target=AtMostTimes(1, 150, "ms"),
        )
    ]


def import_ms(module: str) -> float:
    """Milliseconds that one import takes in an interpreter of its own."""
    command = [sys.executable, "-c", TIMED_IMPORT.format(module=module)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1e3


if __name__ == "__main__":
    main("import", measure, __doc__)
