"""What must hold of the buckets of a job's view, after every entry of its journal, whoever wrote that."""

from __future__ import annotations

import math
from collections.abc import Iterable

from everstep.core import events as e
from everstep.observe.view import Bucket, View
from everstep.observe.viewer import Viewer
from everstep.testing.claims import require

TOLERANCE = 1e-3  # of what the job had


def add_up(entries: Iterable[e.Entry]) -> View:
    """The view of these entries. Raises Violation where the buckets are not what the accelerators had of time."""
    viewer, held = Viewer(), 0.0
    for entry in entries:
        had, before_s = viewer.accelerators, viewer.now_s
        viewer.add(entry)
        held += had * (viewer.now_s - before_s)
        check(viewer.buckets(), held, f"after entry {entry.n} ({type(entry.event).__name__})")
    view = viewer.view
    lost = sum(view.costs.values()) + view.buckets[Bucket.PRODUCTIVE.value]
    require(math.isclose(lost, held, rel_tol=TOLERANCE, abs_tol=1e-6), f"costs: {view.costs} and {view.buckets}")
    require(-1e-9 <= view.ettr <= 1 + 1e-9, f"ETTR {view.ettr}")
    return view


def check(buckets: dict[str, float], held: float, when: str) -> None:
    total = sum(buckets.values())
    apart = abs(total - held)
    require(apart <= TOLERANCE * held + 1e-6, f"{when}: {total} in the buckets, the job had {held}")
    least = min(buckets, key=buckets.__getitem__)
    require(buckets[least] >= -TOLERANCE * held - 1e-6, f"{when}: {buckets[least]} of {least}")
