"""What `everstep doctor` takes, prints and exits with."""

from __future__ import annotations

import math
import socket
from pathlib import Path

import msgspec
import pytest

from everstep.cli import doctor as cli
from everstep.core.checkup import Complaint, Examined, GroupSeen, Reading
from everstep.core.errors import ExitCode, UsageError
from everstep.probe import exam

READINGS = (Reading("matmul.rate", 100e9, "cpu"), Reading("version", 0, "torch", "2.13"), Reading("files.limit", 4096))


@pytest.fixture
def well(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own numbers are measured in tests of their own."""
    monkeypatch.setattr(exam, "take", lambda folder, address: list(READINGS))


def test_nothing_is_wrong(tmp_path: Path, well: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.doctor(tmp_path) == ExitCode.OK
    out = capsys.readouterr().out
    assert "nothing is wrong with this machine" in out
    assert "100.0 Gflop/s" in out


def test_slower_than_its_baseline(tmp_path: Path, well: None, capsys: pytest.CaptureFixture[str]) -> None:
    baseline = tmp_path / "earlier.json"
    assert cli.doctor(tmp_path, json=True) == ExitCode.OK
    earlier = msgspec.json.decode(capsys.readouterr().out, type=Examined)
    once = (Reading("matmul.rate", 300e9, "cpu"),)
    baseline.write_bytes(msgspec.json.encode(msgspec.structs.replace(earlier, readings={"this machine": once})))
    assert cli.doctor(tmp_path, baseline=baseline) == ExitCode.UNFIT
    assert "slow: matrix product (cpu): 100.0 Gflop/s, it had 300.0 Gflop/s" in capsys.readouterr().out


def test_a_node_examined_beside_others(tmp_path: Path, well: None, capsys: pytest.CaptureFixture[str]) -> None:
    """The host is a node like any other; with one node there is nothing to compare."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        at = f"127.0.0.1:{probe.getsockname()[1]}"
    token = tmp_path / "token"
    assert cli.doctor(tmp_path, nodes=1, at=at, name="only", token_file=token) == ExitCode.OK
    assert "nothing is wrong with only" in capsys.readouterr().out
    assert token.exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"nodes": 4}, "--nodes needs --at"),
        ({"folder": Path("/nowhere")}, "no such folder"),
        ({"baseline": Path("/nowhere")}, "--baseline"),
        ({"at": "a b"}, "--at"),
        ({"nodes": 0}, "--nodes 0: must be at least 1"),
        ({"slow": math.nan}, "--slow nan: must be above 0, and 1 at most"),
        ({"seconds": -1.0}, "--seconds -1"),
        ({"wait": 0.0}, "--wait 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(arguments: dict[str, object], said: str, well: None) -> None:
    with pytest.raises(UsageError, match=said):
        cli.doctor(**arguments)  # type: ignore[arg-type]


def test_the_table_of_several(capsys: pytest.CaptureFixture[str]) -> None:
    slow = (Reading("matmul.rate", 30e9, "cpu"), *READINGS[1:])
    complaint = Complaint("network.rate", "rings to other nodes: at most 4.0 MB/s", broken=False, sure=False)
    groups = (GroupSeen(("a", "b"), 4e6, passed=False), GroupSeen(("b", "c"), 0.0, passed=False))
    examined = Examined({"a": READINGS, "b": slow, "c": READINGS}, {"b": (complaint,)}, groups, (("b", "c"),))
    assert cli._tell(examined, False, "a") == ExitCode.OK
    assert cli._tell(examined, False, "b") == ExitCode.UNFIT
    assert cli._tell(examined, False, "") == ExitCode.UNFIT
    out = capsys.readouterr().out
    assert "30.0 Gflop/s b" in out
    assert "b: perhaps slow: rings to other nodes" in out
    assert "b - c: slow: this link" in out
    assert msgspec.json.decode(msgspec.json.encode(examined), type=Examined) == examined
