"""How commands tell errors: in a line on stderr and by the exit status."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvist.errors import KvistError

__all__ = ["errors_told"]


@contextmanager
def errors_told(*, status: int) -> Iterator[None]:
    """Turn what users can mend into one line on stderr and this exit status."""
    try:
        yield
    except (KvistError, OSError, ValueError, ImportError, MemoryError) as error:
        print(f"kvist: {error}", file=sys.stderr)
        raise typer.Exit(status) from error
