#!/usr/bin/env bash
# Make .venv from requirements/lock.txt and install Everstep into it, editable: `make venv`.
# A stamp keyed by the lock, pyproject.toml and the folder makes the second run instant. Another Python: PYTHON=... make venv
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
here=$PWD
key=$({ cat requirements/lock.txt pyproject.toml; echo "$here"; } | sha256sum | cut -d' ' -f1)
stamp=.venv/everstep-stamp
[[ -x .venv/bin/python && -f $stamp && $(<$stamp) == "$key" ]] && exit 0

old_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        if old_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    echo "venv: Everstep needs Python 3.11 or newer; found: $(python3 --version 2>&1 || true). Install python3.11," >&2
    echo "venv: or name an interpreter: PYTHON=/path/to/python3.11 make venv" >&2
    return 1
}

# Scripts in .venv/bin name the folder in which they were made: a moved or copied clone starts anew.
if ! { [[ -x .venv/bin/pip ]] && .venv/bin/python -c '' && grep -qF "$here/.venv/bin/python" .venv/bin/pip; } 2>/dev/null; then
    python=$(find_python)
    echo "venv: making .venv with $("$python" --version)"
    if ! "$python" -m venv --clear .venv; then
        echo "venv: $python could not make a virtual environment; on Debian: apt install python3-venv" >&2
        exit 1
    fi
fi
rm -f "$stamp"
echo "venv: installing $(grep -c == requirements/lock.txt) pinned packages from requirements/lock.txt (torch is about 200 MB)"
# -qq: an index which lacks one of the packages is worth no warning while another has it.
.venv/bin/python -m pip install -qq --disable-pip-version-check --requirement requirements/lock.txt
# The build back end came with the lock, so this asks no package index.
.venv/bin/python -m pip install -qq --disable-pip-version-check --no-index --no-build-isolation --no-deps --editable .
echo "$key" >"$stamp"
echo "venv: ready after $SECONDS s"
