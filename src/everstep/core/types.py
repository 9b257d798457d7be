"""The nouns of the control plane: what nodes and workers report, and what the controller tells them.

Every type here is a frozen msgspec struct: it travels on the wire, lies in the journal, and is an
argument of the pure state machines. Times named `_s` are seconds on the clock of whoever sent them
(CLOCK_MONOTONIC); a receiver converts with the sender's `sent_s`, so clocks of hosts are never compared.
`epoch` is our word: a numbered membership of the job. It is never reused.
"""

from __future__ import annotations

import enum

import msgspec

from everstep.core.formation import Formation, SessionReport
from everstep.core.load import NodeLoad
from everstep.core.logged import Logged
from everstep.core.sampled import Sampled
from everstep.core.work import StepWork


class Phase(enum.IntEnum):
    """What a worker is busy with, as seen by the hooks in its process."""

    START = 0  # from the fork to the first optimizer step
    TRAIN = 1
    EVAL = 2
    SAVE = 3
    LOAD = 4
    DONE = 5  # the script ended, or an error escaped it


class ExitCause(str, enum.Enum):
    """Why a worker is gone, as far as its own node can tell."""

    OK = "ok"  # the script ran to its end, exit status 0
    ERROR = "error"  # an exception escaped the script
    EXIT_CODE = "exit-code"  # non-zero exit status without an exception seen
    SIGNAL = "signal"  # killed by a signal from outside
    OOM = "out-of-memory"  # killed by the kernel: cgroup memory.events counted it
    STOPPED = "stopped"  # ended because we asked it to
    GRACE = "grace-exceeded"  # we asked, it did not end in time, we killed it
    UNFINISHED = "unfinished"  # exit status 0 although the script had not ended (os._exit)


class Exit(msgspec.Struct, frozen=True):
    """How one worker ended. `at_s`: when it failed or died, on the clock of its node."""

    cause: ExitCause
    at_s: float
    code: int | None = None  # exit status; None when a signal ended it
    signal: int | None = None
    message: str = ""  # last line of the error, or what the kernel said
    rss_bytes: int = 0  # last resident set size seen
    step: int = 0  # optimizer steps of this attempt
    total_step: int = -1  # the optimizer's own count, -1 when it keeps none

    @property
    def failed(self) -> bool:
        return self.cause not in (ExitCause.OK, ExitCause.STOPPED)


class WorkerReport(msgspec.Struct, frozen=True):
    """One worker as its agent knows it. `exit` is set once it failed or is gone."""

    local_rank: int
    pid: int = 0
    gone: bool = False  # reaped by the kernel: it can run no more code
    exit: Exit | None = None
    term_asked: bool = False  # somebody outside sent it SIGTERM and its script handles that
    life: int = 0  # how often this place was given a new process within the epoch
    before: Exit | None = None  # how the life before it ended
    session: SessionReport | None = None  # what the script's session said last; None without one


class Activity(str, enum.Enum):
    """What an agent does with the epoch it reports."""

    IDLE = "idle"  # has run no epoch yet, or is parked as a spare
    RUNNING = "running"
    STOPPING = "stopping"
    STOPPED = "stopped"  # every process of the epoch is gone from this node


class NodeReport(msgspec.Struct, frozen=True, tag=True):
    """The whole state of a node. Idempotent: a later `seq` of the same incarnation replaces an earlier one."""

    node: str
    incarnation: str  # random, one per agent process
    seq: int
    sent_s: float
    slots: int  # workers this node runs
    address: str  # where other nodes reach it
    store_port: int  # an open listening socket of the agent, for the store of the next epoch it hosts
    epoch: int = 0
    activity: Activity = Activity.IDLE
    workers: tuple[WorkerReport, ...] = ()
    versions: dict[str, str] = {}
    node_rank: int = -1  # the group rank it would like in its first epoch (torchrun's --node-rank); -1: any
    leaving: bool = False  # the agent was asked (SIGTERM, drain) to give its node up
    examined: int = 0  # up to which examination wanted (Directive.exam); -1: not even the one before its first start
    unfit: str = ""  # what is broken here; it takes no part while that is so


class WorkerProgress(msgspec.Struct, frozen=True):
    """Signs of life of one worker. Ages are seconds before `sent_s` of the message."""

    rank: int
    local_rank: int
    step: int  # optimizer steps of this attempt
    total_step: int  # the optimizer's own count across attempts, -1 when it keeps none
    phase: Phase
    phase_age_s: float
    step_age_s: float  # since the last optimizer step, or since the start when there was none
    life_age_s: float  # since the last sign of life of any kind
    first_step_age_s: float = -1.0  # -1 before the first step
    collectives: int = 0  # collectives entered through torch.distributed's functions
    batches: int = 0
    loads: int = 0
    saves: int = 0
    saved_step: int = -1  # `step` at the end of the last save
    stopped: bool = False  # the kernel shows it stopped (SIGSTOP) or traced
    rss_bytes: int = 0
    cpu_s: float = 0.0
    work: tuple[StepWork, ...] = ()  # of steps since the last message; of very many, every second, fourth ...
    logged: Logged | None = None  # the newest that its script logged
    kept_step: int = -1  # newest state that it put into its node's vault
    born_age_s: float = 0.0  # of its process
    stepped: bool = False  # its process made a step, whatever the attempt


class NodeProgress(msgspec.Struct, frozen=True, tag=True):
    """Heartbeat of an agent with the progress of its workers. Not journalled."""

    node: str
    incarnation: str
    epoch: int
    sent_s: float
    workers: tuple[WorkerProgress, ...] = ()
    load: NodeLoad | None = None  # a new sample, every few seconds


class Member(msgspec.Struct, frozen=True):
    """One node's place in an epoch."""

    node: str
    incarnation: str
    address: str
    group_rank: int
    first_rank: int
    slots: int


class EpochPlan(msgspec.Struct, frozen=True):
    """Who holds which ranks in one epoch, and where its store listens (the node of group rank 0)."""

    epoch: int
    members: tuple[Member, ...]
    world_size: int
    master_addr: str
    master_port: int
    restart_count: int  # failures so far; changes of membership do not count

    def member(self, node: str) -> Member | None:
        for member in self.members:  # asked thousands of times a second in large schedules
            if member.node == node:
                return member
        return None

    def rank(self, node: str, local_rank: int) -> int:
        member = self.member(node)
        assert member is not None and local_rank < member.slots
        return member.first_rank + local_rank


class Action(str, enum.Enum):
    """What an agent is to do now."""

    PARK = "park"  # no role: stop what runs, keep the zygote warm
    RUN = "run"
    STOP = "stop"
    LEAVE = "leave"  # stop what runs, then exit


class Directive(msgspec.Struct, frozen=True, tag=True):
    """The desired state of a node. A later (term, seq) replaces an earlier one; repeating one is harmless."""

    term: int  # counts the lives of the controller
    seq: int
    action: Action
    epoch: int = 0
    plan: EpochPlan | None = None
    reason: str = ""
    grace_s: float = 30.0
    cut: bool = False  # a fault: wake collectives by shutting the workers' sockets to the other nodes
    stop_at_step: int = 0  # deliver SIGTERM at this step of the attempt on every worker; 0: at once
    exit_code: int = 0  # of the job, with LEAVE
    kill_ranks: tuple[int, ...] = ()  # judged hung: SIGKILL at once instead of SIGTERM
    formation: Formation | None = None  # with RUN: who holds which role; sessions hear of it
    lives: tuple[int, ...] = ()  # with RUN: a place with an older life is to get a new process; empty: all 0
    leave: bool = False  # a person wants the node out of the job: it gives itself up, whatever else it is to do
    vacant: tuple[int, ...] = ()  # places that a person wants empty: they get no new process
    save_asked: int = 0  # how often a person wanted the state on disk
    exam: int = 0  # number of the examination that this agent has to pass before it is used: one each time it was lost


class StacksAsked(msgspec.Struct, frozen=True, tag=True):
    """Controller to agent: write down the Python stacks of these workers of the epoch."""

    incident: str
    epoch: int
    local_ranks: tuple[int, ...]
    alive: bool = False  # they go on: of an incident which is no end of theirs
    look: int = 0  # number of a person's wish to see them, of which no incident knows
    seconds: float = 0.0  # with a look: sample for so long where they are
    threads: bool = False  # all of them, not only the main one


class StacksTaken(msgspec.Struct, frozen=True, tag=True):
    """Agent to controller: stacks by global rank (text of faulthandler, or what /proc tells), and last log lines.

    Rank -1: what the kernel of the node said."""

    node: str
    incident: str
    epoch: int
    stacks: dict[int, str]
    log_tails: dict[int, str] = {}
    look: int = 0
    notes: dict[int, str] = {}  # by rank: why something else, or nothing, is shown
    sampled: dict[int, Sampled] = {}


class Blame(msgspec.Struct, frozen=True):
    """One culprit of an incident: rank -1 means the whole node."""

    rank: int
    node: str
    cause: str
    detail: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """A detector's judgement: what happened, who did it, why we think so, how sure we are (0..1)."""

    kind: str  # "hang", ...
    culprits: tuple[Blame, ...]
    why: str
    confidence: float = 1.0


class NodeLoss(str, enum.Enum):
    """How a node was lost; it decides whether its workers can still run."""

    CLOSED = "closed"  # its agent's connection ended: the process is gone, and its workers with it
    DIED = "died"  # its launcher saw the agent's process end
    SILENT = "silent"  # no heartbeat within the lease: it may still run, cut off
    STUCK = "stuck"  # it answers, but did not stop its workers in time
    REPLACED = "replaced"  # a new agent came under the same name
    LEFT = "left"  # on its own wish


class JobSpec(msgspec.Struct, frozen=True):
    """What the controller must know to run a job. Durations in seconds."""

    job: str
    min_nodes: int = 1
    max_nodes: int = 1
    max_restarts: int = 100
    grace_s: float = 30.0
    join_timeout_s: float = 600.0  # too few nodes for this long: the job fails
    last_call_s: float = 5.0  # between min and max nodes: wait this long for more
    reconnect_s: float = 0.5  # after a closed connection, before the node counts as lost
    lease_s: float = 10.0  # without a heartbeat, before the node counts as lost
    recover_s: float = 10.0  # a restarted controller waits this long for its nodes
    stop_margin_s: float = 5.0  # beyond the grace, before a node that does not stop counts as lost
    fence_s: float = 60.0  # a node that is silent and alone in its epoch stops itself after this long
    crash_loop: int = 3  # the same failure at the same step this often ends the job
    hang_timeout_s: float = 0.0  # 0: learned limits only
    expect_steps: int = 0  # a job that ends with fewer steps failed; 0: unknown
    script: str = ""
