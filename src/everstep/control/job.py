"""The state of a job as its life cycle machine sees it, and the commands that machine gives."""

from __future__ import annotations

import enum

import msgspec

from everstep.core import events as e
from everstep.core.dealing import Dealing
from everstep.core.decisions import Decision
from everstep.core.formation import Formation, Rollback
from everstep.core.saves import Saves
from everstep.core.types import Activity, Blame, Directive, EpochPlan, Exit, JobSpec, NodeReport
from everstep.detect.repeat import Signature
from everstep.plan.costs import Costs
from everstep.plan.nodes import Memory


class Stage(str, enum.Enum):
    """Where a job is in its life (TRANSOM's TOL)."""

    CHECKING = "checking"  # waiting for nodes, checking them before the first start
    FORMING = "forming"  # an epoch was dealt, not every member runs it yet
    RUNNING = "running"
    RESEATING = "re-seating"  # survivors go on in a new formation, not all of them are in it yet
    SUSPECT = "suspect"  # something looks hung, evidence is being collected
    EVICTING = "evicting"  # the epoch's workers are being stopped
    REFORMING = "re-forming"  # nothing runs; waiting for enough nodes
    STOPPING = "stopping"  # the job was asked to end
    FINISHED = "finished"
    FAILED = "failed"


ENDED = (Stage.FINISHED, Stage.FAILED)
ACTIVE = (Stage.FORMING, Stage.RUNNING, Stage.RESEATING, Stage.SUSPECT)  # an epoch is on its way
WAITING = (Stage.CHECKING, Stage.REFORMING)  # nothing runs


class NodeState(msgspec.Struct, frozen=True):
    """One node that is here, or was a moment ago."""

    report: NodeReport
    order: int  # of arrival
    since_s: float
    lost_at_s: float = 0.0  # its link is down: it counts as lost then, unless it comes back; 0: linked
    stop_by_s: float = 0.0  # it must confirm its stop by then; 0: no stop ordered
    exam: int = 0  # number of the examination it has to be through with

    def stopped(self, epoch: int) -> bool:
        """It confirmed that no process of this epoch is left on it."""
        report = self.report
        return report.epoch > epoch or (report.epoch == epoch and report.activity is Activity.STOPPED)

    @property
    def at_rest(self) -> bool:
        return self.report.activity in (Activity.IDLE, Activity.STOPPED)

    @property
    def free(self) -> bool:
        """Linked, staying, and running nothing: it can take part in a new epoch."""
        here = not self.lost_at_s and not self.report.leaving and self.report.examined >= self.exam
        return here and self.at_rest and self.report.slots > 0


class Incident(msgspec.Struct, frozen=True):
    """The fault (or planned change) that the present eviction answers."""

    id: str
    kind: str
    culprits: tuple[Blame, ...]
    why: str
    opened_s: float
    counts: bool  # against the restart budget
    decision: Decision | None = None  # what is done about it
    about: tuple[str, ...] = ()  # members that were dead when it was decided


class Corrupted(msgspec.Struct, frozen=True):
    """What was made of the newest silent corruption."""

    epoch: int
    incident: str
    sure: bool
    why: str
    healed: bool = False  # what became of it is told
    audit: bool = False  # it is gradients that were wrong


class Outcome(msgspec.Struct, frozen=True):
    exit_code: int
    why: str


class Job(msgspec.Struct, frozen=True):
    """The whole state; a fold over the journal's inputs."""

    spec: JobSpec
    stage: Stage = Stage.CHECKING
    stage_since_s: float = 0.0
    term: int = 0
    seq: int = 0  # of the last directive
    epoch: int = 0
    plan: EpochPlan | None = None
    nodes: dict[str, NodeState] = {}
    directives: dict[str, Directive] = {}
    latest: dict[str, str] = {}  # node -> the incarnation that came last, here or not
    replaced: tuple[str, ...] = ()  # incarnations that a newer agent of the same name displaced
    refused: dict[str, str] = {}  # nodes that failed the check before start, with the reason
    arrivals: int = 0
    last_join_s: float = 0.0
    grow_at_s: float = 0.0  # a newcomer would fill a free place: re-form then; 0: nothing to do
    ended: dict[int, e.WorkerEnded] = {}  # rank -> how it ended, in this epoch
    lost: tuple[e.NodeLost, ...] = ()  # members of this epoch that were lost
    gone_by: dict[str, float] = {}  # incarnation of a lost member -> when its processes are surely gone; 0: they are
    incident: Incident | None = None
    incidents: int = 0
    restarts: int = 0
    signatures: tuple[Signature, ...] = ()
    best_step: int = 0  # highest optimizer step a worker reported at its end
    formation: Formation | None = None  # who holds which role, when the script has a session
    before: Formation | None = None  # what a planned formation follows, until every member acts in that one
    superseded: tuple[Formation, ...] = ()  # before these; steps may have been made in them out of our sight
    founders: frozenset[str] = frozenset()  # of the first formation: nothing is committed without those still in it
    floor: int = 0  # steps known to be committed, by whomever, since the last rollback
    rollbacks: tuple[Rollback, ...] = ()  # see Formation
    saves: Saves = Saves()  # to disk, of all sessions together
    corrupt: Corrupted | None = None  # the newest silent corruption
    saved_once: bool = False  # something was to be kept on disk, so the job may not begin again as if nothing was
    formed: int = 0  # number of the last formation; never reused
    fixed: bool = False  # the number of members may not change
    vacant: frozenset[str] = frozenset()  # members whose end is answered for, and whose roles nobody is ready to take
    short_since_s: float = 0.0  # when nobody was left who could take a role; 0: for each there is somebody
    raised: frozenset[tuple[str, int]] = (
        frozenset()
    )  # nodes and ranks whose functions raised since the job last went on
    raised_s: float = 0.0  # when functions raised what a peer's death explains, which is not known of; 0: none did
    exams: dict[str, int] = {}  # node -> number of the examination that its agent has to pass, where it is not 0
    lives: dict[int, int] = {}  # rank -> life that its process must have, where it is not 0
    departed: dict[int, Exit] = {}  # rank -> how its former life ended, as far as it is known
    dealt: tuple[Dealing, ...] = ()  # the last ones in the journal
    save_asked: int = 0  # wishes of persons for a save, so far
    drains: frozenset[str] = frozenset()  # who is to leave: nodes until they have left, and places (node/local_rank)
    costs: Costs = Costs()  # what actions took in this job
    memory: Memory = Memory()  # of nodes that failed
    excluded: frozenset[str] = frozenset()  # nodes that are seated last, by that memory
    patient_until_s: float = 0.0  # it is waited for a node until then rather than go on with fewer; 0: it is not
    stop: e.StopAsked | None = None
    outcome: Outcome | None = None


class Direct(msgspec.Struct, frozen=True):
    """Send this directive to the node."""

    node: str
    directive: Directive


class Note(msgspec.Struct, frozen=True):
    """Write this record into the journal."""

    record: e.Record


Command = Direct | Note
