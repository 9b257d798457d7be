"""What the policy can do about an incident, what it chose, and what else it weighed (DESIGN section 8).

Losses are in accelerator-seconds: time of one worker. A decision keeps every action that was thought of, with its
expected loss or the reason why it cannot be done, so that a person can see why.
"""

from __future__ import annotations

import enum

import msgspec


class Action(str, enum.Enum):
    """What can be done about an incident, from the gentlest on."""

    LEAVE = "leave-it"  # a slow member, so far: nothing is done
    RETRY = "retry-step"  # all processes live: the step is made again
    REROUTE = "re-route-micro-batches"  # to the data-parallel peers of a dead or slow stage
    TAKE_OVER = "take-over-by-redundancy"  # a neighbour that holds the stage too computes both
    PROMOTE = "promote-standby"  # a warm worker takes the role
    SHRINK = "shrink"  # the others go on without it, and grow again when somebody came
    GROW = "grow"  # whoever came fills a free place
    RESPAWN = "respawn-in-place"  # the others wait for a new process on the same node
    REPARTITION = "re-partition-stages"  # layers are dealt anew over those who are left
    ROLL_BACK = "roll-back"  # processes live on, all go back to the newest kept state
    RESTART = "restart-workers"  # every worker is stopped, new ones resume on the same nodes
    EVICT = "evict-node"  # a node is taken out and a spare one takes its place
    RESCHEDULE = "reschedule"  # the job waits until a node was found in place of the lost one
    STOP = "stop"


class Alternative(msgspec.Struct, frozen=True):
    """One action that was weighed. `loss_s`: expected accelerator-seconds; -1: it cannot be done, `why` tells."""

    action: Action
    loss_s: float
    why: str

    @property
    def feasible(self) -> bool:
        return self.loss_s >= 0


class Decision(msgspec.Struct, frozen=True):
    """The action of least expected loss. `target`: where, a tier or a node; `alternatives`: all others, cheapest
    first, then those that cannot be done."""

    action: Action
    loss_s: float
    why: str
    target: str = ""
    alternatives: tuple[Alternative, ...] = ()


class Estimate(msgspec.Struct, frozen=True):
    """What something takes in this job, in seconds: a prior, and the mean of what was observed.

    A conjugate running mean: the prior counts as `weight` observations.
    """

    prior_s: float
    weight: float = 1.0
    count: int = 0
    total_s: float = 0.0

    @property
    def mean_s(self) -> float:
        return (self.prior_s * self.weight + self.total_s) / (self.weight + self.count)

    def saw(self, seconds: float) -> Estimate:
        """With one more observation."""
        return msgspec.structs.replace(self, count=self.count + 1, total_s=self.total_s + seconds)
