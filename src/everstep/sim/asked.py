"""The shipped policy, asked from a simulated job: what it is told, and what of its answers is kept.

Everything is counted in nodes, because the workers of a node fail together; so its curves, which are over the number
of workers, are made ones over nodes, and losses become accelerator-seconds again.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from everstep.core.decisions import Action, Decision
from everstep.plan.barred import Bars, of_corrupt, of_dead, of_slow
from everstep.plan.costs import Costs, Curve
from everstep.plan.policy import KEPT, Situation, Tier, decide, why_not
from everstep.plan.presets import Preset
from everstep.sim.books import Books, shape
from everstep.sim.scenario import Scenario

# Who has one of these needs no stop of all workers: they live on and make the step again.
STEP_LEVEL = {Action.RETRY, Action.PROMOTE, Action.SHRINK, Action.REROUTE, Action.TAKE_OVER, Action.RESPAWN}
STEP_LEVEL |= {Action.REPARTITION, Action.ROLL_BACK, Action.EVICT}

LEFT = {Action.RETRY: "it leaves its place"}
# What of a situation is not the same all through a run.
CHANGING = ("kind", "failed", "hit", "places", "workers", "standbys", "spares", "tiers", "step_s", "redundant")


class Asked:
    def __init__(self, scenario: Scenario, system: Preset, books: Books) -> None:
        self.system, self.books = system, books
        self.per_node = scenario.cluster.accelerators_per_node
        self.costs = by_node(system.costs, self.per_node)
        self.in_steps = scenario.job.session and bool(system.actions & STEP_LEVEL)
        self._known: dict[tuple[object, ...], Decision] = {}

    def decide(self, kind: str, seats: Sequence[int], places: int) -> Decision:
        """The policy is pure: it is asked once for all incidents of the same situation."""
        situation = self.situation(kind, seats, places)
        known = tuple(getattr(situation, name) for name in CHANGING)
        decision = self._known.get(known)
        if decision is None:
            made = decide(situation, self.costs, self.system.actions)
            decision = self._known[known] = scaled(made, self.per_node)
        return decision

    def situation(self, kind: str, seats: Sequence[int], places: int, slowdown: float = 1.0) -> Situation:
        """Counted in nodes: those of one node fail together. A slow one has its seat still, a lost one had it."""
        fleet, job, actions = self.books.fleet, self.books.job, self.system.actions
        failed, hit = len(seats), len({seat // fleet.per_replica for seat in seats})
        stages, micro_batches = shape(job)
        progress, saving = self.books.progress, self.system.saving
        lost = progress.steps - progress.durable(self.books.booked_s).steps
        alive = kind in ("drain", "slow")
        standbys = fleet.num_fitting() if kind in ("drain", "node-lost") else len(fleet.standbys)
        spares = standbys if alive or not self.in_steps or Action.PROMOTE not in actions else 0
        made = Situation(
            kind=kind, workers=max(1, fleet.present + (0 if kind == "slow" else failed - places)), failed=failed,
            gone=kind not in ("drain", "slow", "corrupt"), in_steps=self.in_steps, fixed=job.fixed,
            least=max(job.min_nodes, 0 if job.law in ("table", "nodes") else job.min_replicas * fleet.per_replica),
            copies=1 if fleet.replicas > 1 or job.law != "action" else 0, standbys=standbys,
            places=places, spares=spares, replicas=fleet.replicas, hit=hit, stages=stages, micro_batches=micro_batches,
            redundant=self.books.roles is None or not self.books.roles.fatal,
            tiers=(Tier(KEPT, lost, saving.load_s),) if progress.every else (),
            step_s=max(self.books.step_s(), 1e-9), slowdown=slowdown,
        )  # fmt: skip
        return msgspec.structs.replace(made, barred=self._barred(made))

    def _barred(self, s: Situation) -> Bars:
        """What the shipped runtime would not do either; other systems are as their presets say."""
        if s.kind == "drain":
            return LEFT
        if not self.system.shipped or not s.in_steps or not s.copies:
            return {}
        if s.kind == "slow":
            return of_slow(pipeline=s.stages > 1)
        if s.kind == "corrupt":
            return of_corrupt(kept=bool(s.tiers))
        on = any(not why_not(action, s) for action in (Action.SHRINK, Action.PROMOTE))
        return of_dead(fixed=s.fixed, filled=s.standbys >= s.failed) if on else {}


def by_node(costs: Costs, per_node: int) -> Costs:
    """Curves over the number of nodes instead of workers."""
    priors = {}
    for what, curve in costs.priors.items():
        points = {max(1, round(workers / per_node)): seconds for workers, seconds in curve.points}
        priors[what] = Curve(tuple(points.items()), curve.source)
    return msgspec.structs.replace(costs, priors=priors)


def scaled(decision: Decision, per_node: int) -> Decision:
    """Losses in accelerator-seconds instead of node-seconds."""
    replace = msgspec.structs.replace
    others = (replace(a, loss_s=a.loss_s * per_node if a.feasible else a.loss_s) for a in decision.alternatives)
    return replace(decision, loss_s=decision.loss_s * per_node, alternatives=tuple(others))
