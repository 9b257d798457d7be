"""`everstep status` when nobody answers: a killed launcher, a stopped controller, a run of another host."""

from __future__ import annotations

import os
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


def said(capsys: pytest.CaptureFixture[str], run_dir: Path) -> tuple[int, str]:
    code = main(["status", str(run_dir)])
    return code, capsys.readouterr().out


def test_a_killed_launcher_is_not_called_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--no-zygote", "--nproc-per-node", "1", "--set", "control.stop_margin_s=1")
    with LocalRun(tmp_path, ENDING, *options, args=("wait", "--attempts", "1")) as run:
        run.until(lambda: (tmp_path / "ready-0-0").exists())
        code, text = said(capsys, run.run_dir)
        assert code == ExitCode.OK and ": running, epoch 1" in text
        controller = run.kill_controller(signal.SIGSTOP)
        try:
            code, text = said(capsys, run.run_dir)
        finally:
            os.kill(controller, signal.SIGCONT)
        assert code == ExitCode.UNREACHABLE and "no controller answers, last event " in text
        assert f"its launcher on {socket.gethostname()} lives" in text
        run.signal(signal.SIGKILL)
        run.wait()
        code, text = said(capsys, run.run_dir)
        assert code == ExitCode.GONE
        assert "ended without a word (killed?), last event " in text.splitlines()[0]
        assert "while running" in text.splitlines()[0]
        for command in ("report", "incidents", "top"):
            assert main([command, str(run.run_dir)]) == ExitCode.OK
            assert "note: the job ended without a word: its launcher is gone" in capsys.readouterr().err


@pytest.fixture
def silent(tmp_path: Path) -> Path:
    """A run folder whose journal has no end, and whose launcher was here; nobody listens at its address."""
    with Journal.open(tmp_path / "journal.jsonl", "j1") as journal:
        journal.append(e.JobSubmitted(JobSpec("j1")), 1.0, 1e9, 0)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token = tmp_path / "token"
    token.write_text("0" * 64)
    token.chmod(0o600)
    presence.publish(tmp_path, presence.Address("127.0.0.1", port, "j1", str(token), "")).close()
    return tmp_path


def written(run_dir: Path, **changes: str) -> None:
    """controller.json as another machine would have written it."""
    path = run_dir / presence.NAME
    text = path.read_text()
    for old, new in changes.items():
        text = text.replace(f'"{old}":"{getattr(presence.read(run_dir), old)}"', f'"{old}":"{new}"')
    path.write_text(text)


def test_a_run_of_this_machine_is_gone_when_its_lock_is_free(silent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, silent)[0] == ExitCode.GONE


@pytest.mark.parametrize(
    ("machine", "boot", "part"),
    [
        ("elsewhere", "another-boot", "cannot be told from here: ask on elsewhere, where it was started"),
        ("", "", "cannot be told from here: ask on the machine where it was started"),
    ],
    ids=["another host", "written before hosts were recorded"],
)
def test_a_run_of_another_host_is_never_called_dead(
    silent: Path, capsys: pytest.CaptureFixture[str], machine: str, boot: str, part: str
) -> None:
    written(silent, machine=machine, boot=boot)
    code, text = said(capsys, silent)
    assert code == ExitCode.UNREACHABLE
    assert part in text and "ended" not in text and "gone" not in text


def test_a_journal_alone_is_shown(silent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (silent / presence.NAME).unlink()
    code, text = said(capsys, silent)
    assert code == ExitCode.UNREACHABLE and "no answer: its run folder has no controller.json" in text


def test_an_end_in_the_journal_needs_no_answer(silent: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal.open(silent / "journal.jsonl", "j1") as journal:
        journal.append(e.JobEnded(4, "hung"), 2.0, 1e9 + 1, 0)
    code, text = said(capsys, silent)
    assert code == ExitCode.OK and "ended with exit code 4: hung" in text
