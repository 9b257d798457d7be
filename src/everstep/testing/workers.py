"""One simulated worker process: it takes time to start, to fail and to die.

Some handle SIGTERM and take their time, some ignore it. In a session job its script opens a session (testing.sessions).
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import msgspec

from everstep.control import node as n
from everstep.control import seats
from everstep.core.types import EpochPlan, Exit, ExitCause
from everstep.testing.sessions import SimSession

if TYPE_CHECKING:
    from everstep.testing.actors import SimAgent


class SimWorker:
    """It can step from `started` until it failed or died."""

    __slots__ = (
        "agent",
        "dead",
        "drawn_step",
        "epoch",
        "failed",
        "failure",
        "hung",
        "judged",
        "life",
        "local_rank",
        "manner",
        "name",
        "rank",
        "reaped",
        "session",
        "started",
        "termed",
    )

    def __init__(self, agent: SimAgent, plan: EpochPlan, local_rank: int, life: int) -> None:
        self.agent = agent
        self.epoch = plan.epoch
        self.local_rank = local_rank
        self.life = life
        self.name = seats.name(agent.name, local_rank, life)
        self.rank = plan.rank(agent.name, local_rank)
        self.failure: Exit | None = None
        self.started = self.failed = self.dead = self.hung = self.judged = self.termed = self.reaped = False
        cluster, rng = agent.cluster, agent.cluster.rng
        self.manner = rng.choices(("default", "handles", "ignores"), (6, 3, 1))[0]
        self.drawn_step = 7 if cluster.one_bug else rng.randrange(1_000_000)  # where it is when it ends
        self.session = SimSession(self) if cluster.with_sessions else None
        cluster.truth.born(self)
        slow = rng.random() < 0.15
        cluster.clock.after(rng.uniform(0.02, 5.0 if slow else 0.2), self.start)

    @property
    def can_step(self) -> bool:
        return self.started and not self.failed and not self.dead

    @property
    def step(self) -> int:
        return self.drawn_step if self.session is None else self.session.made

    def start(self) -> None:
        if self.dead or not self.agent.alive:
            return
        self.started = True
        self.agent.cluster.started(self)
        self.agent.feed(n.WorkerStarted(self.epoch, self.local_rank, 1000 + self.rank))
        if self.session is not None:
            self.session.begin()

    def signal(self, signum: int) -> None:
        """A process that is not forked yet cannot be signalled."""
        if self.dead or not self.started:
            return
        rng, plan = self.agent.cluster.rng, self.agent.cluster.clock.after
        if signum == signal.SIGKILL:
            self.judged = not self.agent.node.killed
            plan(rng.uniform(0.001, 0.03), self.die, ExitCause.STOPPED if self.judged else ExitCause.GRACE, 9)
        elif not self.hung and not self.termed:
            self.termed = True
            if self.manner == "default":
                plan(rng.uniform(0.001, 0.05), self.die, ExitCause.STOPPED, 15)
            elif self.manner == "handles":
                plan(rng.uniform(0.1, 1.5 * self.agent.cluster.spec.grace_s), self.die, ExitCause.STOPPED, 0)

    def wake(self) -> None:
        """It was slow, not hung for good: whatever waited for it happens now."""
        if self.hung and self.can_step:
            self.hung = False
            if self.session is not None:
                self.session.catch_up()

    def interrupt(self) -> None:
        """Its collective raised: an error escapes the script, unless it is hung elsewhere, or has a session, which
        waits for the next formation."""
        if self.can_step and not self.hung and self.session is None:
            self.fail("connection closed by peer")

    def fail(self, message: str) -> None:
        """An error escaped the script; the process takes a moment to end."""
        if not self.can_step:
            return
        self.failed = True
        cause = ExitCause.STOPPED if self.termed else ExitCause.ERROR
        self.failure = Exit(cause, self.agent.now(), message=message, step=self.step)
        self.agent.cluster.broken(self)
        self.agent.feed(n.WorkerFailed(self.epoch, self.local_rank, self.failure))
        self.agent.cluster.clock.after(self.agent.cluster.rng.uniform(0.005, 0.3), self.die, cause, 1)

    def die(self, cause: ExitCause, status: int) -> None:
        """`status`: a signal's number or an exit status, as the cause has it."""
        if self.dead:
            return
        could_step, self.dead = self.can_step, True
        cluster = self.agent.cluster
        cluster.ended(self, cause, could_step)
        killed = status == signal.SIGKILL
        code, signum = (None, status) if killed else (status, None)
        exit = Exit(cause, self.agent.now(), code=code, signal=signum, step=self.step)
        if self.failure is not None:  # the error came first; a signal of ours only shortened its end
            exit = msgspec.structs.replace(self.failure, code=code, signal=signum)
        reaped_s = cluster.rng.uniform(0.001, 0.01)
        if self.session is not None and could_step and cause is ExitCause.SIGNAL and cluster.rng.random() < 0.5:
            early = Exit(cause, exit.at_s, message="died; the status is not known yet", step=self.step)
            cluster.clock.after(reaped_s, self.agent.feed, n.WorkerFailed(self.epoch, self.local_rank, early))
            reaped_s = cluster.rng.uniform(0.02, 0.6)
        cluster.clock.after(reaped_s, self.agent.reap, self, exit)
