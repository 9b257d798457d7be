"""The words of the commit protocol: what happens to a worker (events), and what it is to do then (commands)."""

from __future__ import annotations

import msgspec

from everstep.core.formation import Formation
from everstep.core.saves import Tier
from everstep.detect.audit import Finding
from everstep.train.resolve import Stand


class Said(msgspec.Struct, frozen=True):
    """What members tell each other to find out whose state is not what it should be: see `detect.corrupt`."""

    check: bool = False  # I want the states after this step to be compared
    mark: int = 0  # fingerprint of my state before this step, where it is to be compared
    trace: int = 0  # of my own gradients of this step
    last: bool = False  # after this step I leave the loop
    audit: bool = False  # I want the next step to be audited: see `detect.audit`
    turn: int = 0  # by how many roles shares are handed on in this pass of an audited step, which is not committed
    whole: int = 0  # trace of all of my own gradients, in a step that is audited
    kind: int = 0  # what I compute with, there too


NOTHING_SAID = Said()


class Vote(msgspec.Struct, frozen=True, tag=True):
    """One member's part of the round before each commit."""

    finite: bool  # my reduced gradients
    prepared: int  # the newest epoch whose links I have open
    keep: Tier = Tier.NOTHING  # how far I want the committed state to be saved: see `agreed`
    said: Said = Said()


# Events --------------------------------------------------------------------------------------------------


class FormationReceived(msgspec.Struct, frozen=True):
    formation: Formation


class Prepared(msgspec.Struct, frozen=True):
    """The links of the formation of this epoch are open."""

    epoch: int


class Began(msgspec.Struct, frozen=True):
    epoch: int


class Reduced(msgspec.Struct, frozen=True):
    """All gradients of the step are reduced over all members."""

    epoch: int
    finite: bool
    keep: Tier = Tier.NOTHING
    said: Said = Said()


class Compared(msgspec.Struct, frozen=True):
    """A round after the last step completed here: all members' votes, of which only the marks count."""

    epoch: int
    votes: tuple[Vote, ...]


class Voted(msgspec.Struct, frozen=True):
    """The vote completed here: all members' votes."""

    epoch: int
    votes: tuple[Vote, ...]


class Stood(msgspec.Struct, frozen=True):
    """The first round of the epoch completed here, or the one after a restore: all members' stands, by role."""

    epoch: int
    stands: tuple[Stand, ...]


class Fetched(msgspec.Struct, frozen=True):
    """The whole state arrived, and was checked."""

    epoch: int


class Restored(msgspec.Struct, frozen=True):
    """The kept state is the own one now, of this `fingerprint`; or not `good`: something was missing or damaged."""

    epoch: int
    good: bool
    fingerprint: int = 0


class Applied(msgspec.Struct, frozen=True):
    """The optimizer is through. Local, so it counts whatever became of the epoch."""


Event = FormationReceived | Prepared | Began | Reduced | Voted | Compared | Stood | Fetched | Restored | Applied

# Commands ------------------------------------------------------------------------------------------------


class Prepare(msgspec.Struct, frozen=True):
    """Open the missing links, in the background; forget an earlier formation not yet switched to."""

    formation: Formation


class Abort(msgspec.Struct, frozen=True):
    """Wake every collective of this epoch."""

    epoch: int


class Switch(msgspec.Struct, frozen=True):
    """The links of this formation are the fabric from now on."""

    formation: Formation


class PublishStand(msgspec.Struct, frozen=True):
    """Tell the others, with what this member's node keeps (`Stand.kept`, which only whoever carries this out knows).

    `round`: of this epoch, from 0; each restore is followed by one more.
    """

    epoch: int
    stand: Stand
    round: int = 0


class CastVote(msgspec.Struct, frozen=True):
    epoch: int
    vote: Vote


class Apply(msgspec.Struct, frozen=True):
    """Run the optimizer with the reduced gradients in hand, which are those of this step."""

    step: int


class Doubt(msgspec.Struct, frozen=True):
    """Replicas differ, and nothing is committed in this epoch any more: tell whoever makes formations what differs.

    `votes`: of all members, on `step`, which was not committed. `found`: replicas are alike, but an audit found wrong
    gradients.
    """

    epoch: int
    step: int
    votes: tuple[Vote, ...]
    found: Finding | None = None


class Audited(msgspec.Struct, frozen=True):
    """What the audit of this step found, as every member tells this one, which has the role."""

    step: int
    role: int
    found: Finding


class DropGradients(msgspec.Struct, frozen=True):
    """Whatever was accumulated or reduced is void."""


class Fetch(msgspec.Struct, frozen=True):
    """Overwrite the own state by that of a role, which has `goal.committed` steps."""

    epoch: int
    source: int
    goal: Stand


class Restore(msgspec.Struct, frozen=True):
    """Overwrite the own state by the kept one of `goal.committed` steps.

    `places`: for each of the saved shards, which may be more or fewer than there are today, the role whose node's vault
    has it; -1: it is on disk.
    """

    epoch: int
    places: tuple[int, ...]
    goal: Stand


class Serve(msgspec.Struct, frozen=True):
    """Send the state to these roles. It cannot change before they have it: the next step needs them."""

    epoch: int
    roles: tuple[int, ...]


class Ready(msgspec.Struct, frozen=True):
    """The step with this number may begin; the same as before when it is to be done again."""

    epoch: int
    step: int


class Leave(msgspec.Struct, frozen=True):
    """The others go on without this worker: stop, in good order."""


class Fenced(msgspec.Struct, frozen=True):
    """The others went on without this worker: stop, touch nothing."""

    epoch: int


class StateLost(msgspec.Struct, frozen=True):
    """No member can get to the `floor` steps known to be committed; the best has `committed` (-1: no state).

    Or all who held this shard of the state are gone.
    """

    committed: int
    floor: int
    shard: int = -1

    @property
    def text(self) -> str:
        gone = f"{self.floor} steps were committed, nobody here holds more than {self.committed}"
        if self.shard >= 0:
            gone = f"all members that held shard {self.shard} of the state are gone"
        return f"{gone}, and no kept state is whole: neither in the nodes' vaults nor on disk"


Command = (
    Prepare
    | Abort
    | Switch
    | PublishStand
    | CastVote
    | Apply
    | Doubt
    | Audited
    | DropGradients
    | Fetch
    | Restore
    | Serve
    | Ready
    | Leave
    | Fenced
    | StateLost
)
