"""Stacks and profiles of workers, from the command line: in Python, in C code, stopped, on another node, gone."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from everstep.cli.main import main
from everstep.control import procfs
from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

PLACES = Path(__file__).parent / "scripts" / "places.py"
OPTIONS = ("--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "2", "--set", "restart.grace_s=0.5")


def everstep(run: LocalRun, *words: str) -> tuple[int, str, str]:
    """A command about this job: exit code, output, errors."""
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        code = main([words[0], str(run.run_dir), *words[1:]])
    return code, out.getvalue(), errors.getvalue()


def until_placed(run: LocalRun) -> dict[int, int]:
    """Until each script is where it stays: pids by rank."""

    def there() -> bool:
        _, text, _ = everstep(run, "stacks")
        return all(f" in {name}" in text for name in ("trains", "keeps_the_lock")) and text.count(" in sleeps") == 2

    run.until(lambda: run.events(e.EpochFormed) and len(run.pids()) == 4)
    run.until(there)
    return run.pids()


def test_where_workers_are(tmp_path: Path) -> None:
    with LocalRun(tmp_path, PLACES, *OPTIONS) as run:
        pids = until_placed(run)
        stacks_of_all(run, pids)
        profile_of_two_functions(run)
        no_profile_of_who_keeps_the_lock(run)
        gone_meanwhile(run, pids)
        run.signal(signal.SIGTERM)
        run.wait()
        code, _, errors = everstep(run, "stacks")
        assert code == ExitCode.USAGE and "has ended" in errors
    told = run.events(e.LookTaken)
    assert {look.what for look in told} == {"stacks", "profile"}
    assert all((run.run_dir / look.file).exists() for look in told)


def stacks_of_all(run: LocalRun, pids: dict[int, int]) -> None:
    """One of them is stopped: it stays so, and the kernel tells of it. One is on the second node."""
    os.kill(pids[3], signal.SIGSTOP)
    run.until(lambda: (seen := procfs.sample(pids[3])) is not None and seen.stopped)
    code, text, errors = everstep(run, "stacks")
    parts = dict(re.findall(r"== rank (\d)[^\n]*\n(.*?)(?=\n== |\Z)", text, re.DOTALL))
    assert " in trains" in parts["0"] and " in reads_ahead" in parts["0"]  # the second thread
    assert " in keeps_the_lock" in parts["1"] and " in sleeps" in parts["2"]
    assert "stopped (by SIGSTOP" in parts["3"] and " in sleeps" not in parts["3"]
    assert code == ExitCode.FAILED and "rank 3 on node1: it is stopped (state T), and is not woken" in errors
    code, text, errors = everstep(run, "profile", "node1/1", "--seconds", "0.5")
    assert code == ExitCode.FAILED and "is not woken" in errors and "stopped (by SIGSTOP" in text
    stopped = procfs.sample(pids[3])
    assert stopped is not None and stopped.stopped
    code, text, errors = everstep(run, "stacks", "0", "2")
    assert (code, errors) == (ExitCode.OK, "") and "rank 3" not in text
    code, _, errors = everstep(run, "stacks", "9")
    assert code == ExitCode.USAGE and "no worker '9' in this job" in errors


def profile_of_two_functions(run: LocalRun) -> None:
    code, text, errors = everstep(run, "profile", "0", "--seconds", "1.5")
    assert (code, errors) == (ExitCode.OK, "")
    page = Path(text.partition("flame graph: ")[2].strip())
    boxes = re.findall(r"<title>(\w+) \(\S+\): ([\d.]+)%", page.read_text())
    shares = {name: float(share) for name, share in boxes}
    assert shares["long_one"] > 55 > 45 > shares["short_one"] > 5, shares
    assert "reads_ahead" not in shares
    code, text, _ = everstep(run, "profile", "0", "--seconds", "0.3", "--threads")
    assert code == ExitCode.OK and "reads_ahead" in text


def no_profile_of_who_keeps_the_lock(run: LocalRun) -> None:
    """In its place: its stacks, and why."""
    code, text, errors = everstep(run, "profile", "1", "--seconds", "0.3")
    assert code == ExitCode.FAILED and " in keeps_the_lock" in text
    assert "rank 1 on node0: no sample in 0.3 s" in errors


def gone_meanwhile(run: LocalRun, pids: dict[int, int]) -> None:
    """At once, and not when the sampling would have been over. What a person saw before is no evidence of its end."""
    command = [sys.executable, "-m", "everstep", "profile", str(run.run_dir), "2", "--seconds", "50"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as asking:
        run.until(lambda: "sampler.py" in everstep(run, "stacks", "2")[1])
        os.kill(pids[2], signal.SIGKILL)
        _, errors = asking.communicate(timeout=30)
    assert asking.returncode == ExitCode.FAILED and "rank 2 on node1: its process ended meanwhile" in errors
    run.until(lambda: run.events(e.EvidenceSaved) or len(run.events(e.EpochFormed)) > 1)
    assert not list(run.run_dir.glob("incidents/*/rank2-stacks.txt"))
