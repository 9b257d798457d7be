"""`everstep plan`: what it prints, its JSON, its picture, and what it refuses."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from everstep.cli.fold import fold
from everstep.cli.main import main
from everstep.cli.plan import percent, seconds_of, span
from everstep.control import tending
from everstep.control.journal import Journal
from everstep.core import events as e
from everstep.core.errors import ExitCode, UsageError
from everstep.core.types import JobSpec
from everstep.plan.planner import Recommendation

JOB = ("plan", "--gpus", "16384", "--state-bytes", "5.6T", "--step-s", "5")


def test_it_says_what_to_set_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--mtbf", "3h"]) == 0
    said = capsys.readouterr().out
    for part in ("a failure every 3 h", "ETTR", "closed form", "memory    every 4 steps", "disk      every",
                 "copies    2", "standbys  1 node", "a process dies: promote-standby",
                 "all copies are lost: roll-back"):  # fmt: skip
        assert part in said


def test_json_holds_every_decision(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, "--json", "--replicas", "2"]) == 0
    found = msgspec.json.decode(capsys.readouterr().out, type=Recommendation)
    assert found.question.mttf_s == pytest.approx(86400 / (2048 * 0.0065))
    assert all(remedy.decision.alternatives for remedy in found.remedies)


def test_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out = tmp_path / "plan.png"
    assert main([*JOB, "--mtbf", "3h", "--plot", str(out)]) == 0
    width, height = struct.unpack(">II", out.read_bytes()[16:24])
    assert width > 800 and height > 600
    assert main([*JOB, "--mtbf", "3h", "--plot", str(tmp_path / "no" / "plan.png")]) == ExitCode.USAGE
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("more", "said"), [
    (["--mtbf", "3 years"], "expected a time as in 30m, 3h, 2d"), (["--mtbf", "0"], "--mtbf: must be above 0"),
    (["--replicas", "3"], "does not divide"), (["--node-failures", "0"], "must be above 0"),
    (["--stall-s", "nan"], "--stall-s nan: must be 0 or more"), (["--disk-stall-s=-5"], "--disk-stall-s -5"),
    (["--copy-rate", "fast"], "expected a size"), (["--gpus-per-node", "0"], "--gpus-per-node 0")])  # fmt: skip
def test_what_it_refuses(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*JOB, *more]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


def test_whoever_has_read_enough_closes_the_pipe() -> None:
    """As `everstep plan ... | head -1` does: no traceback, and the exit code that shells expect."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-m", "everstep", *JOB], stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, b"")


def test_lines_are_folded_below_what_they_belong_to() -> None:
    assert fold("one\nwhen      a node is lost: wait a while", 10, 30) == (
        "one\nwhen      a node is lost: wait\n          a while"
    )


def test_times() -> None:
    assert [seconds_of(text, "") for text in ("90", "45s", "30m", "3h", "2d", "1.5w")] == [
        90,
        45,
        1800,
        10800,
        172800,
        907200,
    ]
    for text in ("", "-3h", "3y", "h", "3 h 2 m"):
        with pytest.raises(UsageError, match="--mtbf"):
            seconds_of(text, "--mtbf")
    assert [span(0.0175), span(20), span(600), span(6605), span(3 * 86400)] == [
        "17.5 ms",
        "20 s",
        "10 min",
        "110 min",
        "3 d",
    ]
    assert [percent(0.0), percent(0.5), percent(8.6e-6), percent(1 - 8.6e-6)] == [
        "0.00 %",
        "50.00 %",
        "0.00086 %",
        "99.99914 %",
    ]


def test_a_jobs_own_times_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal.open(tmp_path / "journal.jsonl", "job")
    journal.append(e.JobSubmitted(JobSpec("job")), 1.0, 1.0, 1)
    for _ in range(3):
        journal.append(e.CostLearned("promote-standby", 1.1), 1.0, 1.0, 1)
    journal.close()
    for _ in range(2):
        assert main([*JOB, "--mtbf", "3h", "--run", str(tmp_path)]) == 0
        assert "a node is lost, a standby waits: promote-standby, 6.1 s down" in capsys.readouterr().out
        tending.tend(journal.path, with_past=True)  # a state is kept: what came before that is not read again
        whole = journal.path.read_bytes()
        journal.path.write_bytes(whole.replace(b"promote-standby", b"promote-nobodyX"))
    assert main([*JOB, "--mtbf", "3h", "--run", str(tmp_path / "none")]) == ExitCode.USAGE
