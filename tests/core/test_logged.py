"""Values on a worker's page: the newest is whole whenever it is read, and nothing that a script logs is too much."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from everstep.core.logged import MOST_VALUES, Logged, decode
from everstep.core.page import VALUES_BYTES, Page
from everstep.probe.values import Values

WRITER = """
import sys
from everstep.core.page import Page
from everstep.probe.values import Values
page, values = Page(int(sys.argv[1])), Values()
for step in range(1, 1 << 30):
    values.tell(page, 1, step, {f"a{number:03d}": step for number in range(step % 40)})
    if step == 1000:
        print(flush=True)
"""


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create("logged")
    yield page
    page.close()


def test_calls_of_one_step_add_up_and_what_is_no_number_is_left_out(page: Page) -> None:
    values = Values()
    assert page.values() == b""
    values.tell(page, 2, 7, {"loss": 1.5, "norm": math.inf})
    values.tell(page, 2, 7, {"rate": 0.1, "bad": math.nan})
    assert decode(page.values()) == Logged(2, 7, {"loss": 1.5, "rate": 0.1})
    values.tell(page, 3, 7, {"loss": 1.25})  # done again
    assert decode(page.values()) == Logged(3, 7, {"loss": 1.25})


def test_more_than_there_is_room_for(page: Page) -> None:
    Values().tell(page, 1, 1, {f"metric {number}": float(number) for number in range(1000)})
    logged = decode(page.values())
    assert logged is not None and list(logged.values.values()) == list(range(MOST_VALUES))
    Values().tell(page, 1, 2, {"é" * 1000 + str(number): 1.0 for number in range(40)})
    logged = decode(page.values())
    assert logged is not None and logged.step == 2 and len(page.values()) <= VALUES_BYTES


@pytest.mark.parametrize("data", [b"\xff\xff", b"", b"\x93\x01\x02\x80garbage"])
def test_what_a_script_wrote_over_is_no_value(page: Page, data: bytes) -> None:
    page.put_values(data)
    assert decode(page.values()) is None


def test_read_beside_a_writer_and_after_its_kill(page: Page) -> None:
    command = [sys.executable, "-c", WRITER, str(page.fd)]
    with subprocess.Popen(command, pass_fds=(page.fd,), stdout=subprocess.PIPE) as writer:
        try:
            assert writer.stdout is not None
            writer.stdout.readline()
            last = 1
            for _ in range(20_000):
                last = _whole(page, last)
        finally:
            writer.kill()
    assert _whole(page, last) >= last > 1000


class Touched:
    """A page's memory, in which something happens when values are read or written."""

    def __init__(self, page: Page, happens: Callable[[], None]) -> None:
        self.page, self.memory, self.happens = page, page.memory, happens

    def __enter__(self) -> None:
        self.page.memory = cast(Any, self)

    def __exit__(self, *_error: object) -> None:
        self.page.memory = self.memory

    def __setitem__(self, place: slice, data: bytes) -> None:
        self.memory[place.start : place.start + len(data) // 2] = data[: len(data) // 2]
        self.happens()

    def __getitem__(self, place: slice) -> bytes:
        happens, self.happens = self.happens, lambda: None
        happens()
        return self.memory[place]


def test_killed_in_the_middle_of_a_write(page: Page) -> None:
    for text in (b"first", b"second"):
        page.put_values(text)

    def killed() -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt), Touched(page, killed):
            page.put_values(b"a third one, which is longer")
        assert page.values() == b"second"
    page.put_values(b"fourth")
    assert page.values() == b"fourth"


def test_written_again_and_again_in_the_middle_of_a_read(page: Page) -> None:
    page.put_values(b"first")
    worker = Page(os.dup(page.fd))

    def writes() -> None:
        for text in (b"second", b"the third"):
            worker.put_values(text)

    with Touched(page, writes):
        assert page.values() in (b"second", b"the third")
    worker.close()


def _whole(page: Page, last: int) -> int:
    logged = decode(page.values())
    assert logged is not None and logged.step >= last
    assert logged.values == {f"a{number:03d}": logged.step for number in range(logged.step % 40)}
    return logged.step
