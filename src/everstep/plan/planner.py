"""What a job should set: tiers and how often each saves, copies and where, standbys, what to do about faults.

Rests on the closed forms (`plan.closed`, `plan.interval`), GEMINI's placement and the same `decide` that the
controller asks when something fails. Failures come at a constant rate; each either leaves the state alive
(data-parallel replicas), or goes back to what nodes keep in memory, or to the disk. Intervals are the optimum over both
tiers together.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from everstep.core.decisions import Action, Decision
from everstep.core.errors import UsageError
from everstep.plan.closed import erlang_b, gamma_quantile, two_level_efficiency
from everstep.plan.costs import NODE, Costs
from everstep.plan.interval import efficiency, optimal_period_s
from everstep.plan.nodes import num_spares
from everstep.plan.placement import recovery_probability
from everstep.plan.policy import Situation, Tier, decide

MOST_LOST = 4  # nodes at once, of which is thought
MOST_COPIES = 4
IN_MEMORY = 0.99  # of the failures must not need the disk: as many copies as that takes
MOST_STANDBYS = 64
DAY_S = 86400.0
MOST_S = DAY_S  # from save to save, of any tier: also where hardware would not ask for one, people and bugs do
Z90 = 1.645  # the range holds 90 %
DOUBT = 1.5  # factor up and down on times that nobody measured in this job


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A job. Rates in bytes a second."""

    gpus: int
    mttf_s: float  # between two failures of the job
    state_bytes: float  # of one whole copy: parameters and optimizer
    step_s: float
    gpus_per_node: int = 8
    replicas: int = 1  # data-parallel copies of the whole state; 1: it is sharded over all
    copy_rate: float = 20e9  # of one GPU into its host's memory
    network_rate: float = 20e9  # of a node, for copies to other nodes
    disk_rate: float = 50e9  # of all nodes together
    stall_s: float = -1.0  # that a save adds to the steps, measured; -1: as long as the copy takes
    disk_stall_s: float = -1.0  # that writing it to disk adds besides; -1: as much again
    together: float = 0.02  # that a failure takes one more node, and again
    process_part: float = 63 / 419  # failures that leave the node as it was (SYSTEMS section 14: software, watchdog)
    seen: int = 20  # failures on which the mean time rests

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.gpus_per_node)


class TierPlan(msgspec.Struct, frozen=True):
    """One tier. `share`: of the failures that go back to it; `closed_s`: the optimum if it were alone."""

    name: str
    every_steps: int
    every_s: float
    stall_s: float
    whole_s: float
    share: float
    closed_s: float


class Remedy(msgspec.Struct, frozen=True):
    """What is to be done about a kind of fault."""

    fault: str
    decision: Decision


class Recommendation(msgspec.Struct, frozen=True):
    """The answer. `low`, `high`: 90 % range of the ETTR. `waste`: accelerators that do not train, on average."""

    question: Question
    ettr: float
    low: float
    high: float
    closed: float  # by the form for one tier, blocking saves
    restart: float  # of stopping all and loading from disk, at its own optimum
    waste: float
    tiers: tuple[TierPlan, ...]
    live_share: float  # of the failures after which a live copy is left
    copies: int
    memory_bytes: float  # of a node, for the copies that it keeps, two of each
    placement: tuple[tuple[int, float], ...]  # (nodes lost at once, that memory still has all)
    standbys: int  # nodes
    spares_p99: int  # that suffice on 99 of 100 days
    remedies: tuple[Remedy, ...]
    notes: tuple[str, ...] = ()


def check(q: Question) -> None:
    """Raises UsageError for numbers of which there is no job."""
    for name, value in (
        ("gpus", q.gpus),
        ("gpus-per-node", q.gpus_per_node),
        ("replicas", q.replicas),
        ("seen", q.seen),
    ):
        if value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1")
    rates = (("copy-rate", q.copy_rate), ("network-rate", q.network_rate), ("disk-rate", q.disk_rate))
    for name, number in (("mtbf", q.mttf_s), ("state-bytes", q.state_bytes), ("step-s", q.step_s), *rates):
        if not (0 < number < math.inf):
            raise UsageError(f"--{name}: must be above 0, and finite")
    for name, stall_s in (("stall-s", q.stall_s), ("disk-stall-s", q.disk_stall_s)):
        if not (0 <= stall_s < math.inf or stall_s == -1):
            raise UsageError(f"--{name} {stall_s:g}: must be 0 or more seconds; leave it out when nobody measured it")
    for name, part in (("together", q.together), ("process-part", q.process_part)):
        if not 0 <= part < 1:
            raise UsageError(f"--{name} {part:g}: must be from 0 to below 1")
    if q.gpus % q.replicas:
        raise UsageError(f"--replicas {q.replicas} does not divide --gpus {q.gpus}")


def recommend(question: Question, costs: Costs | None = None) -> Recommendation:
    """Raises UsageError when the numbers make no job."""
    check(question)
    costs = costs or Costs()
    model = _Model(question, costs)
    every = model.best()
    ettr = model.ettr(*every)
    return Recommendation(
        question=question,
        ettr=ettr,
        low=_at(question, costs, Z90, DOUBT, every, model.standbys),
        high=_at(question, costs, -Z90, 1 / DOUBT, every, model.standbys),
        closed=model.closed(*every),
        restart=model.restart(),
        waste=(1 - ettr) * question.gpus + model.standbys * question.gpus_per_node,
        tiers=model.tiers(every),
        live_share=model.live,
        copies=model.copies if model.memory > 0 else 0,
        memory_bytes=2 * model.copies * question.state_bytes / question.nodes if model.memory > 0 else 0.0,
        placement=tuple(
            (lost, recovery_probability(question.nodes, model.copies, lost))
            for lost in range(1, min(MOST_LOST, question.nodes) + 1)
        ),
        standbys=model.standbys,
        spares_p99=num_spares(question.nodes, min(0.999, DAY_S * model.node_rate / question.nodes)),
        remedies=model.remedies(),
        notes=tuple(model.notes(every)),
    )


def expected_ettr(question: Question, memory_s: float, disk_s: float, costs: Costs | None = None) -> float:
    """With saves to memory and to disk after so many seconds of work each, the second no less than the first."""
    check(question)
    return _Model(question, costs or Costs()).ettr(memory_s, disk_s)


def _at(q: Question, costs: Costs, z: float, doubt: float, every: tuple[float, float], standbys: int) -> float:
    """ETTR with what is recommended if the failure rate and all times are at the ends of what they may be."""
    off = msgspec.structs.replace(q, mttf_s=q.mttf_s / gamma_quantile(q.seen, z))
    return _Model(off, costs, doubt, standbys).ettr(*every)


class _Model:
    """Rates, shares and prices of one job, and its ETTR as a function of both intervals."""

    def __init__(self, q: Question, costs: Costs, doubt: float = 1.0, standbys: int | None = None) -> None:
        self.q, self.costs, self.doubt = q, costs, doubt
        self.rate = 1 / q.mttf_s
        self.node_rate = self.rate * (1 - q.process_part)
        self.copies = _copies(q)
        self.live = _recovered(q, q.replicas) if q.replicas > 1 else 0.0
        in_memory = _recovered(q, self.copies)
        self.memory = max(0.0, in_memory - self.live)
        self.disk = 1 - max(self.live, in_memory)
        per_gpu = q.state_bytes * q.replicas / q.gpus
        self.stall_s = q.stall_s if q.stall_s >= 0 else per_gpu / q.copy_rate
        self.disk_stall_s = q.disk_stall_s if q.disk_stall_s >= 0 else self.stall_s
        both = self.stall_s, self.disk_stall_s
        self.stalls = both if self.memory > 0 else (0.0, sum(both))  # what a save to (memory, disk) costs
        sent = q.state_bytes / q.nodes * max(0, self.copies - 1) if q.replicas < self.copies else 0.0
        self.whole_s = (per_gpu / q.copy_rate + sent / q.network_rate, q.state_bytes / q.disk_rate)
        self.load_s = (q.state_bytes / q.nodes / q.network_rate, q.state_bytes / q.disk_rate)
        self.standbys = self._standbys() if standbys is None else standbys
        self.down_s = doubt * self._down_s()
        self.disk_down_s = doubt * self._price(self._lost_state()) + self.load_s[1]

    # Faults ---------------------------------------------------------------------------------------------

    def _situation(self, kind: str, failed: int, places: int, standbys: int) -> Situation:
        q = self.q
        return Situation(
            kind=kind,
            workers=q.gpus,
            failed=failed,
            in_steps=True,
            fixed=q.replicas == 1,
            least=q.gpus // q.replicas,
            standbys=standbys,
            places=places,
            replicas=q.replicas,
            hit=min(q.replicas, -(-failed * q.replicas // q.gpus)),
            step_s=q.step_s,
        )

    def _process(self, standby: bool) -> Situation:
        return self._situation("crash", 1, 1, int(standby))

    def _node(self, standby: bool) -> Situation:
        failed = min(self.q.gpus_per_node, self.q.gpus)
        return self._situation("node-lost", failed, 0, failed if standby else 0)

    def _lost_state(self) -> Situation:
        """No copy is left but on disk. What is made again since then is not counted here."""
        situation = self._node(standby=self.standbys > 0)
        failed = situation.failed
        return msgspec.structs.replace(situation, copies=0, places=failed, tiers=(Tier("disk", 0.0),))

    def _price(self, situation: Situation) -> float:
        """Seconds of the whole job that a fault costs, beside going back."""
        return decide(situation, self.costs).loss_s / self.q.gpus

    def _standbys(self) -> int:
        """Nodes held ready: each costs its accelerators all the time, and saves what a failure costs without one."""
        q, (dear, cheap) = self.q, (self._price(self._node(standby)) * self.q.gpus for standby in (False, True))
        died = [self._price(self._process(standby)) * q.gpus for standby in (False, True)]
        taken = self.node_rate * self.costs.seconds(NODE, q.gpus)

        def lost(standbys: int) -> float:
            missing = erlang_b(standbys, taken)
            nodes = self.node_rate * (missing * dear + (1 - missing) * cheap)
            return nodes + self.rate * q.process_part * died[standbys > 0] + standbys * q.gpus_per_node

        return min(range(MOST_STANDBYS + 1), key=lost) if q.nodes > 1 else 0

    def _down_s(self) -> float:
        """After a failure whose state is alive or in memory."""
        q = self.q
        missing = erlang_b(self.standbys, self.node_rate * self.costs.seconds(NODE, q.gpus))
        node_s = missing * self._price(self._node(False))
        if missing < 1:
            node_s += (1 - missing) * self._price(self._node(True))
        return q.process_part * self._price(self._process(self.standbys > 0)) + (1 - q.process_part) * node_s

    # Intervals ------------------------------------------------------------------------------------------

    def ettr(self, memory_s: float, disk_s: float) -> float:
        """By both intervals. Failures that leave the state alive stretch the time by what each costs."""
        costs_s = self.stalls
        useful = two_level_efficiency(memory_s + costs_s[0], disk_s / memory_s, costs_s, self._rates(), self._downs())
        return max(0.0, useful) * self._stretch()

    def closed(self, memory_s: float, disk_s: float) -> float:
        """As if each tier had its failures and its saves for itself: the product of the forms for one tier."""
        product = self._stretch()
        costs_s = self.stalls
        for every_s, cost_s, rate, down_s in zip(
            (memory_s, disk_s), costs_s, self._rates(), self._downs(), strict=True
        ):
            if rate > 0:
                product *= _efficiency(every_s + cost_s, 1 / rate, cost_s, down_s)
            else:
                product *= every_s / (every_s + cost_s)
        return product

    def _stretch(self) -> float:
        return 1 / (1 + self.rate * self.live * self.down_s)

    def _rates(self) -> tuple[float, float]:
        return self.rate * self.memory, self.rate * self.disk

    def _downs(self) -> tuple[float, float]:
        return self.down_s + self.load_s[0], self.disk_down_s

    def least_s(self, tier: int) -> float:
        """A save must be through before the next of its tier begins; and there is one a step at most."""
        return self.q.step_s * max(1, math.ceil(self.whole_s[tier] / self.q.step_s))

    def alone_s(self, tier: int) -> float:
        """Between two saves if there were but this tier, and its failures; -1: there are none."""
        rate, cost_s = self._rates()[tier], self.stalls[tier]
        return optimal_period_s(1 / rate, cost_s) - cost_s if rate > 0 and cost_s > 0 else -1.0

    def best(self) -> tuple[float, float]:
        """Seconds of work from save to save of (memory, disk), whole steps."""
        memory_s, disk_s = self.least_s(0), self.least_s(1)
        for _ in range(30):
            before = memory_s, disk_s
            memory_s, disk_s = self._better(memory_s, disk_s)
            if all(abs(new / old - 1) < 1e-4 for new, old in zip((memory_s, disk_s), before, strict=True)):
                break
        memory_s = self._whole(memory_s, self.least_s(0))
        return memory_s, self._whole(disk_s, max(self.least_s(1), memory_s))

    def _better(self, memory_s: float, disk_s: float) -> tuple[float, float]:
        """The best of each for the other one. Who has nothing to go back to memory for saves to disk only."""
        least = self.least_s(0), self.least_s(1)
        most_s = max(MOST_S, *least)
        if self.memory <= 0:
            disk_s = _peak(lambda each: self.ettr(each, each), max(least), most_s)
            return disk_s, disk_s
        memory_s = _peak(lambda each: self.ettr(each, max(each, disk_s)), least[0], most_s)
        if self.disk <= 0:
            return memory_s, most_s
        return memory_s, _peak(lambda each: self.ettr(memory_s, each), max(least[1], memory_s), most_s)

    def _whole(self, seconds: float, least_s: float) -> float:
        return max(least_s, round(seconds / self.q.step_s) * self.q.step_s)

    def tiers(self, every: tuple[float, float]) -> tuple[TierPlan, ...]:
        plans = [
            TierPlan(
                "memory", self._steps(every[0]), every[0], self.stalls[0], self.whole_s[0], self.memory, self.alone_s(0)
            ),
            TierPlan(
                "disk", self._steps(every[1]), every[1], self.stalls[1], self.whole_s[1], self.disk, self.alone_s(1)
            ),
        ]
        return tuple(plans if self.memory > 0 else plans[1:])

    def _steps(self, seconds: float) -> int:
        return round(seconds / self.q.step_s)

    def restart(self) -> float:
        """Instead: all is stopped after each failure and loads from disk, saved at the optimum for that."""
        cost_s = self.stall_s + self.disk_stall_s  # a save to disk costs it what it costs the recommended way
        period_s = max(optimal_period_s(self.q.mttf_s, cost_s), self.least_s(1)) if cost_s else self.least_s(1)
        down_s = self.doubt * self.costs.seconds(Action.RESTART, self.q.gpus) + self.load_s[1]
        return _efficiency(period_s, self.q.mttf_s, cost_s, down_s)

    # Words ----------------------------------------------------------------------------------------------

    def remedies(self) -> tuple[Remedy, ...]:
        faults = [("a process dies", self._process(self.standbys > 0))]
        if self.standbys:
            faults.append(("a node is lost, a standby waits", self._node(True)))
        faults.append(("a node is lost, no standby", self._node(False)))
        faults.append(("all copies are lost", self._lost_state()))
        return tuple(Remedy(fault, decide(situation, self.costs)) for fault, situation in faults)

    def notes(self, every: tuple[float, float]) -> list[str]:
        q, found = self.q, []
        if self.whole_s[1] > q.mttf_s:
            found.append(f"a save to disk takes {self.whole_s[1]:.0f} s, longer than the time between failures")
        if self.whole_s[0] > every[0] - 1e-9 and self.whole_s[0] > q.step_s:
            found.append("memory is saved as often as the network lets copies through")
        if every[1] >= MOST_S:
            found.append("failures would not ask for a save to disk every day; bugs and people do")
        if q.gpus % q.gpus_per_node and q.nodes > 1:
            found.append(f"{q.gpus} GPUs do not fill nodes of {q.gpus_per_node}")
        return found


def _lost_nodes(q: Question) -> list[tuple[int, float]]:
    """(nodes lost at once, probability): none with a process, then geometric."""
    most = min(MOST_LOST, q.nodes)
    parts = [(0, q.process_part)]
    left = 1 - q.process_part
    for lost in range(1, most + 1):
        part = left if lost == most else left * (1 - q.together)
        parts.append((lost, part))
        left -= part
    return parts


def _recovered(q: Question, copies: int) -> float:
    """Of the failures after which one of `copies` copies is left."""
    return sum(
        part * (1.0 if not lost else recovery_probability(q.nodes, copies, lost)) for lost, part in _lost_nodes(q)
    )


def _copies(q: Question) -> int:
    """In memory, on nodes of their own: as few as do; never one alone, which goes with its node."""
    if q.nodes < 2:
        return 1
    for copies in range(2, MOST_COPIES + 1):
        if _recovered(q, copies) >= IN_MEMORY:
            return min(copies, q.nodes)
    return min(MOST_COPIES, q.nodes)


def _efficiency(period_s: float, mttf_s: float, cost_s: float, down_s: float) -> float:
    """`interval.efficiency`, 0 where it is too small for a float."""
    return efficiency(period_s, mttf_s, cost_s, down_s, 0.0) if period_s < 700 * mttf_s else 0.0


def _peak(value: Callable[[float], float], low: float, high: float) -> float:
    """Where it is greatest between low and high, for one that rises and then falls: golden section in the logarithm."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = math.log(low), math.log(max(high, low))
    c, d = b - ratio * (b - a), a + ratio * (b - a)
    at_c, at_d = value(math.exp(c)), value(math.exp(d))
    while b - a > 1e-7:
        if at_c >= at_d:
            b, d, at_d = d, c, at_c
            c = b - ratio * (b - a)
            at_c = value(math.exp(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + ratio * (b - a)
            at_d = value(math.exp(d))
    ends = {math.exp((a + b) / 2), low}
    return max(ends, key=value)
