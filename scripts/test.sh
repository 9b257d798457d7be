#!/usr/bin/env bash
# All tests: `make test`. Arguments go to pytest: make test ARGS="-k hang"
# Three at a time on two cores, as each waits now and then: those of tests/integration, which start whole jobs, beside
# those that only compute. Real processes on a crowded machine miss a moment now and then: what failed beside others is
# run once more alone, and named at the end. What fails alone, too, or more than MOST of them, is a failure.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
MOST=4
# Most of the time goes into starting some thousand processes: what they import is compiled once, whatever is set here.
export PYTHONDONTWRITEBYTECODE=
colour=$([[ -t 1 ]] && echo yes || echo no)
output=$(mktemp)
trap 'rm -f "$output"' EXIT
run() {
    .venv/bin/python -m pytest --color="$colour" --durations=10 --durations-min=0.2 "$@" </dev/null 2>&1 | tee "$output"
    return "${PIPESTATUS[0]}"
}

run -n 3 --dist=worksteal "$@"
code=$?
mapfile -t failed < <(grep -aoP '^(\e\[\d+m)*FAILED(\e\[\d+m)* \K.*' "$output")
if ((code == 1 && ${#failed[@]} <= MOST)); then
    echo "== tests: ${#failed[@]} failed beside others; once more, alone"
    run --last-failed --last-failed-no-failures=none "$@"
    code=$?
    printf '== tests: failed beside others: %s\n' "${failed[@]}"
fi
echo "== tests: ${SECONDS} s in all"
exit "$code"
