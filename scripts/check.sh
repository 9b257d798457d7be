#!/usr/bin/env bash
# Everything that can be judged without running the tests: `make check`. All steps run; the end names those that failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bin=.venv/bin
code=(src tests examples benchmarks scripts)
failed=()

step() {
    local name=$1 began=$SECONDS
    shift
    if "$@"; then
        echo "== $name: ok, $((SECONDS - began)) s"
    else
        echo "== $name: FAILED, $((SECONDS - began)) s"
        failed+=("$name")
    fi
}

step "ruff check" $bin/python -m ruff check --quiet --output-format concise "${code[@]}"
step "ruff format" $bin/python -m ruff format --quiet --check --output-format concise "${code[@]}"
step "mypy --strict" $bin/python -m mypy
step "layers" $bin/lint-imports --no-logo
step "size budget" $bin/python scripts/budget.py
if ((${#failed[@]})); then
    printf '== check: failed: %s\n' "${failed[@]}" >&2
    exit 1
fi
