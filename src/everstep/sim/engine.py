"""The simulation: faults strike a modelled cluster, the shipped policy decides, the books show what it cost.

`Engine(scenario, chance).run()` gives a Result. What happens is also told as the events of the journal (`core.events`),
so that status, summary and dashboards read a simulated run like a live one. Nodes are aggregated: an event costs the
same for 100 and for 100,000 of them. So membership is the `Fleet` here, not `control.lifecycle`, which looks at every
node's report; `testing.resolved` plays small scenarios on that machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from everstep.core import events as e
from everstep.core.decisions import Action, Decision
from everstep.core.types import Blame, JobSpec, NodeLoss
from everstep.core.virtual import VirtualClock
from everstep.observe.view import Bucket
from everstep.plan.costs import PROCESS
from everstep.sim.arrivals import ALIVE, Replay, Source, is_transient, source
from everstep.sim.asked import Asked
from everstep.sim.books import LAWS, Books, Phase
from everstep.sim.chance import Chance, exponential
from everstep.sim.fleet import Fleet
from everstep.sim.planned import strike
from everstep.sim.progress import Save
from everstep.sim.result import Gathered, Result
from everstep.sim.roles import Forming
from everstep.sim.scenario import Failures, Scenario, seconds_of, system
from everstep.sim.sensing import Senses
from everstep.sim.silent import Flips
from everstep.sim.slow import SlowNodes
from everstep.sim.switching import Switching
from everstep.sim.telling import Sink, Teller
from everstep.sim.traces import Change, read

KEEPS_GAP = {Action.SHRINK, Action.REROUTE, Action.TAKE_OVER, Action.REPARTITION}  # nobody takes the seat
GOES_BACK = {Action.RESTART, Action.ROLL_BACK}
NEW_PROCESSES = {Action.RESTART, Action.RESPAWN, Action.RESCHEDULE, Action.PROMOTE}
LATER_S = 60.0  # something else is under way: look again
SAMPLES = 240  # points of the curves over time
FIXED = "replicas"  # the law of a job with all its nodes: a replica that loses one is out


class Incident(msgspec.Struct):
    """One that is open. `alive`: everybody lives, so nothing is lost when the job pauses for it."""

    id: str
    kind: str
    opened_s: float
    action: Action = Action.LEAVE
    detected_s: float = 0.0
    redone: int = 0
    alive: bool = False


class Engine:
    """One run. `sink` hears every event, `progress` how much of the time is over.

    traces: text by the file name that the scenario gives.
    """

    def __init__(
        self,
        scenario: Scenario,
        chance: Chance,
        sink: Sink | None = None,
        traces: Mapping[str, str] | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self.scenario, self.chance = scenario, chance
        self.strategy, self.cluster, self.job = scenario.strategy, scenario.cluster, scenario.job
        self.system = system(scenario)
        self.clock = VirtualClock(0.0)
        self.fleet = Fleet(
            self.cluster.nodes, self.cluster.standbys, self.job.replicas, self.cluster.nodes_per_slice,
            self.cluster.optical,
        )  # fmt: skip
        self.changes = _changes(scenario, traces or {})
        self.nodes_of: dict[str, int] = {}
        slots = self._seat_trace() if self.changes else self.cluster.standbys
        self.books = Books(scenario, self.system, self.fleet, slots)
        self.asked = Asked(scenario, self.system, self.books)
        self.forming = Forming(self)
        self.slow = SlowNodes(self)
        self.switching = Switching(self)
        self.got = Gathered()
        self.open: dict[str, Incident] = {}
        self.token = 0  # of the pause whose end is awaited
        self.resumes: Action | None = None  # what follows the wait for a node
        self.needs_all = False
        self.teller = Teller(self, sink)
        self.sources = [self._source(spec) for spec in scenario.failures]
        self.senses = Senses(scenario, self.fleet.seats, self.chance)  # drawn last: strategies meet the same failures
        self.flips = Flips(self)
        self.new_since = 0  # steps when somebody began anew
        self.starts = 0  # how often that was
        self._progress = progress
        self._owed: list[tuple[Bucket, float]] = []  # parts of a pause that a wait interrupted, and their lengths

    def run(self) -> Result:
        until = self.scenario.until_s
        self.say(e.JobSubmitted(JobSpec(self.job.name, max_nodes=self.cluster.nodes, script=self.scenario.name)))
        self.say(e.ControllerStarted(1))
        self.teller.form()
        if self.books.can_run():
            self.pause([(Bucket.START, self.job.start_s)])
        else:
            self.books.phase = Phase.WAIT
        for item in self.sources:
            item.begin(0.0)
        for fault in self.scenario.faults:
            self.clock.at(fault.at_s, strike, self, fault)
        self.clock.at(0.0, self._sample, until / SAMPLES)
        self.teller.look()
        while self.books.phase is not Phase.ENDED and self.clock.step(until):
            self.teller.look()
        self.settle()
        self.books.save_fails(self.now)
        self.teller.seen()
        self.say(e.JobEnded(0, "simulated time is over" if self.books.phase is not Phase.ENDED else "stopped"))
        return self.got.result(self)

    # Helpers --------------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        return self.clock.now_s

    def say(self, event: e.AnyEvent) -> None:
        self.teller.say(event)

    def settle(self) -> None:
        self.books.settle(self.now)

    def after_steps(self, goal: int, call: Callable[..., None], *args: object) -> None:
        """Once the job has made so many steps."""
        self.settle()
        books, progress = self.books, self.books.progress
        if progress.steps >= goal:
            call(*args)
            return
        wait_s = LATER_S
        if books.phase is Phase.RUN:
            wait_s = max(goal - progress.steps - progress.part, 0.01) * books.pace().step_s
        elif books.phase is Phase.PAUSE and books.pauses:
            wait_s = max(books.pauses[-1][1] - self.now, 0.01)
        self.clock.after(wait_s, self.after_steps, goal, call, *args)

    def _sample(self, every_s: float) -> None:
        self.settle()
        self.teller.seen()
        self.got.point(self)
        if self._progress is not None:
            self._progress(self.now / self.scenario.until_s)
        self.clock.after(every_s, self._sample, every_s)

    def _source(self, spec: Failures) -> Source:
        made: list[Source] = []

        def at(when_s: float, struck: int) -> None:
            if when_s <= self.scenario.until_s:
                self.clock.at(when_s, self.strike, made[0], struck)

        made.append(source(spec, self.cluster, self.fleet, self.chance, at))
        if isinstance(made[0], Replay):
            made[0].changes = list(self.changes)
        return made[0]

    # Faults ---------------------------------------------------------------------------------------------

    def strike(self, origin: Source, struck: int) -> None:
        """A failure model says: now."""
        self.settle()
        if isinstance(origin, Replay):
            self._replay(origin.changes[struck])
            return
        origin.fired(self.now)
        victims = origin.victims(struck, self.now)
        kind = origin.spec.kind
        if victims and (kind in ALIVE or not self._spared()):
            self._struck(origin, kind, victims)
        for node in victims:
            if node not in self.fleet.out:
                origin.survived(node, self.now)

    def _struck(self, origin: Source, kind: str, victims: Sequence[int]) -> None:
        cause = origin.cause()
        self.got.failed(self.now, len(victims), cause)
        if kind == "slow":
            lasts_s = exponential(self.slow.chance, origin.spec.lasts_s)
            self.slow.began(victims[0], origin.spec.slowdown, lasts_s)
        elif kind == "silent":
            self.flips.struck(victims[0])
        elif kind == "maintenance":
            self.take_out(victims, cause, origin.spec.lasts_s, alive=True)
        elif is_transient(cause):
            self.crashed(victims, cause)
        else:
            self.take_out(victims, cause, self.cluster.repair_s)

    def _spared(self) -> bool:
        """The downtime of the closed forms: nothing fails in it."""
        pauses = self.books.pauses
        at_rest = self.books.phase is Phase.PAUSE and bool(pauses)
        return self.strategy.spared and at_rest and pauses[0][0] is Bucket.DETECTION and self.now < pauses[0][1]

    def take_out(self, nodes: Sequence[int], cause: str, for_s: float | None, *, alive: bool = False) -> None:
        """Nodes leave, for some time or for good. What that means for the job depends on the seats they had."""
        seats = [seat for node in nodes if (seat := self.fleet.lose(node)) >= 0]
        for node in nodes:
            self.slow.left(node)
            self.say(e.NodeLost(name(node), "", NodeLoss.LEFT if alive else NodeLoss.SILENT))
            if for_s is not None:
                self.clock.after(for_s, self.back, node)
        strikes = bool(seats) and self.forming.lost(nodes)
        self.books.changed()
        if strikes:
            kind = "drain" if alive else "node-lost"
            self.respond(kind, nodes, cause, seats)

    def replace(self, node: int, action: Action) -> None:
        """All live: it gives its seat up to a standby in a planned change, and is repaired."""
        self.fleet.lose(node)
        self.slow.left(node)
        self.forming.lost([node])
        self.say(e.NodeLost(name(node), "", NodeLoss.LEFT))
        self.clock.after(self.cluster.repair_s, self.back, node)
        rewire_s = self._fill()
        self.pause([(Bucket.RECOVERY, self._seconds(action) + rewire_s)])

    def crashed(self, nodes: Sequence[int], cause: str) -> None:
        """Only processes died, or hang. Who can only replace nodes does that."""
        kind = "hang" if cause == "hang" else "crash"
        seated = [node for node in nodes if self.fleet.seat_of(node) >= 0]
        seats = [self.fleet.seat_of(node) for node in seated]
        if seated and self.asked.decide(kind, seats, len(seats)).action is Action.STOP:
            self.take_out(seated, cause, self.cluster.soft_repair_s)
        elif seated and self.forming.lost(seated):
            self.respond(kind, seated, cause, seats, places=len(seats))

    def _replay(self, change: Change) -> None:
        node = self.nodes_of.setdefault(change.node, self.fleet.num_nodes)
        if change.came:
            self.fleet.num_nodes = max(self.fleet.num_nodes, node + 1)
            self.back(node)
        elif node not in self.fleet.out:
            self.got.failed(self.now, 1, "pre-empted")
            self.take_out([node], "pre-empted", None)

    def _seat_trace(self) -> int:
        """Whoever is there at the begin has the first seats; slots for as many standbys as there ever are."""
        fleet = self.fleet
        first = [change.node for change in self.changes if change.at_s <= 0 and change.came]
        for node, label in enumerate(first):
            self.nodes_of[label] = node
            if node >= fleet.num_nodes:
                fleet.num_nodes += 1
                fleet.back(node)
        for node in range(len(first), fleet.num_nodes):
            fleet.lose(node)
        here = most = 0
        for change in self.changes:
            here += 1 if change.came else -1
            most = max(most, here)
        return max(0, most - fleet.seats)

    # Decisions ------------------------------------------------------------------------------------------

    def respond(
        self,
        kind: str,
        nodes: Sequence[int],
        cause: str,
        seats: Sequence[int],
        *,
        places: int = 0,
        mark: Save | None = None,
    ) -> Incident:
        """`seats`: those which the nodes have or had; `places`: how many of these can go on where they are."""
        number = self.got.incidents.total() + 1
        incident = Incident(f"i{number}", kind, self.now, alive=kind in ("drain", "slow", "grow"))
        self.got.incidents[kind] += 1
        self.open[incident.id] = incident
        loses = self.strategy.loses == "step" and not incident.alive and not self.books.holds
        self.teller.seen(lost=loses and self.books.phase is Phase.RUN and not self.forming.keeps_step)
        told = self._noticed(incident)
        blame = tuple(Blame(-1, name(node), cause) for node in nodes[:8]) if told else ()
        self.say(e.IncidentOpened(incident.id, kind, blame, cause))
        self.act(incident, self.decided(incident, seats, places, name(nodes[0])), mark)
        return incident

    def _noticed(self, incident: Incident) -> bool:
        """How long nobody knows of it; whether it is known who is to blame."""
        incident.detected_s = 0.0 if incident.alive else self.strategy.detect_s
        if incident.kind != "hang":
            return True
        if self.strategy.hang_detect_s is not None:
            incident.detected_s = self.strategy.hang_detect_s
        elif self.system.shipped:
            made = self.books.progress.steps - self.new_since
            stood = self.senses.hang(self.books.full_step_s, made, self.starts)
            incident.detected_s = stood.took_s
            return stood.right
        return True

    def decided(self, incident: Incident, seats: Sequence[int], places: int, target: str) -> Decision:
        decision = self.asked.decide(incident.kind, seats, places)
        if self.teller.sink is not None:
            named = decision if decision.target else msgspec.structs.replace(decision, target=target)
            self.say(e.Decided(incident.id, named))
        return decision

    def act(self, incident: Incident, decision: Decision, mark: Save | None = None) -> None:
        """Carry the decision out: what is lost, who sits where, and how long nobody makes a step."""
        incident.action = action = decision.action
        self.got.actions[action] += 1
        if action is Action.STOP:
            self.books.phase = Phase.ENDED
            return
        if action is Action.LEAVE:
            self.close(incident, "left")
            return
        if action is Action.TAKE_OVER and self.forming.takes_over(incident):
            return
        down_s = self._seconds(action)
        loses = self.strategy.loses == "step" and not incident.alive
        if loses and self.books.phase is Phase.RUN and not self.books.holds:
            self.books.undo_part()
        if loses and action in GOES_BACK:
            incident.redone = self.books.roll_back(self.now, mark)
            down_s += self.system.saving.load_s
        if action in KEEPS_GAP:
            self.books.law = LAWS.get(action, "nodes")
        else:
            down_s += self._fill()
        self.books.changed()
        self.recover(incident, action, down_s)

    def _fill(self) -> float:
        """Standbys take the empty seats; the time to wire them in."""
        seated, books = self.fleet.fill(), self.books
        if seated:
            self._began_anew()
            self.slow.seated(seated)
        books.law = "nodes" if self.fleet.missing else FIXED
        books.changed()
        return self.cluster.rewire_s if seated and self.cluster.optical else 0.0

    def _began_anew(self) -> None:
        self.starts += self.new_since != self.books.progress.steps or not self.starts
        self.new_since = self.books.progress.steps

    def recover(self, incident: Incident, action: Action, down_s: float) -> None:
        detect_s = incident.detected_s
        if action in NEW_PROCESSES:
            self._began_anew()
        if self.strategy.meanwhile and self.books.can_run():
            self._saves_soon()
            self.switching.prepare(incident, detect_s + down_s)
            return
        if action is Action.RESCHEDULE:
            self.resumes, self.needs_all = action, True
            if self.fleet.missing:
                self.wait()
            else:  # somebody was here to take the seat
                self.pause([(Bucket.DETECTION, detect_s), (Bucket.RECOVERY, down_s + self._begin_again())])
        elif not self.books.can_run():
            self.resumes = Action.RESCHEDULE if self.asked.in_steps else Action.RESTART
            self.needs_all = False
            self.wait()
        else:
            self.pause([(Bucket.DETECTION, detect_s), (Bucket.RECOVERY, down_s)])

    def _seconds(self, what: Action | str) -> float:
        """Downtime of an action, or of what follows a wait; the wait itself is not known beforehand."""
        usual_s = 0.0 if what is Action.RESCHEDULE else self.asked.costs.seconds(what, self.fleet.seats)
        return seconds_of(self.scenario, usual_s, what, self.fleet.present)

    # Phases ---------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """What is left of a pause comes after the wait, if pauses queue."""
        at = self.now
        if self.strategy.overlap == "queue" and self.books.phase is Phase.PAUSE:
            for bucket, until in self.books.pauses:
                if until > at:
                    self._owed.append((bucket, until - at))
                    at = until
        self.books.phase, self.books.pauses = Phase.WAIT, []
        self.token += 1

    def pause(self, parts: Sequence[tuple[Bucket, float]]) -> None:
        """Nobody makes a step for these parts of time, one after the other; or after what is under way already."""
        books = self.books
        queued = books.phase is Phase.PAUSE and self.strategy.overlap == "queue"
        at = books.pauses[-1][1] if queued and books.pauses else self.now
        if not queued:
            books.pauses = []
        parts, self._owed = [*self._owed, *parts], []
        for bucket, span_s in parts:
            at += span_s
            books.pauses.append((bucket, at))
        books.pauses = [part for part in books.pauses if part[1] > self.now] or [(parts[-1][0], at)]
        books.phase = Phase.PAUSE
        self.token += 1
        for _, until in books.pauses[:-1] if self.teller.sink is not None else ():
            self.clock.at(until, self.teller.look)
        self.clock.at(at, self.resume, self.token)

    def resume(self, token: int) -> None:
        if token != self.token or self.books.phase is not Phase.PAUSE:
            return
        self.settle()
        self.books.phase, self.books.pauses = Phase.RUN, []
        self.forming.form()
        self.switching.formed()
        if self.open:
            self.teller.epoch += 1
            self.teller.form()
            self._saves_soon()
        self.close_all()
        if self.fleet.missing and self.fleet.standbys:
            self.grow()

    def close_all(self) -> None:
        for incident in list(self.open.values()):
            self.close(incident, "recovered")

    def _saves_soon(self) -> None:
        saves = self.scenario.saves
        if saves is not None and saves.after_restart:
            self.books.progress.save_next()

    def close(self, incident: Incident, outcome: str) -> None:
        self.open.pop(incident.id, None)
        down_s = self.now - incident.opened_s
        if outcome == "recovered":
            self.got.down_s.append(down_s)
        phases = {"detect": incident.detected_s, "recover": down_s - incident.detected_s}
        self.say(e.IncidentClosed(incident.id, outcome, down_s, phases, incident.redone))

    def back(self, node: int) -> None:
        """A node is there again, or another one in its place."""
        self.settle()
        self.fleet.back(node)
        self.say(e.NodeJoined(name(node), "", "", self.cluster.accelerators_per_node))
        for item in self.sources:
            item.renewed(node, self.now)
        waits_for_role = self.forming.joined()
        if self.books.phase is Phase.WAIT:
            self._come()
        elif not waits_for_role and self.books.phase is Phase.RUN and self.fleet.missing:
            self.grow()

    def _come(self) -> None:
        """The job waited for this; or it begins."""
        self._fill()
        if not self.fleet.missing or (not self.needs_all and self.books.can_run()):
            if self.resumes is None:
                self.pause([(Bucket.START, self.job.start_s)])
                return
            self.pause([(Bucket.RECOVERY, self._begin_again())])

    def _begin_again(self) -> float:
        """Whoever was awaited is there: seconds until the next step."""
        what = PROCESS if self.resumes is Action.RESCHEDULE and self.asked.in_steps else Action.RESTART
        if what is Action.RESTART and self.resumes is not Action.RESTART and self.strategy.loses == "step":
            self.books.roll_back(self.now)
        return self._seconds(what)

    def grow(self) -> None:
        """Whoever is free takes an empty seat: at the end of a step, so nothing is lost."""
        if not any(self.fleet.fits(seat) >= 0 for seat in self.fleet.missing):
            return
        action = Action.GROW if Action.GROW in self.system.actions else Action.RESTART
        if action not in self.system.actions and not self.asked.in_steps:
            return
        self.got.actions[action] += 1
        self.got.incidents["grow"] += 1
        rewire_s = self._fill()
        down_s = self._seconds(action)
        self.pause([(Bucket.RECOVERY, down_s + rewire_s)])


def name(node: int) -> str:
    return f"n{node}"


def _changes(scenario: Scenario, traces: Mapping[str, str]) -> tuple[Change, ...]:
    for spec in scenario.failures:
        if spec.kind == "trace":
            return tuple(read(traces[spec.file], spec.unit_s, spec.file))
    return ()
