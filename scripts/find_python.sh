#!/bin/sh
# Print the path of a Python that runs, is 3.11 or newer and can make virtual environments; exit 1 where there is none.
# A version manager leaves commands on PATH that exist and do not run, so every candidate is tried, not only looked for.
# 3.11 comes first: it is the oldest supported version, and the one with most wheels.
set -eu

usable='import ensurepip, sys, venv; sys.version_info >= (3, 11) or sys.exit(1); print(sys.executable)'

folders=$(printf '%s\n' "$PATH" | tr ':' '\n'
    ls -d "${PYENV_ROOT:-${HOME:-/}/.pyenv}"/versions/*/bin 2>/dev/null || true)

for name in python3.11 python3.12 python3.13 python3.14 python3; do
    printf '%s\n' "$folders" | while IFS= read -r folder; do
        [ -x "$folder/$name" ] || continue
        "$folder/$name" -c "$usable" 2>/dev/null </dev/null && break
    done | grep . && exit 0
done
echo "no Python 3.11 or newer with venv and ensurepip was found; name one: make PYTHON=/path/to/python3.11" >&2
exit 1
