#!/usr/bin/env bash
# Run one step of a target and say what it is and how long it took: step.sh NAME COMMAND...
set -uo pipefail
name=$1
shift
echo "== $name"
"$@"
code=$?
if ((code)); then
    echo "== $name: FAILED with exit status $code after $SECONDS s" >&2
else
    echo "== $name: ok, $SECONDS s"
fi
exit "$code"
