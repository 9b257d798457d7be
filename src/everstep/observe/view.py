"""What people see of a job, at one moment: plain data of bounded size, whoever shows it.

The page, the terminal, the report, metrics and `everstep replay` all show a `View`; `observe.viewer` makes it, as a
fold over the journal. So live, recorded and simulated jobs look the same. Times are seconds since the job's submission,
-1 while unknown, unless a name says otherwise.
"""

from __future__ import annotations

import enum

import msgspec

from everstep.core.decisions import Alternative
from everstep.core.load import NodeLoad
from everstep.core.types import Blame, Verdict

# Newest ones that are kept whole; all are counted, and `incident_places` tells where the others are.
KEPT_INCIDENTS, KEPT_SAVES, KEPT_EPOCHS, KEPT_ALERTS = 256, 64, 64, 64
KEPT_EVENTS = 120  # of one incident's time line
POINTS = 720  # of a series; when it is full, neighbours become one


class Bucket(str, enum.Enum):
    """What an accelerator-second was spent on. Each belongs to exactly one; docs/goodput.md defines them."""

    PRODUCTIVE = "productive"
    DETECTION = "detection"
    RECOVERY = "recovery"
    REDONE = "redone work"
    STALL = "checkpoint stall"
    START = "start"
    WAITING = "waiting for capacity"
    STANDBY = "idle standby"
    STRAGGLER = "straggler loss"
    REDUNDANCY = "redundant work"


class NodeState(str, enum.Enum):
    UP = "up"  # has workers that act in the epoch
    SPARE = "spare"  # here, and nobody of it acts
    LEAVING = "leaving"  # was asked to
    LOST = "lost"


class WorkerState(enum.IntEnum):
    """By rank, in `Workers.states`."""

    ACTS = 0
    WARMS = 1  # started, without a step in this epoch
    WAITS = 2  # a standby
    SLOW = 3  # judged so, and not cleared since
    STOPPED = 4  # the kernel shows it stopped, or it was judged hung
    GONE = 5


class NodeView(msgspec.Struct):
    name: str
    state: NodeState = NodeState.UP
    how: str = ""  # it was lost
    since_s: float = 0.0  # it is in this state
    address: str = ""
    slots: int = 0
    first_rank: int = -1  # of its workers in this epoch, -1: none acts
    incidents: int = 0  # it was a culprit of


class Workers(msgspec.Struct):
    """Columns, by rank in the epoch; then standbys. `own_s`: seconds of its own in a step, waits not counted."""

    nodes: list[int] = []  # index into View.nodes
    locals: list[int] = []  # local rank
    lives: list[int] = []  # processes that were in this place before
    states: list[int] = []  # WorkerState
    roles: list[int] = []  # of a session's member, -1: none
    own_s: list[float] = []  # newest, -1: not known
    rss_bytes: list[int] = []


class Usage(msgspec.Struct):
    """Of machines, over the whole job: shares from 0 to 1, means over nodes and time, and what was most."""

    looks: int = 0
    cpu_share: float = 0.0
    memory_peak: float = -1.0
    memory_node: str = ""
    worker_percent: int = -1  # of a processor
    worker: str = ""  # node/local_rank
    device_looks: int = 0
    device_share: float = 0.0
    device_memory_peak: float = -1.0
    device_memory_node: str = ""


class Fleet(msgspec.Struct):
    """Accelerators of the whole job, also where nobody is listed by name (very large simulations)."""

    total: int = 0
    acting: int = 0
    spare: int = 0
    missing: int = 0  # wanted, and not there
    slow: int = 0


class Moment(msgspec.Struct, frozen=True):
    """One line of an incident's time line. `phase`: sign, detect, decide, act, recover, close."""

    at_s: float
    phase: str
    text: str


class IncidentView(msgspec.Struct):
    """One fault from its first sign to its end. `cost`: accelerator-seconds by bucket that it is charged with."""

    id: str
    kind: str
    epoch: int
    opened_s: float
    why: str
    culprits: tuple[Blame, ...] = ()
    collateral: tuple[Blame, ...] = ()
    first_sign_s: float = -1.0  # the last step before, or when the worker ended
    told_s: float = -1.0
    closed_s: float = -1.0
    outcome: str = ""  # empty while it is open
    downtime_s: float = -1.0
    phases: dict[str, float] = {}
    redone_steps: int = 0
    step: int = -1  # last one before it
    answer: str = ""  # what was decided
    answer_why: str = ""
    answer_loss_s: float = -1.0
    alternatives: tuple[Alternative, ...] = ()
    cause: Verdict | None = None
    evidence: tuple[tuple[str, Verdict], ...] = ()
    files: tuple[str, ...] = ()  # in the run folder
    timeline: list[Moment] = []
    cost: dict[str, float] = {}


class SaveView(msgspec.Struct):
    step: int
    requested_s: float = -1.0
    durable_s: float = -1.0
    failed: str = ""


class EpochView(msgspec.Struct):
    """An epoch of the plan or a formation of sessions: who was in, and why it was made."""

    epoch: int
    formed_s: float
    members: int
    came: tuple[str, ...] = ()  # workers or nodes that were not in the one before; at most 8 are named
    left: tuple[str, ...] = ()
    links_kept: int = -1  # of a formation: neighbours that stay so; -1: unknown
    links_new: int = -1
    first_step_s: float = -1.0
    why: str = ""  # incident that led to it; empty: the begin, or a planned change
    formation: bool = False


class Series(msgspec.Struct):
    """Curve over time, at most POINTS bins of `every_s` seconds each, the last one open. Empty bins are NaN: null."""

    every_s: float = 1.0
    mean: list[float | None] = []
    low: list[float | None] = []
    high: list[float | None] = []


class AlertView(msgspec.Struct, frozen=True):
    at_s: float
    kind: str
    text: str


class View(msgspec.Struct):
    """The whole job. `offset`: bytes of its journal on disk, where a dashboard follows it."""

    job: str = ""
    script: str = ""
    simulated: bool = False
    submitted_wall_s: float = 0.0  # since 1970
    now_s: float = 0.0  # of the newest entry
    stage: str = ""
    exit_code: int | None = None
    ended_s: float = -1.0
    why: str = ""
    epoch: int = 0
    term: int = 0
    restarts: int = 0
    step: int = -1  # highest of the job
    goal: int = 0  # steps at which it ends, 0: not known
    steps: int = 0  # made, redone ones included
    redone_steps: int = 0  # that rollbacks took back: they are made again, or will be
    step_s: float = 0.0  # recent
    last_step_s: float = -1.0  # when it was made
    metrics: dict[str, float] = {}  # newest values that the script logged
    nodes: list[NodeView] = []
    workers: Workers = msgspec.field(default_factory=Workers)
    loads: dict[str, NodeLoad] = {}  # newest, by the name of a node
    usage: Usage = msgspec.field(default_factory=Usage)
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    incidents: list[IncidentView] = []  # newest last
    num_incidents: int = 0
    by_kind: dict[str, int] = {}
    by_cause: dict[str, int] = {}
    downtime_s: float = 0.0  # of all
    saves: list[SaveView] = []
    num_saves: int = 0  # durable ones
    saved_step: int = -1
    saves_failed: int = 0
    memory_steps: dict[str, int] = {}  # role or worker -> newest step that a vault keeps of it
    epochs: list[EpochView] = []
    alerts: list[AlertView] = []
    buckets: dict[str, float] = {}  # Bucket -> accelerator-seconds; they add up to what the job had until now_s
    costs: dict[str, float] = {}  # cause -> accelerator-seconds lost by it
    ettr: float = 0.0
    series: dict[str, Series] = {}  # step_s, steps_per_s, members, ettr, and metrics as "metric:NAME"
    bucket_series: dict[str, Series] = {}  # Bucket -> share of the accelerators in each bin
    redone: list[tuple[float, float]] = []  # spans of time whose steps were made again: charts mark them
    entries: int = 0
    offset: int = 0

    @property
    def ended(self) -> bool:
        return self.exit_code is not None

    @property
    def newest_epoch(self) -> int:
        """As people count them: a formation of sessions is one, also where the plan stays as it is."""
        return self.epochs[-1].epoch if self.epochs else self.epoch
