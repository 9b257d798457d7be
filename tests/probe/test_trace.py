"""What a worker writes down of itself: which spans, in which order, from several threads, and what a step costs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from everstep.control.tracing import Ring  # noqa: E402 - only where torch is installed
from everstep.core.page import Page  # noqa: E402
from everstep.core.trace import RECORD, RECORDS, RING_BYTES, Kind, Record  # noqa: E402
from everstep.probe import boot  # noqa: E402
from everstep.probe.trace import Recorder  # noqa: E402

TRAINING = (Kind.DATA, Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("EVERSTEP_EPOCH", "2")
    page = Page.create("trace", RING_BYTES)
    boot.install(page)
    yield page
    boot.leave()  # closes the page


@pytest.fixture
def ring(page: Page) -> Iterator[Ring]:
    ring = Ring(page.fd)
    yield ring
    ring.close()


def new(ring: Ring) -> list[Record]:
    """Without the waits for nobody that there are once another test of this process made a DistributedDataParallel."""
    records = [Record(*RECORD.unpack(record)) for record in ring.new(time.monotonic_ns(), over=True)]
    return [record for record in records if record.kind != Kind.SUMS]


def train(num_steps: int, micro_batches: int = 1) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = iter(torch.utils.data.DataLoader(torch.ones(64, 4)))
    for _ in range(num_steps):
        for _ in range(micro_batches):
            model(next(loader)).sum().backward()
        optimizer.step()


def test_a_step_is_data_forward_backward_update(ring: Ring) -> None:
    began = new(ring)
    assert [(each.kind, each.step, each.epoch) for each in began] == [(Kind.BEGAN, 3, 2)]
    train(3, micro_batches=2)
    records = new(ring)
    assert [each.kind for each in records if each.kind not in TRAINING] == [Kind.START, Kind.STEP, Kind.STEP]
    third = [each for each in records if each.step == 3 and each.kind in TRAINING]
    kinds = [each.kind for each in sorted(third, key=lambda each: (each.begin_ns, each.end_ns))]
    assert kinds == [Kind.DATA, Kind.FORWARD, Kind.BACKWARD] * 2 + [Kind.UPDATE]
    (step,) = [each for each in records if each.kind == Kind.STEP and each.step == 3]
    borders = [step.begin_ns, *(t for each in sorted(third) for t in (each.begin_ns, each.end_ns)), step.end_ns]
    assert borders == sorted(borders), "one after the other, and inside their step"


def test_saves_loads_and_evaluation_are_told(ring: Ring, tmp_path: Path) -> None:
    train(1)
    new(ring)
    model = torch.nn.Linear(4, 4)
    model.eval()
    torch.save(torch.ones(1 << 16), tmp_path / "a.pt")
    model.train()
    torch.load(tmp_path / "a.pt")
    assert [each.kind for each in new(ring)] == [Kind.EVAL, Kind.SAVE, Kind.EVAL, Kind.LOAD]


def test_what_is_in_the_background_is_told_on_a_track_of_its_own(ring: Ring, tmp_path: Path) -> None:
    new(ring)
    thread = threading.Thread(target=torch.save, args=(torch.ones(4), tmp_path / "a.pt"), name="everstep-snapshot")
    thread.start()
    thread.join()
    torch.load(tmp_path / "a.pt")
    saved, loaded = new(ring)
    assert (saved.kind, saved.track, loaded.kind, loaded.track) == (Kind.SAVE, 3, Kind.LOAD, 1)


def test_a_collective_is_told_by_name_and_bytes_and_found_while_it_lasts(ring: Ring) -> None:
    import torch.distributed as dist

    new(ring)
    inside: list[tuple[int, int]] = []

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dist.barrier()
        dist.all_reduce(torch.ones(10))
        dist.broadcast_object_list([Spy(ring, inside)], 0)
    finally:
        dist.destroy_process_group()
    told = {each.kind: each for each in new(ring)}
    assert told[Kind.ALL_REDUCE].amount == 40
    assert {Kind.BARRIER, Kind.ALL_REDUCE, Kind.BROADCAST_OBJECT_LIST} <= set(told)
    assert inside and inside[0][0] == Kind.BROADCAST_OBJECT_LIST + 1
    assert ring.inside() == (0, 0)


class Spy:
    """Sent, it notes what its sender is in."""

    def __init__(self, ring: Ring, seen: list[tuple[int, int]]) -> None:
        self.ring, self.seen = ring, seen

    def __reduce__(self) -> tuple[Any, ...]:
        self.seen.append(self.ring.inside())
        return (int, ())


def test_threads_write_at_once_and_every_record_is_whole(page: Page, ring: Ring) -> None:
    recorder, count = Recorder(), RECORDS // 8
    recorder.begin(page)

    def write(number: int) -> None:
        for k in range(count):
            recorder.span(Kind.SUM, number, number, number * count + k)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    records = [each for each in new(ring) if each.kind == Kind.SUM]
    assert sorted(each.amount for each in records) == list(range(4 * count))
    assert all(each.begin_ns == each.end_ns == each.amount // count for each in records)
    assert len({each.track for each in records}) == 4


def test_a_page_without_a_ring_is_told_nothing() -> None:
    page = Page.create("none")
    boot.install(page)
    try:
        train(2)
    finally:
        boot.leave()
