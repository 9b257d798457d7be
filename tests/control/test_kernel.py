"""The kernel's log around an incident, from real files and a real pipe in place of /dev/kmsg."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from everstep.control.causes import Causes
from everstep.control.evidence import Evidence
from everstep.control.kernel import AROUND_S, KernelLog
from everstep.core import events as e
from everstep.core.types import Blame, StacksTaken

XID = "NVRM: Xid (PCI:0000:9d:00): 79, pid=1, GPU has fallen off the bus."
KILLED = "Memory cgroup out of memory: Killed process {} (python) total-vm:411648kB"


def record(text: str, age_s: float = 0.0) -> str:
    return f"3,1402,{int((time.monotonic() - age_s) * 1e6)},-;{text}\n SUBSYSTEM=pci\n DEVICE=c1:11\n"


def test_only_new_lines_of_faults_of_the_machine_go_on_their_way(tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.write_text(record("EXT4-fs error (device sda1): of before"))
    log = KernelLog(str(path))
    assert log.known("n1", ()) == ""
    with path.open("a") as file:
        for text in ("usb 1-1: new device", "traps: python[7] general protection fault ip:7f", XID):
            file.write(record(text))
        file.write(record("nvme0: controller is down; will reset", AROUND_S + 9))
        file.write(KILLED.format(41) + "\n" + KILLED.format(42) + "\n" + record("mlx5_core: health compromised")[:30])
    assert log.known("n1", {42}).splitlines() == [f"kernel: {XID}", "kernel: " + KILLED.format(42)]
    with path.open("a") as file:
        file.write(record("mlx5_core: health compromised")[30:])
    assert "mlx5_core: health compromised" in log.known("n1", {42}) and XID in log.known("n1", {42})
    log.close()
    assert XID in log.known("n1", ())  # and nothing new


def test_a_pipe_and_what_cannot_be_read(tmp_path: Path) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    log = KernelLog(str(pipe))
    assert log.known("n1", ()) == ""
    with pipe.open("w") as file:
        file.write(f"{XID}\n")
    assert log.known("n1", ()) == f"kernel: {XID}"
    log.close()
    for path in ("", str(tmp_path / "none"), str(tmp_path)):
        assert KernelLog(path).known("n1", ()) == ""


@pytest.mark.parametrize("node", ["n1", "n2"])
def test_the_kernel_of_the_culprits_node_says_why(tmp_path: Path, node: str) -> None:
    """Not any other node's."""
    causes, taken = Causes(), StacksTaken(node, "I001", 1, {}, {-1: f"kernel: {XID}"})
    causes.saw(e.IncidentOpened("I001", "crash", (Blame(1, "n1", "signal"),), "rank 1 was killed"))
    causes.saw(e.IncidentClosed("I001", "recovered"))
    found = causes.read(taken)
    assert [each.verdict.culprits[0].cause for each in found] == ["device-lost"] * (node == "n1")
    assert [each.verdict.culprits[0].node for each in found] == ["n1"] * (node == "n1")
    assert Evidence(tmp_path).write("I001", taken) == (f"incidents/I001/{node}-kernel.txt",)
