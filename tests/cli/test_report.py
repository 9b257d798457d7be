"""`everstep report`, `incidents`, `explain` and `top` over a recorded journal; and the progress lines of `run`."""

from __future__ import annotations

import gzip
import json
import subprocess
from pathlib import Path

import pytest

from everstep.cli.main import main
from everstep.cli.narrate import Narrator
from everstep.cli.viewing import newest
from everstep.control import tending
from everstep.control.journal import Follower, Journal
from everstep.core import events as e
from everstep.core.config import Report, RunConfig
from everstep.core.decisions import Action, Alternative, Decision
from everstep.core.errors import ExitCode
from everstep.core.load import DeviceLoad, NodeLoad
from everstep.core.types import Blame, EpochPlan, Exit, ExitCause, JobSpec, Member
from everstep.observe.progress import line
from everstep.observe.view import KEPT_INCIDENTS, EpochView, Fleet, IncidentView, View

KILLED = (Blame(1, "node0", "signal", "was killed by signal 9"),)
DECISION = Decision(Action.RESPAWN, 2.0, "1 s down", "node0", (Alternative(Action.STOP, 7200.0, "3600 s down"),))


def load(busy: int, free: int, workers: tuple[int, ...], device: int) -> e.LoadSeen:
    return e.LoadSeen({"node0": NodeLoad(busy, 8, free, 1000, workers=workers, devices=(DeviceLoad(device, 90, 60),))})


def story() -> list[tuple[float, e.AnyEvent]]:
    """Two workers, one killed at step 40; 90 steps in all."""
    plan = EpochPlan(1, (Member("node0", "i", "127.0.0.1", 0, 0, 2),), 2, "127.0.0.1", 1, 0)
    again = EpochPlan(2, plan.members, 2, "127.0.0.1", 2, 1)
    ended = Exit(ExitCause.SIGNAL, 12.0, signal=9, step=40, total_step=40)
    return [
        (0.0, e.JobSubmitted(JobSpec("job", script="train.py"))), (0.1, e.NodeJoined("node0", "i", "127.0.0.1", 2)),
        (0.2, e.EpochFormed(plan)), (0.3, e.StageChanged("forming", "running")),
        *((2.0 + 0.25 * n, e.StepsSeen(1, n + 1, n + 1, 2.0 + 0.25 * n, 2.0)) for n in range(0, 40, 4)),
        (12.0, e.WorkerEnded(1, "node0", ended, 12.0)),
        (12.0, e.IncidentOpened("I001", "crash", KILLED, "rank 1 on node0 was killed by signal 9 at step 40")),
        (12.1, e.Decided("I001", DECISION)), (12.1, e.EvidenceSaved("I001", ("incidents/I001/rank1-log.txt",))),
        (13.0, e.EpochFormed(again)), (13.1, e.StageChanged("forming", "running")),
        *((14.0 + 0.25 * n, e.StepsSeen(2, n + 1, n + 41, 14.0 + 0.25 * n, 14.0)) for n in range(0, 50, 5)),
        (14.0, e.IncidentClosed("I001", "recovered", 2.25, {"detect": 0.25, "stop": 1.0, "first-step": 1.0})),
        (15.0, load(600, 100, (100, 250), 80)), (25.0, load(200, 20, (100, 150), 60)),
        (27.0, e.JobEnded(0, "every worker ran to its end")),
    ]  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    (folder / "incidents/I001").mkdir(parents=True)
    (folder / "incidents/I001/rank1-log.txt").write_text("x" * 9000 + "\nlast words\n")
    with Journal.open(folder / "journal.jsonl", "job") as journal:
        for at_s, event in sorted(story(), key=lambda item: item[0]):
            journal.append(event, at_s, 1.7e9 + at_s, 1)
    return folder


def said(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main(line) == ExitCode.OK
    return capsys.readouterr().out


def test_report(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = said(capsys, "report", str(run), "--price", "2.5")
    assert "The job finished after 27.0 s" in text and "Training stood still for 2.2 s" in text
    html = (run / "report.html").read_text()
    for told in ("processors 50% busy", "98% used at most, on node0", "node0/1, 250 % of a processor", "devices 70%"):
        assert told in html
    assert "last words" in html and "x" * 6200 not in html, "the end of the culprit's log is quoted"
    assert 'href="incidents/I001/rank1-log.txt"' in html
    data = json.loads((run / "report.json").read_bytes())
    assert data["num_failures"] == 1 and data["price_per_hour"] == 2.5
    said(capsys, "report", str(run / "journal.jsonl"), "--out", str(tmp_path / "other.html"))
    assert 'href="incidents/' not in (tmp_path / "other.html").read_text(), "from elsewhere a link would lead nowhere"
    assert json.loads((tmp_path / "other.json").read_bytes())["job"] == "job"


def test_a_report_quotes_only_what_belongs_to_the_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "rank1-log.txt").write_text("secret\n")
    with Journal.open(run / "journal.jsonl", "job") as journal:
        journal.append(e.IncidentOpened("I002", "crash", KILLED, "again"), 28.0, 1.7e9, 1)
        journal.append(e.EvidenceSaved("I002", ("../rank1-log.txt",)), 28.0, 1.7e9, 1)
    said(capsys, "report", str(run))
    html = (run / "report.html").read_text()
    assert "secret\n" not in html and "last words" in html


def test_incidents_and_explain(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "incidents", str(run))
    assert "I001  12.0 s" in text and "rank 1 on node0" in text and "2.2 s" in text
    (only,) = json.loads(said(capsys, "incidents", str(run), "--json"))
    assert only["id"] == "I001" and only["downtime_s"] == 2.25
    text = said(capsys, "explain", "i001", "--run", str(run), "--price", "100")
    for part in (
        "A worker died: rank 1 on node0 was killed by signal 9 at step 40",
        "a new process in its place (respawn-in-place): 1 s down, 2.00 accelerator-seconds expected",
        "instead of stop: 3600 s down",
        "training stood still for 2.2 s",
        "Look for who sends signals on node0",
        "incidents/I001/rank1-log.txt",
        "Time line",
    ):
        assert part in text
    assert json.loads(said(capsys, "explain", "I001", "--run", str(run), "--json"))["answer"] == "respawn-in-place"


def test_an_incident_that_is_no_longer_kept_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Journal.open(tmp_path / "journal.jsonl", "job") as journal:
        journal.append(e.JobSubmitted(JobSpec("job")), 0.0, 1.7e9, 0)
        for n in range(KEPT_INCIDENTS + 4):
            journal.append(e.IncidentOpened(f"I{n:03d}", "crash", KILLED, f"death {n}"), n + 1.0, 1.7e9 + n, 1)
            journal.append(e.IncidentClosed(f"I{n:03d}", "recovered", 0.5), n + 1.5, 1.7e9 + n, 1)
    assert "and 4 before these" in said(capsys, "incidents", str(tmp_path))
    assert "death 1\n" in said(capsys, "explain", "I001", "--run", str(tmp_path))


NO_TRACE = (
    ("ranks", "3-0", "3-0: 3-0 names none"),
    ("most", "0", "0: expected"),
    ("newest", "-5", "-5.0: expected"),
    ("first", "nan", "nan: expected"),
    ("out", "trace.txt", "trace.txt: expected"),
    ("logs", "/no/such/folder", "/no/such/folder: there is no"),
)


def test_mistakes_are_one_line(run: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for command, words in (
        (("explain", "I009", "--run", str(run)), "no incident I009"),
        (("incidents", str(tmp_path / "nowhere")), "no journal in"),
        (("report", str(run), "--price", "-1"), "--price -1.0: expected"),
        (("report", str(run), "--out", str(tmp_path / "no/such/folder.html")), "cannot be written"),
        (("top", str(run), "--every", "0"), "--every 0.0: expected"),
        (("dashboard", str(run), "--port", "99999"), "--port 99999: expected"),
        *((("trace", str(run), f"--{option}", value), f"--{option} {told}") for option, value, told in NO_TRACE),
    ):
        assert main(command) == ExitCode.USAGE
        assert words in capsys.readouterr().err


DAMAGED = [("incidents",), ("top",), ("trace",), ("report",), ("status",), ("explain", "I001", "--run")]


def test_a_rank_too_many_is_no_reason_to_fill_the_memory(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "0 workers" in said(capsys, "trace", str(run), "--ranks", "0-99999999999")


@pytest.mark.parametrize("line", DAMAGED, ids=lambda line: line[0])
def test_damage_is_told_and_read_over(line: tuple[str, ...], run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = run / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    lines[3] = lines[3].replace(b"{", b"[", 1)  # that it runs
    lines[5] = lines[5].replace(b"StepsSeen", b"StepsSung")
    journal.write_bytes(b"".join(lines))
    assert main([*line, str(run)]) == ExitCode.OK
    told = capsys.readouterr().err
    assert told.count("line 4 is damaged") == 1 and told.count("1 of its events are of types") == 1
    with gzip.open(run / "journal-000001.jsonl.gz", "wb") as packed:  # the only file that was kept
        packed.write(journal.read_bytes())
    journal.unlink()
    assert main([*line, str(run)]) == ExitCode.OK
    (run / "journal-000001.jsonl.gz").unlink()
    journal.write_bytes(b"no journal\n")
    assert main([*line, str(run)]) == ExitCode.FAILED
    assert "nothing in" in capsys.readouterr().err
    journal.unlink()
    journal.mkdir()
    assert main([*line, str(run)]) == ExitCode.USAGE


def test_a_long_journal_is_not_read_from_its_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Views are kept, so what lies before the last of them is not needed."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder, size in ((whole, 10**6), (parts, 1500)):
        folder.mkdir()
        with Journal.open(folder / "journal.jsonl", "job", size) as journal:
            for at_s, event in sorted(story(), key=lambda item: item[0]):
                journal.append(event, at_s, 1.7e9 + at_s, 1)
    tending.tend(parts / "journal.jsonl")
    (parts / "journal-000001.jsonl.gz").unlink()
    (parts / "journal-000002.jsonl.gz").unlink()
    told = [said(capsys, "status", str(folder)).replace("(median)", "(of late)") for folder in (parts, whole)]
    assert told[0] == told[1]
    narrator = Narrator(parts, "job")
    narrator.progress.viewer = newest(parts)[0]
    narrator.follower = Follower(parts / "none")
    narrator.end(0)
    assert set(told[0].splitlines()) < set(capsys.readouterr().err.splitlines())


def test_top_prints_a_screen_where_there_is_no_terminal(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, "top", str(run))
    parts = ("job  finished", "throughput", "productive", "node0", "I001", "rank 1 on node0", "recovered")
    for part in (*parts, "▃ 25%", "█ 98%", "▅ 60%"):
        assert part in text
    assert "\x1b" not in text


def test_run_writes_the_report_at_its_end(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    narrator = Narrator(run, "job", RunConfig(report=Report(price=3.0)))
    narrator.catch_up()
    narrator.end(0)
    assert f"report: {run / 'report.html'}" in capsys.readouterr().err
    assert json.loads((run / "report.json").read_bytes())["price_per_hour"] == 3.0


def test_a_full_disk_costs_the_report_and_nothing_else(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12k", "tmpfs", str(run)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no small disk to fill: mounting needs root")
    try:
        with Journal.open(run / "journal.jsonl", "job") as journal:
            journal.append(e.JobSubmitted(JobSpec("job")), 0.0, 1.7e9, 0)
        Narrator(run, "job").end(0)
        left = {path.name for path in run.iterdir()}
    finally:
        subprocess.run(["umount", str(run)], check=True)
    assert "no report.html: No space left on device" in capsys.readouterr().err
    assert left == {"journal.jsonl", "summary.txt"}, "what came of it before is whole, and room is left"


def test_a_full_disk_leaves_the_trace_of_before(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("no small disk to fill: mounting needs root")
    try:
        (disk / "trace.json").write_text("of before")
        assert main(["trace", str(run), "--out", str(disk / "trace.json")]) == ExitCode.USAGE
        assert [path.read_text() for path in disk.iterdir()] == ["of before"]
    finally:
        subprocess.run(["umount", str(disk)], check=True)
    assert "No space left on device" in capsys.readouterr().err


def test_a_defect_in_the_progress_ends_nothing(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrator = Narrator(run, "job")
    monkeypatch.setattr(narrator.progress.viewer, "add", {}.__getitem__)
    narrator.end(0)
    said = capsys.readouterr().err
    assert "internal error, please report it: no progress" in said and "incident I001" in said


def test_the_progress_line_tells_what_fits() -> None:
    view = View(step=240, goal=300, step_s=0.25, epoch=3, ettr=0.931, now_s=60.0, fleet=Fleet(4, 3, 0, 1))
    assert line(View(stage="forming")) == "forming, no step yet"
    view.metrics = {"lr": 0.1, "loss": 2.3123}
    view.incidents = [IncidentView("I001", "crash", 2, 20.0, "", outcome="recovered")]
    full = "step 240 of 300 | loss 2.312 | 4 steps/s | epoch 3 | 3 of 4 members | ETTR 93.1% | "
    assert line(view) == full + "I001 crash 40.0 s ago, recovered"
    assert line(view, 45) == "step 240 of 300 | loss 2.312 | 4 steps/s"
    view.epochs = [EpochView(7, 30.0, 3, formation=True)]  # as the page counts them
    assert "| epoch 7 |" in line(view)
    assert line(view, 5) == "step "
