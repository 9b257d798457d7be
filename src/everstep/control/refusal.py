"""Nodes that are here, free, and not used: broken by their own examination, or with other versions than the rest."""

from __future__ import annotations

from collections.abc import Sequence

from everstep.control import membership
from everstep.control.draft import Draft
from everstep.control.job import NodeState
from everstep.core import events as e


def fit(draft: Draft, free: Sequence[NodeState]) -> list[NodeState]:
    """Those of `free` that can be used. Who is refused is told, once for each reason; and when that is over."""
    odd = {n.report.node: n.report.unfit for n in free if n.report.unfit}
    odd |= membership.mismatched([n.report for n in free if not n.report.unfit])
    return _refuse(draft, free, odd)


def fit_newcomers(draft: Draft, free: Sequence[NodeState]) -> list[NodeState]:
    """As `fit`, beside members that run: they are not among `free`, and versions are not compared."""
    return _refuse(draft, free, {n.report.node: n.report.unfit for n in free if n.report.unfit})


def _refuse(draft: Draft, free: Sequence[NodeState], odd: dict[str, str]) -> list[NodeState]:
    before = draft.job.refused
    names = {n.report.node for n in free}
    for name, what in odd.items():
        if before.get(name) != what:
            draft.note(e.Alert("check-failed", f"{name} is not used: {what}", name))
    for name in sorted(names & before.keys() - odd.keys()):
        draft.note(e.Alert("check-passed", f"{name} is used again"))
    now = {name: what for name, what in before.items() if name not in names and name in draft.job.nodes} | odd
    if now != before:
        draft.set(refused=now)
    return [n for n in free if n.report.node not in odd]
