"""Forming an epoch: after each kind of end, over several hosts, as members come and go."""

from __future__ import annotations

import json
import signal
import socket
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from everstep.core import events as e
from everstep.core.errors import ExitCode
from everstep.testing.local import LocalRun

SCRIPTS = Path(__file__).parent / "scripts"
TRAIN = SCRIPTS / "train.py"
LONG = ("--steps", "100000", "--save-every", "5")
RESTARTS = 20


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# A1: every restart forms at once, from nothing ----------------------------------------------------------


def test_twenty_restarts_each_form_at_once_with_a_store_of_their_own(tmp_path: Path) -> None:
    """The worker that fails alternates, and so does how: SIGKILL, an exception, os._exit(3)."""
    options = ("--nproc-per-node", "2")
    with LocalRun(tmp_path, SCRIPTS / "fresh_store.py", *options, args=(str(RESTARTS),)) as run:
        assert run.wait() == 0, run.text()
        plans = [x.plan for x in run.events(e.EpochFormed)]
        assert len(plans) == RESTARTS + 1
        assert len({p.master_port for p in plans}) == RESTARTS + 1, "a store's port was used again"
        for rank in (0, 1):
            seen = lines(tmp_path / f"formed-{rank}.jsonl")
            assert [x["attempt"] for x in seen] == list(range(RESTARTS + 1))
            assert [x["port"] for x in seen] == [p.master_port for p in plans]
            assert not [x for x in seen if x["stale"]], "something of an earlier epoch was readable"
        took = machinery(run)
        print(f"incident to running: median {statistics.median(took):.3f} s, longest {max(took):.3f} s")
        assert len(took) == RESTARTS and statistics.median(took) < 1.0 and max(took) < 5.0, took
        first = {x.incident: x.culprits[0] for x in run.events(e.IncidentUpdated)}
        assert [first[f"I{n:03d}"].cause for n in (1, 2, 3)] == ["signal", "error", "exit-code"]
        assert [first[f"I{n:03d}"].rank for n in (1, 2, 3)] == [0, 1, 0]


def machinery(run: LocalRun) -> list[float]:
    """Of each incident: seconds until every worker of the next epoch was on its way."""
    opened, took = 0.0, []
    for entry in run.entries():
        if isinstance(entry.event, e.IncidentOpened):
            opened = entry.t_s
        elif isinstance(entry.event, e.StageChanged) and entry.event.new == "running" and opened:
            took.append(entry.t_s - opened)
            opened = 0.0
    return took


# A7: alone is not a job ---------------------------------------------------------------------------------


def test_nobody_trains_alone_when_the_others_are_missing(tmp_path: Path) -> None:
    """An unreachable controller, a wrong token, a node too few: each a loud end, none a smaller world."""
    tokens = [tmp_path / name for name in ("right", "wrong")]
    for number, token in enumerate(tokens):
        token.write_text(f"{number}" * 64 + "\n")
        token.chmod(0o600)
    endpoint = f"127.0.0.1:{free_port()}"
    common = ("--no-zygote", "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint")
    with ExitStack() as stack:

        def start(name: str, *options: str) -> LocalRun:
            (tmp_path / name).mkdir()
            return stack.enter_context(LocalRun(tmp_path / name, SCRIPTS / "ending.py", *options, args=("well",)))

        host = start("host", *common, endpoint, "--token-file", str(tokens[0]), "--rdzv-conf", "join_timeout=4")
        host.until(lambda: host.events(e.NodeJoined))
        join = ("--rdzv-conf", "is_host=0,join_timeout=1", "--token-file")
        wrong = start("wrong-token", *common, endpoint, *join, str(tokens[1]))
        nobody = start("nobody", *common, f"127.0.0.1:{free_port()}", *join, str(tokens[0]))
        for run, words in ((wrong, "token"), (nobody, "127.0.0.1")):
            assert run.wait() == ExitCode.UNREACHABLE, run.text()
            assert "everstep: error:" in run.text() and words in run.text()
            assert "Traceback" not in run.text()
        assert host.wait() == ExitCode.TOO_FEW_NODES
        assert "1 of at least 2 nodes" in host.text()
        assert not host.events(e.EpochFormed)
        assert not list(tmp_path.glob("*/ready-*"))


def test_a_second_launcher_joins_and_the_job_is_one(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("2" * 64 + "\n")
    token.chmod(0o600)
    port = free_port()
    options = ("--nnodes", "2", "--token-file", str(token))
    with (
        LocalRun(tmp_path, TRAIN, *options, "--rdzv-endpoint", f"127.0.0.1:{port}", args=("--steps", "20")) as host,
        LocalRun(tmp_path, TRAIN, *options, "--controller", f"127.0.0.1:{port}", args=("--steps", "20")) as joined,
    ):
        assert host.wait() == 0, host.text()
        assert joined.wait() == 0, joined.text()
    assert [x["world"] for x in lines(tmp_path / "losses-1.jsonl")] == [2] * 20


# A9: spares ---------------------------------------------------------------------------------------------


def test_a_spare_is_parked_promoted_and_the_lost_node_parked(tmp_path: Path) -> None:
    options = ("--local-nodes", "2", "--nnodes", "2", "--standbys", "1")
    with LocalRun(tmp_path, TRAIN, *options, args=LONG) as run:
        run.until_step(3)
        stayer, leaver = [m.node for m in run.plan().members]
        run.until(lambda: len(run.events(e.NodeJoined)) == 3)
        (spare,) = {"node0", "node1", "node2"} - {stayer, leaver}
        run.kill_agent(leaver)
        run.until_step(3, epoch=2)
        assert [m.node for m in run.plan().members] == [stayer, spare], "the spare has the leaver's place"
        run.until(lambda: [x.node for x in run.events(e.NodeJoined)].count(leaver) == 2)
        run.kill_agent(spare)
        run.until_step(3, epoch=3)
        assert [m.node for m in run.plan().members] == [stayer, leaver], "it was parked, and is promoted"
        assert all(x.plan.restart_count == 0 for x in run.events(e.EpochFormed)), "a lost node costs no restart"


# A10, A11: any node may be lost, and the controller -----------------------------------------------------


def test_the_node_with_the_store_may_be_lost(tmp_path: Path) -> None:
    """It comes back and is taken in again; unless it is back before the others have stopped, they go on meanwhile."""
    with LocalRun(tmp_path, TRAIN, "--local-nodes", "2", "--nnodes", "1:2", args=LONG) as run:
        run.until_step(3)
        first = run.plan()
        run.kill_agent("node0")
        run.until(lambda: run.plan().epoch > 1 and len(run.plan().members) == 2)
        *between, last = [formed.plan for formed in run.events(e.EpochFormed)][1:]
        assert [[m.node for m in plan.members] for plan in between] in ([], [["node1"]])
        assert {m.node for m in last.members} == {"node0", "node1"}
        assert last.master_port not in {plan.master_port for plan in (first, *between)}  # a store of its own
        run.until_step(3, epoch=last.epoch)


def test_the_controller_may_be_killed(tmp_path: Path) -> None:
    with LocalRun(tmp_path, TRAIN, "--nproc-per-node", "2", args=("--steps", "100000", "--save-every", "5")) as run:
        run.until_step(5)
        workers = run.pids()
        made = len(lines(tmp_path / "losses-0.jsonl"))
        run.kill_controller()
        run.until(lambda: [x.term for x in run.events(e.ControllerStarted)] == [1, 2])
        run.until(lambda: len(lines(tmp_path / "losses-0.jsonl")) > made + 20)
        assert run.pids() == workers and len(run.events(e.EpochFormed)) == 1
        assert not run.events(e.IncidentOpened)
        run.kill(rank=1)
        run.until_step(3, epoch=2)
        assert run.events(e.IncidentClosed)[-1].outcome == "recovered"
        run.kill_controller()  # and both at once
        run.kill(rank=0)
        run.until_step(3, epoch=3)
        assert run.events(e.ControllerStarted)[-1].term == 3


# A13: dying at a bad moment -----------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "silent"])
def test_an_agent_lost_before_the_first_exchange_is_dropped_at_once(tmp_path: Path, signum: signal.Signals) -> None:
    """Its peer waits in init_process_group, for minutes if nobody woke it."""
    quick = ("--set", "control.lease_s=2", "--set", "control.stop_margin_s=1")
    with LocalRun(tmp_path, SCRIPTS / "late.py", "--local-nodes", "2", "--nnodes", "1:2", *quick) as run:
        run.until(lambda: (tmp_path / "waiting-0").exists() and (tmp_path / "waiting-1").exists())
        late = run.plan().members[1].node
        began = time.monotonic()
        run.kill_agent(late, signum)
        run.until(lambda: len(run.events(e.EpochFormed)) >= 2)
        assert time.monotonic() - began < 15  # by the grace it would be 30
        assert late in {x.node for x in run.events(e.NodeLost)}
        assert run.wait() == 0, run.text()
