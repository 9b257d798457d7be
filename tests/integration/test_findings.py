"""What detectors find in a real job, from the process that sees it to the journal and the console."""

from __future__ import annotations

import time
from pathlib import Path

from everstep.core import events as e
from everstep.testing.local import LocalRun

SCRIPT = Path(__file__).parent / "scripts" / "bad_batches.py"
XID = "NVRM: Xid (PCI:0000:9d:00): 79, pid=1, GPU has fallen off the bus."


def test_bad_batches_and_a_machine_whose_kernel_says_what_broke(tmp_path: Path) -> None:
    """Each anomaly is an incident until the metric is back; nobody is stopped for it. Then a worker dies, after its
    node's kernel reported a lost device (a file in the place of /dev/kmsg)."""
    (kernel := tmp_path / "kmsg").touch()
    with LocalRun(tmp_path, SCRIPT, "--nproc-per-node", "2", "--set", f"logs.kernel={kernel}") as run:
        run.until(lambda: len([x for x in run.events(e.IncidentClosed) if x.incident.startswith("A")]) == 3)
        told = [judged.anomaly for judged in run.events(e.AnomalyJudged)]
        assert {(x.metric, x.step, x.cause) for x in told} == {
            ("loss", 61, "spike"),
            ("gradients", 81, "non-finite"),
            ("loss", 81, "non-finite"),
        }
        assert told[0].high is not None and told[0].value is not None and told[0].value > 100 * told[0].high
        assert {x.kind for x in run.events(e.IncidentOpened)} == {"anomaly"} and not run.events(e.Alert)
        assert len(run.events(e.EpochFormed)) == 1
        kernel.write_text(f"3,77,{int(time.monotonic() * 1e6)},-;{XID}\n")
        run.kill(rank=1)
        (found,) = run.until(lambda: run.events(e.CauseFound))
        (blame,) = found.verdict.culprits
        assert (blame.node, blame.cause, blame.detail) == ("node0", "device-lost", f"kernel: {XID}")
        assert (run.run_dir / "incidents" / found.incident / "node0-kernel.txt").read_text() == f"kernel: {XID}"
    assert "incident A001 (anomaly): loss is " in run.text()
    assert "incident A001: loss is as usual again at step 62" in run.text()
