"""A synthetic journal: 2 nodes x 2 workers, a worker killed at step 40, one hung after step 80, 120 steps in all."""

from __future__ import annotations

import pytest

from everstep.core import events as e
from everstep.core.types import Blame, EpochPlan, Exit, ExitCause, JobSpec, Member, Verdict

SUBMITTED_S, WALL_S = 1000.0, 1.7e9


def plan(epoch: int) -> EpochPlan:
    members = tuple(Member(f"node{i}", f"inc{i}", f"127.0.0.{i + 1}", i, 2 * i, 2) for i in range(2))
    return EpochPlan(epoch, members, 4, "127.0.0.1", 29500, epoch - 1)


class Script:
    """Writes entries at seconds since submission."""

    def __init__(self, clock_s: float = SUBMITTED_S) -> None:
        self.entries: list[e.Entry] = []
        self.clock_s = clock_s
        self.epoch = 0

    def at(self, t: float, *events: e.AnyEvent) -> None:
        for event in events:
            n = len(self.entries) + 1
            self.entries.append(e.Entry(n, self.clock_s + t, WALL_S + t, "demo", self.epoch, event))

    def form(self, t: float, epoch: int) -> None:
        self.epoch = epoch
        self.at(t, e.EpochFormed(plan(epoch)), e.StageChanged("re-forming", "forming"))

    def steps(self, begin: float, step_s: float, count: int, first_total: int, saved: int = -1) -> None:
        """Steps 1..count of the epoch, the first at `begin`; recorded at the first and then about once a second."""
        every = max(1, round(1 / step_s))
        for step in [1, *range(1 + every, count, every), count]:
            t = begin + (step - 1) * step_s
            done = saved if 0 <= saved <= step else -1
            seen = e.StepsSeen(
                self.epoch, step, first_total + step - 1, self.clock_s + t, self.clock_s + begin, 1, done, 200 << 20
            )
            self.at(t + 0.05, seen)


def crash_and_hang() -> list[e.Entry]:
    s = Script()
    s.at(0.0, e.JobSubmitted(JobSpec("demo", script="train_gpt.py")), e.ControllerStarted(1))
    s.at(0.3, *(e.NodeJoined(f"node{i}", f"inc{i}", f"127.0.0.{i + 1}", 2) for i in range(2)))
    s.form(0.5, 1)
    s.steps(2.0, 0.25, 40, 1, saved=30)
    killed = Exit(ExitCause.SIGNAL, 0.0, signal=9, step=40, total_step=40)
    told = "rank 2 on node1 was killed by signal 9 (sent from outside) at step 40"
    culprit = (Blame(2, "node1", "signal", "was killed by signal 9 (sent from outside) at step 40"),)
    victims = tuple(Blame(r, f"node{r // 2}", "error", "raised Connection closed by peer") for r in (0, 1, 3))
    s.at(11.85, e.WorkerEnded(2, "node1", killed, SUBMITTED_S + 11.85))
    s.at(11.85, e.IncidentOpened("I001", "crash", culprit, "signal"), e.StageChanged("running", "evicting"))
    s.at(11.9, e.SurvivorsTold("I001", 0.012), e.EvidenceSaved("I001", ("incidents/I001/rank2-log.txt",)))
    s.at(11.95, e.IncidentUpdated("I001", culprit, victims, told))
    s.form(12.0, 2)
    s.steps(12.9, 0.25, 50, 31, saved=40)
    phases = {"detect": 0.1, "stop": 0.1, "form": 0.05, "first-step": 0.9}
    s.at(12.95, e.IncidentClosed("I001", "recovered", 1.15, phases, 10))
    verdict = Verdict("hang", (Blame(1, "node0", "hang", "does not wait"),), "rank 1 on node0 hangs", 0.9)
    s.at(27.2, e.HangJudged(2, verdict), e.IncidentOpened("I002", "hang", verdict.culprits, verdict.why))
    s.at(27.3, e.EvidenceSaved("I002", ("incidents/I002/rank0-stacks.txt", "incidents/I002/rank1-stacks.txt")))
    s.form(27.5, 3)
    s.steps(28.4, 0.25, 50, 71)
    phases = {"detect": 2.05, "stop": 0.2, "form": 0.1, "first-step": 0.9}
    s.at(28.45, e.IncidentClosed("I002", "recovered", 3.25, phases, 10))
    s.at(41.2, e.StageChanged("running", "finished"), e.JobEnded(0, "every worker ran to its end"))
    return s.entries


@pytest.fixture
def journal() -> list[e.Entry]:
    return crash_and_hang()
