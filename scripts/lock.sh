#!/usr/bin/env bash
# Write requirements/lock.txt anew: the newest releases which pyproject.toml allows, torch held where it is: `make lock`.
# To move torch: TORCH=2.14.0 make lock
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
torch=${TORCH:-$(sed -n 's/^torch==//p' requirements/lock.txt)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
.venv/bin/python -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -qq --disable-pip-version-check "torch==$torch" ".[torch,plot,dashboard,otel,dev]"
{
    sed '/^#/!d' requirements/lock.txt
    "$folder/venv/bin/python" -m pip freeze --all --exclude pip --exclude wheel --exclude everstep |
        sed 's/+[^ ]*$//' | LC_ALL=C sort --ignore-case
} >"$folder/lock.txt"
cp "$folder/lock.txt" requirements/lock.txt
echo "lock: $(grep -c == requirements/lock.txt) packages; read the difference, then run make check test"
