"""A worker's own time of a step: what goes to which account, what counts as a wait, and how much work there was."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is installed
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import everstep  # noqa: E402
from everstep.core.page import LOGGED, Page, Word  # noqa: E402
from everstep.core.work import StepWork  # noqa: E402
from everstep.probe import boot  # noqa: E402

NAP_S = 0.02


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create("owntime")
    boot.install(page)
    yield page
    boot.leave()  # closes the page


class Sleepy:
    """Saved, it takes a moment."""

    def __getstate__(self) -> dict[str, int]:
        time.sleep(NAP_S)
        return {}


class Slow(torch.utils.data.Dataset[Any]):
    def __init__(self, item: Any, seconds: float = 0.0) -> None:
        self.item, self.seconds = item, seconds

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return self.item


class Trainer:
    """`step()` makes one, and gives what the page says of it."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.model: torch.nn.Module = torch.nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer.step()  # the first one ends at a moment whose begin is unknown

    def step(self) -> StepWork:
        before = self.page[Word.STEPS]
        self.optimizer.zero_grad()
        self.model(torch.ones(2, 4)).sum().backward()
        self.optimizer.step()
        (work,) = self.page.work(before)
        return work


def page_time(page: Page) -> float:
    """When the last step ended."""
    return page[Word.STEP_NS] / 1e9


@pytest.fixture
def trainer(page: Page) -> Trainer:
    return Trainer(page)


def test_time_goes_to_data_saves_and_the_rest(trainer: Trainer, tmp_path: Path) -> None:
    next(iter(torch.utils.data.DataLoader(Slow(1.0, NAP_S))))
    torch.save({"slow": Sleepy()}, tmp_path / "a.pt")
    time.sleep(2 * NAP_S)
    work = trainer.step()
    assert work.step == 2
    assert work.data_s >= NAP_S and work.save_s >= NAP_S and work.compute_s >= 2 * NAP_S
    assert work.work_s == pytest.approx(work.data_s + work.save_s + work.compute_s)
    after = trainer.step()
    assert after.data_s == after.save_s == 0


def test_of_a_step_that_is_computed_twice_the_last_time_counts(trainer: Trainer) -> None:
    boot.lengths([7])
    time.sleep(5 * NAP_S)
    before = trainer.page[Word.BATCHES]
    boot.repeated(5 * NAP_S)
    assert trainer.page[Word.BATCHES] == before + 1, "it is a sign of work, though no step"
    time.sleep(NAP_S)
    work = trainer.step()
    assert NAP_S <= work.work_s < 5 * NAP_S and work.tokens == 0
    assert work.twice_s == pytest.approx(5 * NAP_S) and trainer.step().twice_s == 0


def test_waits_are_nobodys_work(trainer: Trainer) -> None:
    @boot.waiting
    def wait() -> None:
        time.sleep(10 * NAP_S)
        save()

    @boot.saving
    def save() -> None:
        time.sleep(NAP_S)
        idle()

    @boot.waiting
    def idle() -> None:
        time.sleep(10 * NAP_S)

    begin = page_time(trainer.page)
    wait()
    work = trainer.step()
    assert time.monotonic() - begin - work.work_s >= 20 * NAP_S
    assert work.save_s >= NAP_S  # what began last counts


def test_other_threads_do_not_count(trainer: Trainer) -> None:
    begun, over = threading.Event(), threading.Event()

    @boot.waiting
    def elsewhere() -> None:
        begun.set()
        over.wait()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    begun.wait()
    time.sleep(NAP_S)
    work = trainer.step()
    over.set()
    thread.join()
    assert work.work_s >= NAP_S


def test_what_was_undone_is_no_measure(trainer: Trainer) -> None:
    boot.undone()
    with pytest.raises(ValueError):  # nothing to unpack
        trainer.step()
    assert trainer.step().step == 3


def test_only_the_last_steps_are_held(page: Page, trainer: Trainer) -> None:
    for _ in range(LOGGED + 9):
        trainer.optimizer.step()
    assert [work.step for work in page.work(0)] == list(range(11, LOGGED + 11))
    assert [work.step for work in page.work(LOGGED + 8)] == [LOGGED + 9, LOGGED + 10]
    assert not page.work(LOGGED + 10)


@pytest.mark.parametrize(
    ("item", "told"),
    [
        ({"input_ids": torch.zeros(7, dtype=torch.int64)}, (3 * 7, 3 * 49)),
        ((torch.zeros(5, dtype=torch.int32), 0.0), (3 * 5, 3 * 25)),
        (torch.zeros(5), (3, 3)),  # features, not tokens: three samples
        (torch.zeros(2, 5, dtype=torch.int64), (3, 3)),
        ({"pixels": torch.zeros(5), "labels": 1}, (3, 3)),
        ("text", (0, 0)),
    ],
)
def test_shapes_tell_how_much_work_there_is(trainer: Trainer, item: Any, told: tuple[int, int]) -> None:
    batches = iter(torch.utils.data.DataLoader(Slow(item), batch_size=3))
    next(batches)
    work = trainer.step()
    assert (work.tokens, work.squares) == told
    next(batches)
    everstep.lengths([10])
    everstep.lengths(torch.tensor([2, 3]))
    next(batches)
    work = trainer.step()
    assert (work.tokens, work.squares) == (15, 113)  # the script knows better, whatever the order
    assert trainer.step().tokens == 0


def test_what_a_share_reads_counts_once(trainer: Trainer) -> None:
    """A session reads through a loader of torch's own."""
    loader = torch.utils.data.DataLoader(Slow(torch.zeros(5, dtype=torch.int64), NAP_S), batch_size=2)
    items = boot.reading(zip(range(2), loader))  # noqa: B905 - the loader has more
    assert [number for number, _ in items] == [0, 1]
    work = trainer.step()
    assert (work.tokens, work.squares) == (2 * 2 * 5, 2 * 2 * 25)
    assert work.data_s >= 2 * 2 * NAP_S


def test_steps_that_are_not_in_a_row_are_no_measure(page: Page) -> None:
    for step in (4, 5, 5, 9, 10, 7, 8):
        boot.committed(step)
    assert [work.step for work in page.work(0)] == [5, 8]  # 10 is ahead of where the session is


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="length -1"):
        everstep.lengths([3, -1])


def test_backward_under_ddp_is_hooked_and_its_hooks_are_gone_afterwards(trainer: Trainer, tmp_path: Path) -> None:
    """The waits themselves: tests/integration/test_straggler.py."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    try:
        trainer.model = DistributedDataParallel(torch.nn.Linear(4, 1))
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
        for _ in range(6):  # the one counted until now has stopped
            trainer.optimizer.step()
        loss = trainer.model(torch.ones(2, 4)).sum()
        loss.backward(retain_graph=True)
        assert not loss._backward_hooks
        loss.backward()
        trainer.step()
        with pytest.raises(RuntimeError, match="scalar"):
            torch.ones(2, requires_grad=True).exp().backward()
        trainer.step()
        begin = page_time(trainer.page)
        time.sleep(NAP_S)
        assert NAP_S <= trainer.step().work_s <= time.monotonic() - begin  # nothing stayed open
    finally:
        dist.destroy_process_group()
