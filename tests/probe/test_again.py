"""A script that is entered again in the same process: its steps count anew, and the first one is told."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

from everstep.control.crew import Worker  # noqa: E402 - only where torch is installed
from everstep.control.launch import Kind, SpawnRequest  # noqa: E402
from everstep.core.page import Page, Word  # noqa: E402
from everstep.core.types import Phase  # noqa: E402
from everstep.probe import boot  # noqa: E402


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create("again")
    boot.install(page)
    yield page
    boot.leave()  # closes the page


def worker_of(page: Page) -> Worker:
    """As its agent sees this process."""
    return Worker(0, 0, SpawnRequest(1, Kind.SCRIPT, "train.py", (), {}, "", "", ""), page)


def train(count: int) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(count):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()


def test_steps_count_anew_and_the_first_is_told_once(page: Page) -> None:
    train(3)
    last_ns, told = page[Word.STEP_NS], []
    before_s = boot.again(lambda: told.append(page[Word.STEPS]))
    assert before_s == pytest.approx(last_ns / 1e9)
    assert (page[Word.STEPS], page[Word.FIRST_STEP_NS], boot.steps()) == (0, 0, 0)
    assert page[Word.PHASE] == Phase.START and not told
    worker = worker_of(page)
    worker.born_ns = last_ns - 2 * 10**9
    anew = worker.progress(last_ns + 10**9)
    assert (anew.step, anew.stepped, anew.born_age_s) == (0, True, 3.0), "it is no new process"
    train(2)
    assert told == [1]
    assert (page[Word.STEPS], boot.steps()) == (2, 2)
    assert page[Word.FIRST_STEP_NS] > last_ns and page[Word.PHASE] == Phase.TRAIN


def test_before_any_step_there_is_no_last_one(page: Page) -> None:
    assert not worker_of(page).progress(1).stepped
    assert boot.again(lambda: None) == 0.0
