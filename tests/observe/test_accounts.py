"""Buckets add up after every entry: of random schedules of faults on the control plane's machines, with any steps."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.control.recovery import Recovery
from everstep.core import events as e
from everstep.core.types import EpochPlan
from everstep.observe import goodput
from everstep.observe.view import Bucket
from everstep.observe.viewer import Viewer
from everstep.testing import schedules
from everstep.testing.accounts import add_up
from everstep.testing.claims import Violation
from everstep.testing.cluster import Cluster

Told = tuple[float, e.AnyEvent]


class Journal(list[tuple[float, e.Input]]):
    """The simulated controller's, which also writes into `told`."""

    told: list[Told]

    def append(self, line: tuple[float, e.Input]) -> None:
        super().append(line)
        self.told.append(line)


def told_by(seed: int, patch: pytest.MonkeyPatch) -> list[Told]:
    """Inputs and records of one schedule, in order, with the incidents closed as the real controller does."""
    told: list[Told] = []
    recovery = Recovery()

    def heard(now: float, record: e.AnyEvent) -> None:
        told.append((now, record))
        told.extend((now, closed) for closed in recovery.saw(record, now))

    class Overheard(Cluster):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            journal = Journal(self.controller.journal)
            told.extend(journal)
            journal.told, self.controller.journal, self.listener = told, journal, heard

    patch.setattr(schedules, "Cluster", Overheard)
    schedules.play(seed)
    return told


def with_steps(told: list[Told], chance: random.Random) -> list[e.Entry]:
    """Steps as they may be seen: late, of this or another epoch, by a counter of the job or none."""
    entries: list[e.Entry] = []
    plan: EpochPlan | None = None
    made = done = 0

    def write(at_s: float, event: e.AnyEvent) -> None:
        entries.append(e.Entry(len(entries) + 1, at_s, at_s, "schedule", plan.epoch if plan else 0, event))

    for at_s, event in told:
        write(at_s, event)
        if isinstance(event, e.EpochFormed):
            plan, made, done = event.plan, 0, max(0, done + made - chance.choice((0, 0, 1, 5, 100)))
        if plan is not None and chance.random() < 0.3:
            made += chance.choice((0, 1, 1, 3, 40))
            first_s = at_s - chance.uniform(-0.1, 3.0)
            total = chance.choice((done + made, done + made, -1))
            write(
                at_s, e.StepsSeen(plan.epoch, made, total, at_s - chance.uniform(0.0, 2.0), first_s, stall_s=made / 9)
            )
        if plan is not None and chance.random() < 0.02:
            back = chance.randint(0, done + made)
            made, done = max(0, back - done), min(done, back)
            write(at_s, e.StateRestored(plan.epoch, back, done + made, 1))
    return entries


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 100_000))
def test_buckets_add_up_after_every_entry_of_any_schedule(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(seed)
    entries = with_steps(told_by(seed, monkeypatch), chance)
    view = add_up(entries)
    assert view.entries == len(entries)
    cut = chance.randrange(len(entries))
    viewer = Viewer()
    for entry in entries[:cut]:
        viewer.add(entry)
    _stays_so(viewer, chance)
    loaded = Viewer.load(viewer.dump())
    for entry in entries[cut:]:
        loaded.add(entry)
    assert msgspec.json.encode(loaded.view) == msgspec.json.encode(view)


def _stays_so(viewer: Viewer, chance: random.Random) -> None:
    """Time alone adds what the accelerators have of it, and the next entry takes it back."""
    before, ahead_s = sum(viewer.buckets().values()), chance.uniform(0.0, 100.0)
    viewer.until(viewer.now_s + ahead_s)
    view = viewer.view
    assert sum(view.buckets.values()) == pytest.approx(before + viewer.accelerators * ahead_s)
    lost = sum(view.costs.values()) + view.buckets[Bucket.PRODUCTIVE.value]
    assert lost == pytest.approx(sum(view.buckets.values()))


def test_seconds_that_are_booked_nowhere_are_found(monkeypatch: pytest.MonkeyPatch, journal: list[e.Entry]) -> None:
    add_up(journal)
    book = goodput.Goodput._book

    def forgets(self: goodput.Goodput, bucket: str, *rest: object) -> None:
        if bucket != goodput.RECOVERY:
            book(self, bucket, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(goodput.Goodput, "_book", forgets)
    with pytest.raises(Violation, match="in the buckets, the job had"):
        add_up(journal)
