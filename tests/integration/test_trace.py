"""The trace of a real job of two nodes: of a killed worker too, while the job runs and afterwards."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import trace_rules
from session_harness import SessionRun

from everstep.cli.trace import trace

pytestmark = pytest.mark.timeout(150)

TWO_NODES = ("--nnodes", "1:2", "--local-nodes", "2", "--nproc-per-node", "1")
Events = list[dict[str, Any]]


def told(path: Path) -> Events:
    """All events of a trace that keeps the rules."""
    data = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    trace_rules.check(data)
    events: Events = data["traceEvents"]
    return events


def processes(events: Events) -> dict[int, Events]:
    """By pid: what it did, in order, from its begin to the next one's in its place."""
    found: dict[int, Events] = {}
    for place in {event["pid"] for event in events if event["pid"] > 1}:
        pid = 0
        for event in sorted((x for x in events if x["pid"] == place and x["ph"] != "M"), key=_order):
            if event["name"].endswith(" began"):
                pid = event["args"]["pid"]
            found.setdefault(pid, []).append(event)
    return found


def _end(event: dict[str, Any]) -> float:
    return float(event["ts"] + event.get("dur", 0))


def _order(event: dict[str, Any]) -> tuple[float, bool]:
    """What a process was in ends in the nanosecond in which it does itself."""
    return round(_end(event), 3), event["name"].startswith("ended")


def steps(events: Events) -> list[int]:
    return [event["args"]["step"] for event in events if event["name"].split()[0] in ("start", "step")]


def test_a_killed_worker_leaves_its_last_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with SessionRun(tmp_path, *TWO_NODES, args=("--steps", "100", "--pause", "0.01")) as run:
        run.until_committed(20)
        killed = run.kill_member(role=1, signum=signal.SIGSTOP)
        os.kill(killed, signal.SIGKILL)
        run.until_committed(run.committed() + 5)
        assert trace(run.run_dir, out=tmp_path / "live.json") == 0
        assert killed in processes(told(tmp_path / "live.json"))
        assert run.wait() == 0
    assert trace(run.run_dir) == 0
    events = told(run.run_dir / "trace.json.gz")
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {f"job {run.run_dir.name}", "rank 0: node0/0", "rank 1: node1/0"}
    assert "3 workers" not in capsys.readouterr().out
    by_pid = processes(events)
    for pid, lines in run.commits().items():
        numbers = [line.step + 1 for line in lines]
        cut = [*numbers, numbers[-1] + 1] if pid == killed else numbers  # before it could write its line
        assert steps(by_pid[pid]) in (numbers, cut), "each step that it committed is told"
    assert by_pid[killed][-1]["name"].startswith("ended")
    check_spans(events)
    assert trace(run.run_dir, out=tmp_path / "one.json", ranks="1", newest=1.0) == 0
    assert {event["pid"] for event in told(tmp_path / "one.json")} == {1, 2}


def check_spans(events: Events) -> None:
    """What a session does in a step is there, and nobody has a sum before the other one began it."""
    by_name: dict[str, Events] = defaultdict(list)
    for event in events:
        by_name[event["name"]].append(event)
    for name in ("data", "forward", "backward", "update", "wait for sums", "vote or change of epoch"):
        assert {event["pid"] for event in by_name[name]} >= {2, 3}, name
    assert all(event["args"]["bytes"] for event in by_name["sum of gradients"])
    sums: dict[tuple[int, int], Events] = defaultdict(list)
    for event in by_name["sum of gradients"]:
        sums[event["args"]["step"], event["args"]["epoch"]].append(event)
    both = [found for found in sums.values() if {event["pid"] for event in found} == {2, 3}]
    assert both
    for found in both:
        assert max(event["ts"] for event in found) <= min(_end(event) for event in found), (
            "nobody ends before all began"
        )
    crash = next(event for name, found in by_name.items() if name.startswith("crash") for event in found)
    assert crash["ph"] == "X" and crash["dur"] > 0
