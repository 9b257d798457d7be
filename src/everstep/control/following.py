"""Whether a node does what it was told: pure, asked before an order is repeated."""

from __future__ import annotations

from everstep.core.types import Action, Activity, Directive, NodeReport


def followed(report: NodeReport, directive: Directive) -> bool:
    """Whether the node's report shows that it does what the directive says; it may be further already."""
    if directive.leave and not report.leaving:
        return False
    match directive.action:
        case Action.RUN:
            lives = dict(enumerate(directive.lives))
            filled = [w for w in report.workers if not (w.gone and w.local_rank in directive.vacant)]
            current = all(w.life >= lives.get(w.local_rank, 0) for w in filled)
            return report.epoch > directive.epoch or (report.epoch == directive.epoch and current)
        case Action.STOP:
            at_rest = report.activity is Activity.STOPPED
            return report.epoch > directive.epoch or (report.epoch == directive.epoch and at_rest)
        case Action.PARK:
            return report.activity in (Activity.IDLE, Activity.STOPPED)
        case Action.LEAVE:
            return False
