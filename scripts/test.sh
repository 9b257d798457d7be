#!/usr/bin/env bash
# All tests in two passes: `make test`. Arguments go to pytest: make test ARGS="-k hang"
# Both run on two cores, three tests at a time, as each waits now and then. tests/integration starts whole jobs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
output=$(mktemp)
trap 'rm -f "$output"' EXIT
closing=()
failed=0
colour=$([[ -t 1 ]] && echo yes || echo no)

pass() {
    local name=$1 code
    shift
    echo "== tests: $name"
    .venv/bin/python -m pytest --color="$colour" --durations=10 --durations-min=0.2 "$@" </dev/null 2>&1 | tee "$output"
    code=${PIPESTATUS[0]}
    # 5: no test was selected, which is a failure unless a selection was asked for.
    ((code == 0 || (code == 5 && selected))) || failed=$code
    closing+=("$(grep . "$output" | tail -n 1)")
}

selected=$(($# > 0))
pass "pure and small" tests --ignore=tests/integration -n 3 --dist=worksteal "$@"
pass "integration, real processes" tests/integration --timeout=120 -n 3 --dist=load "$@"
echo "== tests: ${SECONDS} s in all"
printf '%s\n' "${closing[@]}"
exit "$failed"
