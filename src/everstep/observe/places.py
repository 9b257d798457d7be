"""Who is where, as a fold: nodes, workers by rank, and how many accelerators act, warm up, wait or are missing.

Where nobody is listed by name (simulations of many nodes) `FleetSeen` tells the numbers.
"""

from __future__ import annotations

import msgspec

from everstep.core import events as e
from everstep.core.formation import Formation, Stage
from everstep.core.types import EpochPlan, ExitCause, NodeReport, WorkerReport
from everstep.observe.view import NodeState, NodeView, View, Workers, WorkerState

KEPT_LOST = 256  # nodes that are gone; of more, the oldest are forgotten
ACT, WARM, WAIT, GONE = range(4)  # what a rank's accelerator is for
STAGES = {stage: number for number, stage in enumerate(Stage)}
STEPS = len(STAGES)  # a member that made a step in its formation
NO_SESSION = 7


class Places(msgspec.Struct):
    """Lists by rank of the plan are as long as `world`; the columns of View.workers go on with standbys."""

    at: dict[str, int] = {}  # node -> its place in View.nodes
    first: dict[str, int] = {}  # member of the plan -> its first rank
    world: int = 0
    epoch: int = 0
    formed: bool = False  # some formation of this epoch was made
    uses: list[int] = []  # of each rank
    counts: list[int] = msgspec.field(default_factory=lambda: [0] * 4)  # of each use
    said: list[int] = []  # of each rank: life and stage in the newest report, as a number
    drained: list[str] = []  # places that a person or the policy wants empty: node/local_rank
    vacant: list[int] = []  # ranks of these
    slots: int = 1  # of a node
    here: int = 0  # nodes
    here_slots: int = 0
    least: int = 1
    most: int = 1
    wanted: int = 1  # nodes: as many as there were at once, and no fewer than the job needs
    told: bool = False  # by FleetSeen

    # Nodes ----------------------------------------------------------------------------------------------

    def submitted(self, least: int, most: int) -> None:
        self.least, self.most, self.wanted = least, most, least

    def _node(self, view: View, name: str, at_s: float) -> NodeView:
        n = self.at.get(name)
        if n is None:
            n = self.at[name] = len(view.nodes)
            view.nodes.append(NodeView(name, NodeState.LOST, since_s=at_s))
        return view.nodes[n]

    def joined(self, view: View, event: e.NodeJoined, at_s: float) -> None:
        node = self._node(view, event.node, at_s)
        if node.state is NodeState.LOST:
            self.here += 1
            self.here_slots += event.slots
            self.wanted = max(self.wanted, min(self.here, self.most))
        node.state, node.how, node.since_s = NodeState.SPARE, "", at_s
        node.address, node.slots, node.first_rank = event.address, event.slots, -1
        self.slots = event.slots or self.slots
        if self.told:
            self._forget(view)
        else:
            self._standbys(view)

    def lost(self, view: View, event: e.NodeLost, at_s: float) -> None:
        node = self._node(view, event.node, at_s)
        was_spare = node.state is NodeState.SPARE
        if node.state is not NodeState.LOST:
            self.here -= 1
            self.here_slots -= node.slots
        node.state, node.how, node.since_s = NodeState.LOST, event.how.value, at_s
        if node.first_rank >= 0:
            for rank in range(node.first_rank, node.first_rank + node.slots):
                self._use(rank, GONE)
                view.workers.states[rank] = int(WorkerState.GONE)
                _forget(view, rank)
        node.first_rank = -1
        if was_spare and not self.told:
            self._standbys(view)
        self._forget(view)

    def empty(self, view: View, place: str, undo: bool) -> None:
        """Nobody is to be in this place any more, or somebody again."""
        if undo and place in self.drained:
            self.drained.remove(place)
        elif not undo and place not in self.drained:
            self.drained.append(place)
        self._vacate(view)

    def _vacate(self, view: View) -> None:
        before, self.vacant = self.vacant, []
        for place in self.drained:
            node, _, local = place.rpartition("/")
            rank = self.first.get(node, -1) + int(local)
            if node in self.first and rank < len(self.uses):
                self.vacant.append(rank)
        for rank in {*before, *self.vacant}:
            if rank < len(self.uses):
                self._use(rank, self._use_of(view, rank))

    def leaving(self, view: View, target: str, undo: bool, at_s: float) -> None:
        n = self.at.get(target)
        if n is not None and view.nodes[n].state is not NodeState.LOST:
            node = view.nodes[n]
            staying = NodeState.UP if node.first_rank >= 0 else NodeState.SPARE
            state = staying if undo else NodeState.LEAVING
            if state is not node.state:
                node.state, node.since_s = state, at_s

    def _forget(self, view: View) -> None:
        """Of nodes that are gone (of simulated ones: of all) only the newest are listed."""
        gone = [node for node in view.nodes if self.told or (node.state is NodeState.LOST and node.first_rank < 0)]
        if len(gone) <= KEPT_LOST:
            return
        gone.sort(key=lambda node: (node.state is NodeState.LOST, node.since_s))
        drop = {node.name for node in gone[: len(gone) - KEPT_LOST // 2]}
        names = [node.name for node in view.nodes]
        view.nodes[:] = [node for node in view.nodes if node.name not in drop]
        self.at = {node.name: n for n, node in enumerate(view.nodes)}
        workers = view.workers
        workers.nodes[:] = [self.at.get(names[n], -1) if n >= 0 else -1 for n in workers.nodes]

    # The plan -------------------------------------------------------------------------------------------

    def planned(self, view: View, plan: EpochPlan, at_s: float) -> None:
        """A new epoch: every place of it gets a new process."""
        self.first = {member.node: member.first_rank for member in plan.members}
        self.world, self.epoch, self.formed = plan.world_size, plan.epoch, False
        self.counts = [self.world, 0, 0, 0]
        if not plan.members:  # simulated: nobody is listed
            return
        listed = self.world
        self.uses, self.said = [ACT] * listed, [-1] * listed
        view.workers = Workers(
            [-1] * listed, [0] * listed, [0] * listed, [int(WorkerState.WARMS)] * listed, [-1] * listed,
            [-1.0] * listed, [0] * listed,
        )  # fmt: skip
        for node in view.nodes:
            if node.state is not NodeState.LOST:
                node.first_rank = -1
        for member in plan.members:
            node = self._node(view, member.node, at_s)
            node.first_rank, node.slots, node.address = member.first_rank, member.slots, member.address
            node.state = NodeState.UP if node.state is NodeState.SPARE else node.state
            for k in range(member.slots):
                view.workers.nodes[member.first_rank + k] = self.at[member.node]
                view.workers.locals[member.first_rank + k] = k
        for node in view.nodes:
            if node.first_rank < 0 and node.state is NodeState.UP:
                node.state, node.since_s = NodeState.SPARE, at_s
        self._vacate(view)
        self._standbys(view)

    def amended(self, view: View, plan: EpochPlan, at_s: float) -> None:
        """A node got a place in the running epoch; whoever was there stays as it is."""
        before, said, formed = view.workers, self.said, self.formed
        world = len(self.uses)
        self.planned(view, plan, at_s)
        self.formed = formed
        kept = min(world, self.world)
        after = view.workers
        after.lives[:kept], after.states[:kept] = before.lives[:kept], before.states[:kept]
        after.roles[:kept], after.own_s[:kept] = before.roles[:kept], before.own_s[:kept]
        after.rss_bytes[:kept], self.said[:kept] = before.rss_bytes[:kept], said[:kept]
        for rank in range(len(self.uses)):
            lost = view.nodes[after.nodes[rank]].state is NodeState.LOST
            self._use(rank, GONE if lost else self._use_of(view, rank))

    def _standbys(self, view: View) -> None:
        """Places of nodes that wait beside the plan, behind its ranks."""
        workers, listed = view.workers, len(self.uses)
        spare = [n for n, node in enumerate(view.nodes) if node.state is NodeState.SPARE]
        places = [(n, k) for n in spare for k in range(view.nodes[n].slots)]
        count = len(places)
        workers.nodes[listed:] = [n for n, _ in places]
        workers.locals[listed:] = [k for _, k in places]
        workers.states[listed:] = [int(WorkerState.WAITS)] * count
        workers.lives[listed:], workers.roles[listed:] = [0] * count, [-1] * count
        workers.own_s[listed:], workers.rss_bytes[listed:] = [-1.0] * count, [0] * count

    # Workers --------------------------------------------------------------------------------------------

    def formation(self, view: View, formation: Formation) -> None:
        """Who has a seat acts; the others warm up or wait."""
        self.formed = True
        roles = view.workers.roles
        roles[: self.world] = [-1] * len(self.uses)
        for role, seat in enumerate(formation.seats):
            place, _, life = seat.worker.partition("#")
            node, _, local = place.rpartition("/")
            first = self.first.get(node)
            if first is None:
                continue
            rank = first + int(local)
            roles[rank] = role
            view.workers.lives[rank] = int(life or 0)
        for rank in range(len(self.uses)):
            if roles[rank] >= 0 and view.workers.states[rank] == WorkerState.WAITS:
                self.state(view, rank, WorkerState.WARMS)
            self._use(rank, self._use_of(view, rank))

    def stepped(self, view: View) -> None:
        """Everybody who has a role made a step."""
        states, roles = view.workers.states, view.workers.roles
        for rank, use in enumerate(self.uses):
            if use == ACT and states[rank] == WorkerState.WARMS and (not self.formed or roles[rank] >= 0):
                states[rank] = int(WorkerState.ACTS)

    def _use_of(self, view: View, rank: int) -> int:
        if self.uses[rank] == GONE:
            return GONE
        if not self.formed or view.workers.roles[rank] >= 0:
            return ACT
        waits = view.workers.states[rank] == WorkerState.WAITS or rank in self.vacant
        return WAIT if waits else WARM

    def _use(self, rank: int, use: int) -> None:
        before = self.uses[rank]
        if before != use:
            self.counts[before] -= 1
            self.counts[use] += 1
            self.uses[rank] = use

    def state(self, view: View, rank: int, state: WorkerState) -> None:
        if 0 <= rank < len(self.uses):
            view.workers.states[rank] = int(state)
            self._use(rank, self._use_of(view, rank))
            if state is WorkerState.GONE:
                _forget(view, rank)

    def is_slow(self, view: View, rank: int) -> bool:
        return 0 <= rank < len(self.uses) and view.workers.states[rank] == WorkerState.SLOW

    def reported(self, view: View, report: NodeReport, at_s: float) -> bool:
        """True: something of it is new."""
        if report.leaving:
            self.leaving(view, report.node, False, at_s)
        first = self.first.get(report.node)
        if first is None or report.epoch != self.epoch:
            return False
        changed = False
        said, listed = self.said, len(self.uses)
        for worker in report.workers:
            number = worker.life * 16 + (8 if worker.gone else 0) + _stage(worker)
            rank = first + worker.local_rank
            if rank < listed and said[rank] != number:
                said[rank] = number
                changed = True
                self._heard(view, rank, worker)
        return changed

    def _heard(self, view: View, rank: int, worker: WorkerReport) -> None:
        workers = view.workers
        if worker.life > workers.lives[rank]:
            workers.lives[rank] = worker.life
            self.state(view, rank, WorkerState.WARMS)
        if worker.life < workers.lives[rank]:
            return
        if worker.gone:
            self.state(view, rank, WorkerState.GONE)
        elif worker.session is not None:
            self._staged(view, rank, _stage(worker))

    def _staged(self, view: View, rank: int, stage: int) -> None:
        state, seated = view.workers.states[rank], view.workers.roles[rank] >= 0
        if stage == STAGES[Stage.READY] and not seated and self.formed:
            self.state(view, rank, WorkerState.WAITS)
        elif stage == STEPS and seated and state in (WorkerState.WAITS, WorkerState.WARMS):
            self.state(view, rank, WorkerState.ACTS)
        elif stage == STAGES[Stage.LEFT]:
            self.state(view, rank, WorkerState.GONE)

    def ended(self, view: View, event: e.WorkerEnded) -> None:
        if event.rank < len(self.uses) and (event.exit.failed or event.exit.cause is ExitCause.OK):
            self.state(view, event.rank, WorkerState.GONE)

    def seen(self, view: View, event: e.WorkersSeen) -> None:
        if event.epoch == self.epoch:
            count = min(len(self.uses), len(event.own_s))
            view.workers.own_s[:count] = event.own_s[:count]
            view.workers.rss_bytes[:count] = event.rss_bytes[:count]
            for rank, state in enumerate(view.workers.states[:count]):
                if state == WorkerState.GONE:  # the record tells what was heard of it last
                    _forget(view, rank)
            kept = zip(view.workers.roles, event.kept_steps, strict=False)
            view.memory_steps = {str(role): step for role, step in kept if role >= 0 and step >= 0}

    # Numbers --------------------------------------------------------------------------------------------

    def fleet(self, view: View, event: e.FleetSeen) -> None:
        fleet = view.fleet
        fleet.acting, fleet.spare, fleet.missing, fleet.slow = event.acting, event.spare, event.missing, event.slow
        fleet.total = event.acting + event.spare + event.missing
        self.told = view.simulated = True

    def count(self, view: View) -> tuple[int, int, int, int]:
        """Accelerators that act, that warm up, that wait, and that are missing; View.fleet tells them too."""
        fleet = view.fleet
        if self.told:
            return fleet.acting, 0, fleet.spare, fleet.missing
        counts = self.counts
        acting, warming = counts[ACT], counts[WARM]
        if self.world and not self.uses:  # an old simulation
            idle, missing = 0, 0
        elif not self.world:  # nothing runs yet: whoever is here is to act
            acting, idle = self.here_slots, 0
            missing = max(0, self.wanted - self.here) * self.slots
        else:
            idle = max(0, self.here_slots - acting - warming)
            missing = max(0, self.wanted - self.here) * self.slots
        fleet.acting, fleet.spare, fleet.missing = acting, warming + idle, missing
        fleet.total = acting + warming + idle + missing
        fleet.slow = view.workers.states.count(WorkerState.SLOW)
        return acting, warming, idle, missing


def _forget(view: View, rank: int) -> None:
    """Numbers of who is gone would go into medians, and look like somebody's."""
    view.workers.own_s[rank], view.workers.rss_bytes[rank] = -1.0, 0


def _stage(worker: WorkerReport) -> int:
    session = worker.session
    if session is None:
        return NO_SESSION
    return STEPS if session.stage is Stage.MEMBER and session.resumed else STAGES[session.stage]
