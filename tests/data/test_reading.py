"""Loader workers: the same samples and the same bits as without, whatever is asked for next and whoever is killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from everstep.data.batches import Batches
from everstep.data.reading import WorkerDied

SIZE = 20
BATCH = {"global_batch": 6, "micro_batch": 2, "seed": 3}  # a pass ends in the midst of step 3

Sample = tuple[int, torch.Tensor, float, float, int]


class Noisy(Dataset[Sample]):
    """Sample i: i, random numbers of three kinds, and the process which read it."""

    def __init__(self, bad: int = -1, deadly: int = -1) -> None:
        self.bad, self.deadly = bad, deadly

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Sample:
        if index == self.bad:
            raise LookupError(f"no sample {index}")
        if index == self.deadly and torch.utils.data.get_worker_info() is not None:
            os._exit(7)
        return index, torch.rand(2), random.random(), float(numpy.random.rand()), os.getpid()


def shown(batches: Batches, step: int, num_members: int, role: int) -> list[Any]:
    """Samples and random numbers of a share, without who read them; the training's generator is left as it was."""
    before = torch.get_rng_state()
    share = [[part.tolist() for part in batch[:-1]] for _, batch in batches.share(step, num_members, role)]
    assert torch.equal(torch.get_rng_state(), before), "reading drew from the training's generator"
    return share


@pytest.fixture
def ahead() -> Iterator[Batches]:
    batches = Batches(Noisy(), num_workers=2, **BATCH)
    yield batches
    batches.close()
    assert not workers(batches) and not multiprocessing.active_children()


def workers(batches: Batches) -> list[Any]:
    assert batches._readers is not None
    loading = batches._readers._loading
    return list(loading._workers) if loading is not None else []


CALLS = {
    "pass after pass": [(step, 1, 0) for step in range(8)],
    "redone": [(2, 2, 1), (3, 2, 1), (3, 2, 1), (3, 2, 1), (4, 2, 1)],
    "other members": [(2, 2, 1), (3, 2, 1), (3, 3, 1), (4, 3, 1), (4, 1, 0), (5, 1, 0), (5, 2, 0)],
    "back and forth": [(9, 2, 0), (1, 2, 1), (30, 1, 0), (0, 1, 0)],
    "nothing for some": [(2, 9, 8), (3, 9, 5), (4, 9, 5), (4, 2, 0)],
}


def test_samples_and_bits_are_those_of_reading_without_workers(ahead: Batches) -> None:
    alone = Batches(Noisy(), **BATCH)
    for kind, calls in CALLS.items():
        for call in calls:
            assert shown(ahead, *call) == shown(alone, *call), f"{kind}: {call}"
    order = list(itertools.chain(*(micro.indices for step in range(10) for micro, _ in ahead.share(step, 1, 0))))
    assert [sorted(order[first : first + SIZE]) for first in (0, 20, 40)] == [list(range(SIZE))] * 3
    readers = {pid for step in range(4) for _, batch in ahead.share(step, 1, 0) for pid in batch[-1].tolist()}
    assert readers == {worker.pid for worker in workers(ahead)} and os.getpid() not in readers


def test_a_share_that_is_left_half_read_is_no_harm(ahead: Batches) -> None:
    alone = Batches(Noisy(), **BATCH)
    one, other = ahead.share(1, 1, 0), ahead.share(5, 1, 0)
    next(one), next(other), next(one)
    assert shown(ahead, 1, 1, 0) == shown(alone, 1, 1, 0)


def test_the_randomness_is_another_one_for_each_micro_batch_and_seed() -> None:
    other = Batches(Noisy(), **{**BATCH, "seed": 4})
    drawn = [micro[2][0] for each in (Batches(Noisy(), **BATCH), other) for micro in shown(each, 0, 1, 0)]
    assert len(set(drawn)) == 6


def test_who_is_killed_is_replaced(ahead: Batches, capfd: pytest.CaptureFixture[str]) -> None:
    """One and all, between steps."""
    alone = Batches(Noisy(), **BATCH)
    for step, victims in enumerate((0, 1, 2, 1)):
        for worker in workers(ahead)[:victims]:
            os.kill(worker.pid, signal.SIGKILL)
            worker.join()
        assert shown(ahead, step, 2, 0) == shown(alone, step, 2, 0)
        assert capfd.readouterr().err.count("it is replaced, and its micro-batches are read again") == bool(victims)


def test_who_is_killed_while_it_is_waited_for_is_noticed_at_once(tmp_path: Path) -> None:
    class Slow(Noisy):
        def __getitem__(self, index: int) -> Sample:
            with (tmp_path / "read").open("a") as file:
                file.write("x")
            if (tmp_path / "read").stat().st_size == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    batches = Batches(Slow(), num_workers=1, **BATCH)
    began = time.monotonic()
    assert shown(batches, 0, 1, 0) == shown(Batches(Noisy(), **BATCH), 0, 1, 0)
    assert time.monotonic() - began < 4.0, "torch alone looks every 5 s"
    batches.close()


def test_a_micro_batch_that_kills_every_process_is_an_error() -> None:
    batches = Batches(Noisy(deadly=4), shuffle=False, num_workers=1, **BATCH)
    with pytest.raises(WorkerDied, match=r"loader worker \d+ \(exit code 7\) ended"):
        shown(batches, 0, 1, 0)
    assert not workers(batches)
    assert shown(batches, 1, 1, 0) == shown(Batches(Noisy(), shuffle=False, **BATCH), 1, 1, 0)
    batches.close()


def test_what_the_data_set_raises_is_raised_when_it_is_asked_for() -> None:
    batches = Batches(Noisy(bad=4), shuffle=False, num_workers=2, **BATCH)
    share = batches.share(0, 1, 0)
    next(share), next(share)  # sample 4 was read by now, or will be: nobody asked for it
    assert shown(batches, 1, 1, 0)
    with pytest.raises(LookupError, match=r"(?s)loader worker, at positions range\(4, 6\).*no sample 4") as raised:
        shown(batches, 0, 1, 0)
    assert "in __getitem__" in str(raised.value)
    assert shown(batches, 1, 1, 0) == shown(Batches(Noisy(), shuffle=False, **BATCH), 1, 1, 0)
    batches.close()


def started(number: int) -> None:
    os.environ["STARTED"] = str(number)


class Told(Noisy):
    def __getitem__(self, index: int) -> Any:
        return index, os.environ["STARTED"], multiprocessing.current_process().name


def test_options_of_a_data_loader() -> None:
    context = multiprocessing.get_context("spawn")
    batches = Batches(Told(), num_workers=1, worker_init_fn=started, multiprocessing_context=context, **BATCH)
    assert [list(batch[1]) for _, batch in batches.share(0, 1, 0)] == [["0", "0"]] * 3
    assert all(name.startswith("SpawnProcess") for _, batch in batches.share(0, 1, 0) for name in batch[2])
    batches.close()
    for wrong, said in (
        ({"num_workers": -1}, "num_workers must be at least 0"),
        ({"num_workers": 1, "prefetch_factor": 0}, "prefetch_factor must be at least 1"),
        ({"prefetch_factor": 3}, "are for num_workers > 0"),
    ):
        with pytest.raises(ValueError, match=said):
            Batches(Noisy(), **BATCH, **wrong)  # type: ignore[arg-type]
