"""`everstep drain` and `everstep ledger` where there is no job to talk to, or one that says no."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest

from everstep.cli import presence
from everstep.cli.main import main
from everstep.control.journal import Journal
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.core.types import JobSpec
from everstep.testing.local import LocalRun

ENDING = Path(__file__).parents[1] / "integration" / "scripts" / "ending.py"


def journal(run_dir: Path, *events: e.AnyEvent) -> None:
    with Journal.open(run_dir / "journal.jsonl", "j1") as made:
        for event in (e.JobSubmitted(JobSpec("j1")), *events):
            made.append(event, 1.0, 1e9, 0)


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["drain", *words])
    told = capsys.readouterr()
    return code, told.out + told.err


def test_without_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = said(capsys, "node1", "--run", str(tmp_path))
    assert code == ExitCode.USAGE and f"no journal in {tmp_path}" in text
    journal(tmp_path)
    code, text = said(capsys, "node1", "--run", str(tmp_path))
    assert code == ExitCode.USAGE and "no controller.json" in text


def test_a_job_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal(tmp_path, e.JobEnded(3, "crash loop"))
    code, text = said(capsys, "node1", "--run", str(tmp_path))
    assert code == ExitCode.USAGE and "has ended (exit code 3)" in text


def test_nobody_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    address = presence.Address("127.0.0.1", port, "j1", str(token), "")
    with presence.publish(tmp_path, address):
        code, text = said(capsys, "node1", "--run", str(tmp_path))
        assert code == ExitCode.UNREACHABLE and "nobody was asked: no controller at" in text
    code, text = said(capsys, "node1", "--run", str(tmp_path))
    assert code == ExitCode.GONE and "launcher is gone" in text


def test_a_controller_that_says_no(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Unknown targets, the only node, a worker of a job without a session; and a token that is not the job's."""
    with LocalRun(tmp_path, ENDING, "--no-zygote", "--nproc-per-node", "1", args=("wait", "--attempts", "1")) as run:
        run.until(lambda: (tmp_path / "ready-0-0").exists())
        where = ("--run", str(run.run_dir))
        code, text = said(capsys, "node7", *where)
        assert code == ExitCode.USAGE and "no worker 'node7' in this job: its nodes are node0" in text
        code, text = said(capsys, "node0", *where)
        assert code == ExitCode.USAGE and "without node0 nobody of the nodes would be left" in text
        code, text = said(capsys, "0", *where)
        assert code == ExitCode.USAGE and "node0/0 cannot leave alone" in text
        token = run.run_dir / "token"
        secret = token.read_text()
        token.write_text("0" * 64)
        code, text = said(capsys, "node7", *where)
        assert code == ExitCode.UNREACHABLE and "token" in text
        token.write_text(secret)
        run.signal(signal.SIGTERM)
        run.wait()
    assert not run.events(e.DrainAsked)


def test_a_ledger_of_a_job_without_sessions_is_empty(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", str(tmp_path)]) == ExitCode.USAGE
    journal(tmp_path, e.JobEnded(0, "done"))
    assert main(["ledger", str(tmp_path)]) == ExitCode.OK
    assert "0 steps committed" in capsys.readouterr().out
