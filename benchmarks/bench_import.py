"""How much longer does `import kvist` take than `import numpy`, which it needs?

Each import is timed inside a fresh interpreter, the two in turns; both find their bytecode, as after an installation.
Reference: the import of NumPy.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from tempfile import TemporaryDirectory

from report import AtMostTimes, Options, Row, main

TIMED_IMPORT = "import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"


def measure(options: Options) -> list[Row]:
    """Median over interpreters; the first of each kind only writes bytecode and warms the file cache."""
    times: dict[str, list[float]] = {"numpy": [], "kvist": []}
    with TemporaryDirectory() as folder:
        environment = with_bytecode_in(folder)
        for _ in range(2 if options.quick else 16):
            for module, samples in times.items():
                samples.append(import_ms(module, environment))
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


def with_bytecode_in(folder: str) -> Mapping[str, str]:
    """An environment in which all modules have their bytecode in a folder, whatever this one says of it."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": folder}


def import_ms(module: str, environment: Mapping[str, str]) -> float:
    """Milliseconds that one import takes in an interpreter of its own."""
    command = [sys.executable, "-c", TIMED_IMPORT.format(module=module)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return float(done.stdout) * 1e3


if __name__ == "__main__":
    main("import", measure, __doc__)
