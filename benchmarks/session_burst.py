"""What one save of 1,000 sessions costs the controller, for benchmarks/observability_journal.py.

125 nodes' machines (control.node) hear of the save from each of their 8 sessions, scattered over some milliseconds of a
virtual clock; what they decide to report goes to a controller as messages, whose processor time is measured.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

import msgspec
from long_journal import SLOTS, LongJob

from everstep.control import node as n
from everstep.control.controller import Controller
from everstep.control.urgency import MERGE_S
from everstep.core.clock import SystemClock
from everstep.core.config import RunConfig
from everstep.core.saves import Saves
from everstep.core.types import NodeReport
from everstep.core.virtual import VirtualClock

STEP = 1800
SCATTER_S = {"requested": 0.005, "durable": 0.2}  # the members commit a step together; disks take their time


class SavingNode:
    """A node's machine and its shell: each report at once, or as the machine wants it."""

    def __init__(self, clock: VirtualClock, node: n.Node, merges: bool, sent: list[bytes]) -> None:
        self.clock, self.node, self.merges, self.sent = clock, node, merges, sent
        self.due = False

    def hear(self, local_rank: int, saves: Saves) -> None:
        known = self.node.report.workers[local_rank].session
        assert known is not None
        said = msgspec.structs.replace(known, committed=STEP, saves=saves)
        self.node, commands = n.step(self.node, n.SessionSpoke(1, local_rank, said), self.clock.now_s)
        for command in commands:
            assert isinstance(command, n.Report)
            if not (self.merges and command.soon):
                self.send()
            elif not self.due:
                self.due = True
                self.clock.after(MERGE_S, self.send)

    def send(self) -> None:
        self.due = False
        self.sent.append(msgspec.msgpack.encode(self.node.report))


def reports(job: LongJob, merges: bool) -> list[bytes]:
    """Messages of all nodes in the order in which they are sent."""
    clock, chance, sent = VirtualClock(job.now), random.Random(3), list[bytes]()
    for report in job.reports.values():
        node = SavingNode(clock, n.Node(report), merges, sent)
        for k in range(SLOTS):
            for saves, what in ((Saves(STEP), "requested"), (Saves(STEP, STEP), "durable")):
                late_s = 0.3 if what == "durable" else 0.0
                clock.after(late_s + chance.uniform(0, SCATTER_S[what]), node.hear, k, saves)
    while clock.step(job.now + 10.0):
        pass
    return sent


def controller_s(folder: Path, merges: bool) -> tuple[int, float]:
    """How many reports, and the processor time of a controller that takes them all."""
    job = LongJob()
    list(job.entries(0))
    messages = reports(job, merges)
    folder.mkdir()
    controller = Controller(folder, RunConfig(), "gpt-30b", SystemClock())
    controller.job = job.job
    began = time.process_time()
    for message in messages:
        report = msgspec.msgpack.decode(message, type=NodeReport)
        assert isinstance(report, NodeReport)
        controller._from_agent(report, controller.clock.now())
    took_s = time.process_time() - began
    assert controller.job.saves.durable == STEP
    controller.journal.close()
    controller.tender.stop()
    return len(messages), took_s
