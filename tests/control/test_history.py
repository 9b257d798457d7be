"""The past of a journal of many segments is what a fold over all its entries shows."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import msgspec
import pytest

from everstep.control import history as module
from everstep.control import tending
from everstep.control.history import History
from everstep.control.journal import Journal, JournalError, read
from everstep.control.segments import Files
from everstep.core import events as e
from everstep.observe.view import KEPT_INCIDENTS, View
from everstep.observe.viewer import Viewer
from everstep.sim.engine import Engine
from everstep.sim.scenario import build

TREE = {
    "days": 200.0,
    "cluster": {"nodes": 10, "accelerators_per_node": 4, "standbys": 1, "repair_s": 3600.0},
    "job": {"step_s": 10.0},
    "saves": {"every_steps": 200},
    "failures": [{"kind": "exponential", "rate": 200.0}],
    "strategy": {"preset": "everstep"},
}


def simulated(path: Path, segment_bytes: int) -> None:
    scenario = build(TREE, "test")
    with Journal.open(path, "job", segment_bytes) as book:
        Engine(scenario, random.Random(1), lambda at, epoch, event: book.append(event, at, at, epoch) and None).run()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder, not tended."""
    folder = tmp_path_factory.mktemp("recorded")
    simulated(folder / "journal.jsonl", 120_000)
    return folder


@pytest.fixture
def tended(recorded: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "tended"
    shutil.copytree(recorded, folder)
    tending.tend(folder / "journal.jsonl")
    return folder


def shown(view: View) -> object:
    return msgspec.to_builtins(view)


def folded(entries: list[e.Entry], at_s: float) -> View:
    viewer = Viewer()
    for entry in entries:
        if entry.t_s - entries[0].t_s > at_s:
            break
        viewer.add(entry)
    viewer.until(min(at_s, entries[-1].t_s - entries[0].t_s))
    return viewer.view


def test_any_moment_is_shown_as_it_was(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 500)
    entries = list(read(recorded / "journal.jsonl"))
    past, chance = History(recorded), random.Random(2)
    assert past.span_s == entries[-1].t_s - entries[0].t_s
    moments = [chance.uniform(0, past.span_s) for _ in range(8)]
    for at_s in (*moments, *sorted(moments), 0.0, past.span_s, 2 * past.span_s):
        assert shown(past.at(at_s)) == shown(folded(entries, at_s))
    first, last = sorted(moments[:2])
    assert list(past.events(first, last)) == [x for x in entries if first <= x.t_s - entries[0].t_s <= last]


def test_kept_views_are_begun_with(tended: Path, recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest moment exactly; an older one, whose ticks were compacted, in all but the curves' detail."""
    entries = list(read(recorded / "journal.jsonl"))
    files, seen = Files(tended / "journal.jsonl"), []
    add = Viewer.add
    monkeypatch.setattr(Viewer, "add", lambda viewer, entry: (seen.append(entry.n), add(viewer, entry))[1])
    viewer, follower = History(tended).newest()
    closed = files.numbers()
    assert len(closed) > 4 and len(seen) < len(entries) / len(closed)
    whole = folded(entries, entries[-1].t_s)
    assert shown(viewer.view) == shown(whole) and follower.new() == []
    past, at_s = History(tended), 0.45 * entries[-1].t_s
    for moment in (0.1 * at_s, at_s):
        seen.clear()
        view = past.at(moment)
        assert 0 < len(seen) < 1.5 * len(entries) / len(closed)
    expected = folded(entries, at_s)
    assert (view.step, view.num_incidents, view.epoch) == (expected.step, expected.num_incidents, expected.epoch)
    assert view.buckets == pytest.approx(expected.buckets, rel=1e-3, abs=1.0)


def test_time_goes_on_when_a_controller_has_another_clock(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "journal.jsonl", "job") as book:
        for event, t_s, wall_s in (
            (e.ControllerStarted(1), 1000.0, 5.0),
            (e.Alert("a", "b"), 1100.0, 105.0),
            (e.ControllerStarted(2), 7.0, 165.0),
            (e.Alert("c", "d"), 17.0, 175.0),
        ):
            book.append(event, t_s, wall_s, 0)
    past = History(tmp_path)
    viewer, follower = past.newest()
    assert past.span_s == viewer.view.now_s == pytest.approx(170.0) and follower.place.n == 4
    assert [entry.n for entry in past.events(150.0, 165.0)] == [3]


def test_an_incident_that_the_view_no_longer_has(tended: Path) -> None:
    opened = [x.event for x in read(tended / "journal.jsonl") if isinstance(x.event, e.IncidentOpened)]
    past = History(tended)
    assert len(opened) > KEPT_INCIDENTS + 50
    for event in (opened[3], opened[len(opened) // 3], opened[-1]):
        found = past.incident(event.incident)
        assert found is not None and (found.id, found.why) == (event.incident, event.why) and found.timeline
    assert opened[3].incident not in {each.id for each in past.newest()[0].view.incidents}
    assert past.incident("I999999") is None and past.incident("nonsense") is None


def test_views_that_cannot_be_had_are_done_without(tended: Path, recorded: Path) -> None:
    files = Files(tended / "journal.jsonl")
    last = files.numbers()[-1]
    files.view(last).write_bytes(files.view(last).read_bytes()[:-20])
    files.view(last - 1).write_bytes(b"x")
    files.view(last - 2).unlink()
    viewer, _ = History(tended).newest()
    entries = list(read(recorded / "journal.jsonl"))
    whole = folded(entries, entries[-1].t_s)
    assert viewer.view.step == whole.step and viewer.view.num_incidents == whole.num_incidents
    at_s = History(tended).span_s
    assert History(tended).at(at_s).num_incidents == whole.num_incidents
    tending.tend(files.path)
    assert all(files.view(number).stat().st_size > 1000 for number in files.numbers())
    files.packed(2).unlink()
    assert History(tended).at(at_s).step == whole.step, "who looks back reads over a gap"
    with pytest.raises(JournalError, match="segments 2 to 2 are missing"):
        list(read(files.path))


def test_the_same_seed_gives_the_same_files(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        simulated(folder / "journal.jsonl", 120_000)
        for _ in range(number + 1):
            tending.tend(folder / "journal.jsonl")
    one, two = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)
    assert one == two and any(name.endswith(".gz") for name in one)
