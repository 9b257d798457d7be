"""Random SIGKILLs of a job with sessions, at random moments: no committed step is lost, nothing is left behind.

    python benchmarks/soak.py [--quick | --full] [--json]

Two nodes of two workers and a spare node. Killed are members (one, two at once, one while the others recover), workers
without a role, agents with all they run, and the controller; never the last member that holds the state. After it the
invariants of tests/integration/session_harness.py are checked for every step. --quick makes 20 kills, --full 300.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

from harness import ROOT, Claim, arguments, median, say, show

from everstep.control import procfs
from everstep.core import events as e

sys.path.insert(0, str(ROOT / "tests" / "integration"))
from session_harness import SessionRun, alive

OPTIONS = ("--nnodes", "2", "--local-nodes", "2", "--nproc-per-node", "2", "--standbys", "1")
OPTIONS = (*OPTIONS, "--max-restarts", "100000", "--set", "restart.crash_loop=100000")
MEMBERS = 4
AGENT_KILLS = 12  # of one node: one that dies more often is given up as broken
STEPS_BETWEEN = 8
WAIT_S = 60.0  # without a commit: the job is stuck
LOOK_EVERY = 20
BAR_S = 0.2


class Soak:
    """One job and what was done to it."""

    def __init__(self, run: SessionRun, seed: int) -> None:
        self.run = run
        self.random = random.Random(seed)
        self.moments: list[tuple[str, float]] = []
        self.agents: dict[str, int] = {}
        self.doomed: set[int] = set()  # workers that were killed, or their agent: some take a moment to die
        self.first: dict[int, tuple[int, int]] = {}
        self.last: dict[int, tuple[int, int]] = {}

    @property
    def num_kills(self) -> int:
        return len(self.moments)

    def kill(self, what: str, pid: int) -> None:
        try:
            os.kill(pid, 9)
        except ProcessLookupError:
            return  # it died with another one
        self.moments.append((what, time.time()))
        self.doomed.add(pid)

    def members(self) -> dict[int, int]:
        """Role -> process, of those who hold the state and will live on."""
        return {role: pid for role, pid in self.run.members().items() if pid not in self.doomed}

    def strike(self) -> None:
        """One fault, when the job has gone on for some steps since the last one."""
        ahead = self.run.committed() + self.random.randint(1, STEPS_BETWEEN)
        self.run.until_committed(ahead, WAIT_S)
        time.sleep(self.random.random() * 0.02)  # somewhere in a step
        members = self.members()
        kinds = [self.controller, self.idle, self.agent]
        kinds += [self.member] * 5 + [self.two_at_once, self.one_after_the_other] * 2
        self.random.choice(kinds)(members)

    def member(self, members: dict[int, int]) -> None:
        if len(members) > 1:
            self.kill("a member", self.random.choice(list(members.values())))

    def two_at_once(self, members: dict[int, int]) -> None:
        if len(members) > 2:
            for pid in self.random.sample(list(members.values()), 2):
                self.kill("two members at once", pid)

    def one_after_the_other(self, members: dict[int, int]) -> None:
        if len(members) > 2:
            for pid in self.random.sample(list(members.values()), 2):
                self.kill("a member while the others recover", pid)
                time.sleep(self.random.random() * 0.05)

    def idle(self, members: dict[int, int]) -> None:
        """A worker that waits for a role, warms up, or is just joining."""
        others = set(self.run.commits()) - set(members.values()) - self.doomed
        idle = [pid for pid in others if alive(pid)]
        if idle:
            self.kill("a worker without a role", self.random.choice(idle))

    def agent(self, members: dict[int, int]) -> None:
        """The agent of a node, and so all its workers: never of the one that all members are on."""
        places = {node: self.run.agent_pid(node) for node in ("node0", "node1", "node2")}
        homes = {pid: agent_of(pid) for pid in members.values()}
        for node, agent in self.random.sample(list(places.items()), 3):
            spares_some = any(home != agent for home in homes.values())
            if spares_some and alive(agent) and self.agents.get(node, 0) < AGENT_KILLS:
                self.agents[node] = self.agents.get(node, 0) + 1
                self.doomed |= {pid for pid in self.run.commits() if agent_of(pid) == agent}
                self.kill("an agent", agent)
                return

    def controller(self, _members: dict[int, int]) -> None:
        self.kill("the controller", self.run.controller_pid())

    def look(self) -> None:
        """Descriptors and threads of each member, when all are there."""
        self.run.until_members(MEMBERS, WAIT_S)
        self.run.until_committed(self.run.committed() + 5, WAIT_S)
        for pid in self.run.members().values():
            sample = procfs.sample(pid)
            if sample is not None and alive(pid):
                seen = (len(os.listdir(f"/proc/{pid}/fd")), sample.threads)
                self.first.setdefault(pid, seen)
                self.last[pid] = seen

    def growth(self) -> tuple[int, int]:
        """The most descriptors and threads that a member gained between its first look and its last."""
        pairs = [(self.first[pid], self.last[pid]) for pid in self.first]
        return max(b[0] - a[0] for a, b in pairs), max(b[1] - a[1] for a, b in pairs)

    def pauses(self) -> list[float]:
        """By fault: the longest time between two commits of a member that lived through it."""
        found = []
        for _, moment in self.moments:
            pause = self.run.pause_after(moment)
            if pause is not None:
                found.append(pause)
        return found


def agent_of(pid: int) -> int:
    """The process of the agent above a worker, its warm process between them."""
    zygote = procfs.sample(pid)
    agent = procfs.sample(zygote.ppid) if zygote else None
    return agent.ppid if agent else 0


def main() -> None:
    options = arguments(__doc__ or "")
    count = 300 if options.full else 20
    seed = random.SystemRandom().randrange(1 << 30)
    say(f"seed {seed}")
    segments = set(os.listdir("/dev/shm"))
    folder = Path(tempfile.mkdtemp(prefix="everstep-soak-"))
    with SessionRun(folder, *OPTIONS, args=("--steps", "1000000", "--pause", "0.005")) as run:
        soak = Soak(run, seed)
        run.until_members(MEMBERS, WAIT_S)
        looked = -1
        while soak.num_kills < count:
            if soak.num_kills // LOOK_EVERY > looked:
                looked = soak.num_kills // LOOK_EVERY
                soak.look()
                say(f"{soak.num_kills} of {count} kills, {run.committed()} steps")
            soak.strike()
        soak.look()
        run.stop()
        left = len(run.processes()) + len(set(os.listdir("/dev/shm")) - segments)
    show(claims(soak, count, left), options.json)


def claims(soak: Soak, count: int, left: int) -> list[Claim]:
    restarts = len(soak.run.events(e.EpochFormed)) - 1
    if restarts:
        raise RuntimeError(f"somebody held the state all the time, and the job began again; see {soak.run.run_dir}")
    story = soak.run.check()  # AssertionError: an invariant is broken
    fds, threads = soak.growth()
    pauses = soak.pauses()
    rows = [
        Claim(f"kills: {kind}", sum(what == kind for what, _ in soak.moments), "")
        for kind in sorted({what for what, _ in soak.moments})
    ]
    return [
        Claim("kills", soak.num_kills, "", bar=f">= {count}", holds=soak.num_kills >= count),
        *rows,
        Claim("steps committed, each once, of all its samples, with one state on all members", len(story), ""),
        Claim("restarts of the whole job", restarts, "", bar="0", holds=restarts == 0),
        Claim(
            "time without a commit around a kill, median",
            median(pauses),
            "s",
            bar=f"<= {BAR_S}",
            holds=median(pauses) <= BAR_S,
        ),
        Claim("time without a commit around a kill, longest", max(pauses), "s"),
        Claim("descriptors that a member gained", fds, "", bar="<= 2", holds=fds <= 2),
        Claim("threads that a member gained", threads, "", bar="<= 0", holds=threads <= 0),
        Claim("processes and /dev/shm entries left at the end", left, "", bar="0", holds=left == 0),
    ]


if __name__ == "__main__":
    main()
