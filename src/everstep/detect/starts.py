"""How a worker comes to its first step of an epoch, from warm to cold: a limit learned from one kind of start says
little about a colder one, and is never used for it.

Members wait for each other before that step. So an epoch has one kind, that of the coldest member; what one of them
took, all took. A job's first start is a kind of its own, that nothing is learned for: compilers' caches are empty.
"""

from __future__ import annotations

import enum

import msgspec

from everstep.core.types import EpochPlan, WorkerProgress

WARM_S = 60.0  # a standby that has lived for so long is past its imports; a younger one starts like a new process


class Start(enum.IntEnum):
    """The coldest member; in those called ALL no process lived on, so the state comes from a vault or a disk."""

    REFORMED = 0  # a session's member, which trains on after its links were made anew
    RERUN = 1  # the script begins again in a process that made steps
    PROMOTED = 2  # a standby, warm by then
    RESPAWNED = 3  # a new process on a node that made steps
    JOINED = 4  # a new process on a new node
    ALL_RESPAWNED = 5
    ALL_JOINED = 6
    FIRST = 7


class Starting(msgspec.Struct, frozen=True):
    """What is known of an epoch's members. `warm`: incarnations by node, where steps of this job were made before."""

    warm: dict[str, str] = {}
    first: bool = True  # no start of this job was seen to its end
    coldest: Start = Start.REFORMED
    survived: bool = False  # a process that made steps before is among them

    @property
    def kind(self) -> Start:
        if self.first:
            return Start.FIRST
        if self.survived or self.coldest <= Start.RERUN:
            return self.coldest
        return Start.ALL_JOINED if self.coldest is Start.JOINED else Start.ALL_RESPAWNED

    def saw(self, node: str, worker: WorkerProgress) -> Starting:
        """The first that a worker told in this epoch."""
        coldest = max(self.coldest, self._how(node, worker))
        survived = self.survived or worker.stepped
        if (coldest, survived) == (self.coldest, self.survived):
            return self
        return msgspec.structs.replace(self, coldest=coldest, survived=survived)

    def _how(self, node: str, worker: WorkerProgress) -> Start:
        if worker.step:
            return Start.REFORMED
        if worker.stepped:
            return Start.RERUN
        if worker.born_age_s >= WARM_S:
            return Start.PROMOTED
        return Start.RESPAWNED if node in self.warm else Start.JOINED

    def next(self, plan: EpochPlan | None, made: dict[str, str], first: bool) -> Starting:
        """Of the epoch to come; `made`: where steps were made in this one."""
        warm = {**self.warm, **made}
        if plan is not None:
            warm = {m.node: m.incarnation for m in plan.members if warm.get(m.node) == m.incarnation}
        return Starting(warm, first)
