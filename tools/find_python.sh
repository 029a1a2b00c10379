#!/usr/bin/env bash
# Prints the path of a Python 3.12, the version that requirements/cpu.txt is locked for.
#
# A name on PATH proves nothing (pyenv's shims exist for versions that are not active), so each candidate is run:
# $PYTHON, names on PATH, pyenv's versions, what uv knows, and last what uv can install.
set -uo pipefail

# Prints the interpreter's own path if the command $1 starts Python 3.12.
try() {
    "$1" -c 'import sys; sys.version_info[:2] == (3, 12) or sys.exit(1); print(sys.executable)' 2>/dev/null </dev/null
}

if [ -n "${PYTHON:-}" ]; then
    try "$PYTHON" && exit 0
    echo "PYTHON=$PYTHON is not a Python 3.12; set it to one, or unset it to let one be looked for" >&2
    exit 1
fi

for name in python3.12 python3 python; do
    # Every match on PATH, not only the first: a shim that fails may hide an interpreter that works.
    while read -r candidate; do
        found=$(try "$candidate") && echo "$found" && exit 0
    done < <(type -ap "$name")
done

if pyenv_root=$(pyenv root 2>/dev/null); then
    for candidate in "$pyenv_root"/versions/3.12*/bin/python3.12; do
        found=$(try "$candidate") && echo "$found" && exit 0
    done
fi

if uv --version >/dev/null 2>&1; then
    candidate=$(uv python find 3.12 2>/dev/null) && found=$(try "$candidate") && echo "$found" && exit 0
    echo "no Python 3.12 on this machine; asking uv to install one" >&2
    uv python install 3.12 >&2 && candidate=$(uv python find 3.12) && found=$(try "$candidate") && echo "$found" && exit 0
fi

echo "no working Python 3.12 found on PATH, in pyenv or through uv. Install one (for example 'apt install python3.12-venv'," >&2
echo "'pyenv install 3.12' or 'uv python install 3.12'), or name it: make PYTHON=/path/to/python3.12 ..." >&2
exit 1
