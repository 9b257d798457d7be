"""How a job is doing, in one line: the progress line of `everstep run`."""

from __future__ import annotations

from everstep.observe.explain import state
from everstep.observe.text import duration
from everstep.observe.view import View, WorkerState

BETWEEN = " | "


def line(view: View, columns: int = 0) -> str:
    """What matters most first; what does not fit into `columns` (0: all fits) is left out. Empty before the first step
    of a job that has not begun."""
    parts = [part for part in _parts(view) if part]
    shown = ""
    for part in parts:
        longer = f"{shown}{BETWEEN}{part}" if shown else part
        if columns and len(longer) > columns:
            break
        shown = longer
    return shown or (parts[0][:columns] if parts else "")


def _parts(view: View) -> list[str]:
    epoch = f"epoch {view.newest_epoch}" if view.newest_epoch else ""
    if view.step < 0:
        return [view.stage and f"{view.stage}, no step yet", epoch, _last(view)]
    loss = loss_of(view)
    return [
        f"step {view.step} of {view.goal}" if view.goal else f"step {view.step}",
        f"{loss[0]} {loss[1]:.4g}" if loss else "",
        pace(view.step_s),
        epoch,
        _members(view),
        f"ETTR {view.ettr:.1%}" if view.ettr else "",
        _last(view),
    ]


def loss_of(view: View) -> tuple[str, float] | None:
    """The value that a person looks at: `loss`, else the first that says so."""
    names = [name for name in view.metrics if "loss" in name.lower()]
    name = "loss" if "loss" in view.metrics else names[0] if names else ""
    return (name, view.metrics[name]) if name else None


def pace(step_s: float) -> str:
    """Throughput, in the way that reads best; empty while it is unknown."""
    if step_s <= 0:
        return ""
    return f"{1 / step_s:.3g} steps/s" if step_s < 1 else f"{duration(step_s)} a step"


def acting(view: View) -> tuple[int, int]:
    """Workers that train, and how many the job wants of them."""
    if view.fleet.total or view.fleet.acting:
        return view.fleet.acting, view.fleet.acting + view.fleet.missing
    states = view.workers.states
    gone = sum(state == WorkerState.GONE for state in states)
    here = sum(state in (WorkerState.ACTS, WorkerState.SLOW) for state in states)
    return here, here + gone


def _members(view: View) -> str:
    here, wanted = acting(view)
    if not here and not wanted:
        return ""
    return f"{here} of {wanted} members" if wanted > here else f"{here} member{'s' * (here != 1)}"


def _last(view: View) -> str:
    """The newest incident."""
    if not view.incidents:
        return ""
    incident = view.incidents[-1]
    ago = duration(max(0.0, view.now_s - incident.opened_s))
    return f"{incident.id} {incident.kind} {ago} ago, {state(incident)}"
