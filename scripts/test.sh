#!/usr/bin/env bash
# All tests: `make test`. Arguments go to pytest: make test ARGS="-k hang"
# Three at a time on two cores, as each waits now and then: those of tests/integration, which start whole jobs, beside
# those that only compute.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
colour=$([[ -t 1 ]] && echo yes || echo no)
.venv/bin/python -m pytest --color="$colour" --durations=10 --durations-min=0.2 -n 3 --dist=worksteal "$@" </dev/null
code=$?
echo "== tests: ${SECONDS} s in all"
exit "$code"
