"""The nouns of one epoch at worker level, which the control plane and the workers share.

A formation says who acts in an epoch: its seats, in order; the index of a seat is the role, the rank in the fabric.
What the commit protocol expects of whoever issues formations (`train.commit` relies on it):

- Epochs only grow; no two formations have the same one.
- `abort`: a member of the epoch before is dead or fenced, or its function raised; the others leave that epoch at once.
  Everybody who may hold state is seated, those of a planned formation too which is thereby withdrawn. Who is not seated
  must stop.
- Where the number of members may not change, every formation has the first one's; who is in two in a row has the same
  role in both. Who was yet to leave in a change that is withdrawn is fenced, unless its follower is dead.
- Not `abort`: a planned change. It is issued when every member of the epoch before reported to be in it, and the next
  planned one when every member of this one did: one plan at a time. Only an abort withdraws it.
- Of each older formation whose last step may not be known, a member is seated, or somebody who committed one after it.
- A worker that an issued formation left out is seated again only in its next life.
- `rollbacks`, `floor`: what is known of both when it is issued. Members that know of a later rollback are right.
"""

from __future__ import annotations

import enum

import msgspec

from everstep.core.anomaly import Anomaly
from everstep.core.corruption import Corruption
from everstep.core.dealing import Dealing
from everstep.core.saves import Saves

ROLLBACKS = 8  # remembered: what an earlier one threw away is older than all that is kept anywhere


class Seat(msgspec.Struct, frozen=True, tag=True):
    """One worker's place."""

    worker: str  # node/local_rank#life
    node: str
    host: str  # identity of the machine: workers with the same one may share memory
    endpoint: str  # "host:port" of its TCP listener
    store: str = ""  # where it serves the meeting of a device library's group, "host:port"; empty: nowhere
    vault: str = ""  # where its node's vault serves what it keeps to other nodes, "host:port"; empty: nowhere


class Rollback(msgspec.Struct, frozen=True):
    """In `epoch` all members went back to a kept state of `step` steps, or began at 0: later steps of the epochs before
    do not count."""

    epoch: int
    step: int


def went_back(rollbacks: tuple[Rollback, ...], last: Rollback) -> tuple[Rollback, ...]:
    """With one more. What an earlier one threw away and this one throws away too is said once."""
    return (*(each for each in rollbacks if each.step < last.step), last)[-ROLLBACKS:]


class Formation(msgspec.Struct, frozen=True, tag=True):
    """The membership of one epoch."""

    epoch: int
    seats: tuple[Seat, ...]
    abort: bool
    floor: int  # steps known to be committed: fewer must never be taken for the job's state
    groups: tuple[int, ...] = ()  # by role: its group in hierarchical sums, which fixes their order; empty: one group
    rollbacks: tuple[Rollback, ...] = ()  # of the job, oldest first, the last ROLLBACKS
    scratch: bool = False  # nothing was ever kept: members without state may start the job over, below `floor`

    def role_of(self, worker: str) -> int | None:
        """Its rank in the fabric; None when it has no seat."""
        return next((role for role, seat in enumerate(self.seats) if seat.worker == worker), None)


class Stage(str, enum.Enum):
    """How far a worker's session is."""

    WARMING = "warming"  # runs the user's script towards its first step
    READY = "ready"  # waits there, and can be seated
    MEMBER = "member"
    LEFT = "left"  # gave its seat up at a step boundary


class SessionReport(msgspec.Struct, frozen=True, tag=True):
    """What a worker tells its agent. A later one replaces an earlier one."""

    worker: str
    stage: Stage
    committed: int  # steps committed here; -1: holds no state
    epoch: int  # it acts in this one; 0: in none
    prepared: int  # has the links of this epoch
    endpoint: str
    host: str
    resumed: bool = False  # committed a step in this epoch
    gap_s: float = -1.0  # between the last commit before this epoch and the first in it; -1: there is none
    fixed: bool = False  # the number of members may not change: a dead one's role waits for who takes it over
    store: str = ""  # see Seat
    failure: str = ""  # what its restartable function raised in `epoch`; it waits for the next one, in this process
    dealt: tuple[Dealing, ...] = ()  # the last changes of how the steps committed here were dealt, RECENT at most
    goal: int = 0  # committed steps at which its loop ends; 0: not known
    rollbacks: tuple[Rollback, ...] = ()  # that the state behind `committed` went through, the last ROLLBACKS
    vault: str = ""  # see Seat
    saves: Saves = Saves()
    corrupt: Corruption | None = None  # that this session found last
    anomalies: tuple[Anomaly, ...] = ()  # of its metrics: what is out of line, and what was lately; a few
