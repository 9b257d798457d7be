"""Who is named when everybody stands still, and how faulthandler's text is read."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
from typing import Any

import pytest

from everstep.core.types import Phase, WorkerProgress
from everstep.detect.oddone import odd_one
from everstep.detect.stacks import main_thread, place, waits


def at(rank: int, step: int = 57, collectives: int = 100, phase: Phase = Phase.TRAIN) -> WorkerProgress:
    return WorkerProgress(rank, rank, step, step, phase, 2.0, 2.0, 2.0, collectives=collectives)


def test_fewest_steps() -> None:
    assert odd_one([at(0), at(1, 56), at(2), at(3)], {}).ranks == (1,)


def test_fewest_steps_of_two(paper: Any) -> None:
    assert odd_one([at(0), at(1, 56)], {0: paper.waiting, 1: paper.busy}).ranks == (1,)
    assert odd_one([at(0), at(1, 56)], {}).ranks == (1,)


def test_stacks_choose_among_those_behind(paper: Any) -> None:
    """The ring broke: three could not finish the step, one of them because it never took part."""
    stacks = {0: paper.waiting, 1: paper.waiting, 2: paper.busy, 3: paper.waiting}
    assert odd_one([at(0, 56), at(1, 56), at(2, 56), at(3)], stacks).ranks == (2,)


def test_skipped_collective_lets_a_worker_run_ahead(paper: Any) -> None:
    stacks = dict.fromkeys(range(4), paper.waiting)
    ahead = [at(0, 56, 101), at(1, 56, 101), at(2, 57, 100), at(3, 56, 101)]
    found = odd_one(ahead, stacks)
    assert found.ranks == (2,) and "skipped" in found.what
    assert odd_one([at(0, 56, 101), at(1, 57, 100)], stacks).ranks == (1,)


def test_skipped_collective_at_an_equal_step(paper: Any) -> None:
    stacks = dict.fromkeys(range(4), paper.waiting)
    assert odd_one([at(0), at(1, collectives=99), at(2), at(3)], stacks).ranks == (1,)


def test_extra_collective() -> None:
    found = odd_one([at(0), at(1), at(2, collectives=101), at(3)], {})
    assert found.ranks == (2,) and "101" in found.what


def test_numbers_that_cannot_be_compared_are_not(paper: Any) -> None:
    """Pipeline stages send and receive in different numbers; the one that does not wait is named."""
    workers = [at(0, collectives=1000), at(1, collectives=2000), at(2, collectives=2000), at(3, collectives=1000)]
    stacks = {0: paper.waiting, 1: paper.busy, 2: paper.waiting, 3: paper.waiting}
    found = odd_one(workers, stacks)
    assert found.ranks == (1,) and "train.py:42" in found.what
    assert odd_one(workers, dict.fromkeys(range(4), paper.waiting)).ranks == ()


def test_stacks_alone(paper: Any) -> None:
    assert odd_one([at(0), at(1)], {0: paper.busy, 1: paper.waiting}).ranks == (0,)
    assert odd_one([at(0), at(1)], {0: paper.busy, 1: paper.busy}).ranks == ()
    assert odd_one([at(0), at(1)], {0: paper.waiting}).ranks == ()  # one that did not answer proves nothing


def test_only_worker_is_named_with_its_place(paper: Any) -> None:
    found = odd_one([at(0)], {0: paper.busy})
    assert found.ranks == (0,) and "next_batch (user/train.py:42)" in found.what


FRAMES = '  File "{}", line 7 in {}\n  File "/home/u/train.py", line 90 in main\n'


@pytest.mark.parametrize(
    ("file", "function", "waiting"),
    [
        ("/v/site-packages/torch/distributed/distributed_c10d.py", "barrier", True),
        ("/v/site-packages/torch/autograd/graph.py", "_engine_run_backward", True),
        ("/v/site-packages/torch/cuda/__init__.py", "synchronize", True),
        ("/v/site-packages/everstep/comms/link.py", "receive", True),
        ("/usr/lib/python3.11/threading.py", "wait", False),
        ("/usr/lib/python3.11/multiprocessing/connection.py", "wait", False),
        ("/home/u/train.py", "wait", False),
        ("/v/site-packages/torch/nn/modules/linear.py", "forward", False),
    ],
)
def test_innermost_frame_decides(file: str, function: str, waiting: bool) -> None:
    text = "Current thread 0x00007f (most recent call first):\n" + FRAMES.format(file, function)
    assert waits(main_thread(text)) is waiting


def test_main_thread_is_the_last_whatever_thread_got_the_signal() -> None:
    text = (
        "Current thread 0x00007f21 [loader] (most recent call first):\n"
        '  File "/usr/lib/python3.14/threading.py", line 1 in wait\n\n'
        "Thread 0x00007f22 (most recent call first):\n" + FRAMES.format("/home/u/loader.py", "spin")
    )
    frames = main_thread(text)
    assert [f.function for f in frames] == ["spin", "main"]
    assert place(frames) == "spin (u/loader.py:7)"


def test_of_very_many_threads_the_main_one_is_not_among_those_that_are_written() -> None:
    """By faulthandler itself."""
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(100)]
    for thread in threads:
        thread.start()
    try:
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            text = file.read()
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert text.count("(most recent call first)") == 100 and main_thread(text) == ()
    assert main_thread(text.removesuffix("...\n")) != ()  # the last one's, which is not the main thread


def test_place_shows_the_scripts_own_frame() -> None:
    file = "/v/lib/python3.11/site-packages/torch/utils/data/dataloader.py"
    text = "Current thread 0x1 (most recent call first):\n" + FRAMES.format(file, "_try_get_data")
    assert place(main_thread(text)) == "_try_get_data (data/dataloader.py:7), called from main (u/train.py:90)"


@pytest.mark.parametrize("text", ["", "State: D (disk sleep)\nwchan: io_schedule", "\x00\xff"])
def test_text_without_python_frames_is_no_evidence(text: str) -> None:
    assert main_thread(text) == () and not waits(()) and place(()) == ""
