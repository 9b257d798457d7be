"""What our processes print: whole lines, whatever the console is: slow, closed, held, or unable to show a character."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from everstep.control.output import Console
from everstep.control.voice import Voice, speak_through


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def test_only_whole_lines_are_shown() -> None:
    with pipe() as (read_fd, write_fd):
        console = Console()
        voice = Voice(console, write_fd)
        print("epoch", 3, "of", 4, file=voice)  # print() writes its words one by one
        print("one\ntwo", file=voice)
        assert voice.write("with") == 4
        voice.write("out an end")
        assert console.close()
        assert os.read(read_fd, 4096) == b"epoch 3 of 4\none\ntwo\n"


def test_a_name_that_is_no_text_is_shown_escaped() -> None:
    """Python keeps the bytes of a file name that is not UTF-8 as lone surrogates, which no encoder takes."""
    with pipe() as (read_fd, write_fd):
        console = Console()
        print(os.fsdecode(b"no folder \xff, caf\xc3\xa9"), file=Voice(console, write_fd))
        assert console.close()
        assert os.read(read_fd, 4096) == b"no folder \\udcff, caf\xc3\xa9\n"


def test_a_console_that_is_held_stops_nobody() -> None:
    """What it misses is counted by lines, and said as soon as it goes on."""
    with pipe() as (read_fd, write_fd):
        os.set_blocking(write_fd, False)
        with suppress(BlockingIOError):
            while True:
                os.write(write_fd, b"." * 4096)
        os.set_blocking(write_fd, True)  # a write waits from now on, until somebody reads
        console = Console(max_bytes=1000)
        voice = Voice(console, write_fd)
        for number in range(100):
            print(f"line {number:2}: {'x' * 90}", file=voice)
        assert console.lost_lines == 90
        assert not console.close(0.0)
        shown = b""
        while b"only in the log files\n" not in shown:
            shown += os.read(read_fd, 65536)
        assert console.close()
        assert shown.lstrip(b".").count(b"\nline") == 9
        assert shown.decode().endswith("… 90 lines only in the log files\n")


def test_a_closed_console_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    console = Console()
    print("nobody hears\nthis", file=Voice(console, write_fd))
    assert console.close()
    assert console.lost_lines == 2
    os.close(write_fd)


def test_it_is_a_terminal_when_its_console_is_one() -> None:
    console = Console()
    ours, theirs = pty.openpty()
    with pipe() as (_, write_fd):
        assert Voice(console, theirs).isatty()
        assert not Voice(console, write_fd).isatty()
        assert Voice(console, write_fd).fileno() == write_fd
    assert console.close()
    os.close(ours)
    os.close(theirs)


def test_errors_of_this_process_go_through_the_console(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", sys.stderr)  # put back afterwards
    console = Console()
    speak_through(console)
    print("said", file=sys.stderr)
    assert console.close()
    assert capfd.readouterr().err == "said\n"
    print("too late", file=sys.stderr)  # the console is closed: this has no way out, but raises nothing
    assert capfd.readouterr().err == ""
