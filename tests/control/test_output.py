"""Log files on the console: whole lines, prefixes, bounded work, a console that blocks, binary garbage."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from everstep.control import output
from everstep.control.output import MAX_PIECE_BYTES, Console, Tail, last_lines, line_prefix


class Screen:
    """A pipe read by a thread, as a terminal would."""

    def __init__(self) -> None:
        read_fd, self.fd = os.pipe()
        self.data = b""
        self._reader = os.fdopen(read_fd, "rb", buffering=0)
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while chunk := self._reader.read(65536):
            self.data += chunk

    def close(self) -> list[str]:
        """All that was shown, as lines."""
        os.close(self.fd)
        self._thread.join()
        self._reader.close()
        return self.data.decode().splitlines()


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    if made._thread.is_alive():
        made.close()


async def until(condition: Callable[[], object], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        await asyncio.sleep(0.005)


def show(screen: Screen, files: dict[str, str], max_bytes: int = 1 << 20) -> list[str]:
    """Everything in these files (path -> prefix), drained at once."""
    console = Console(max_bytes)
    tail = Tail(console)
    for path, prefix in files.items():
        tail.follow(path, prefix, screen.fd)
    asyncio.run(tail.close())
    console.close()
    return screen.close()


def test_two_writers_at_once_are_never_mixed_inside_a_line(tmp_path: Path, screen: Screen) -> None:
    body = (
        "import os, sys\n"
        "fd = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "for i in range(3000):\n"
        "    text = f'{sys.argv[2]} line {i} ' + 'x' * (i % 300) + '\\n'\n"
        "    for part in (text[:7], text[7:]): os.write(fd, part.encode())\n"
    )

    def write(path: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-IS", "-c", body, path, path[-1]])

    async def follow() -> None:
        console = Console(max_bytes=64 << 20)
        tail = Tail(console, interval_s=0.01, partial_s=60)
        tail.start()
        paths = [str(tmp_path / name) for name in "ab"]
        for path in paths:
            tail.follow(path, f"[{path[-1]}]: ", screen.fd)
        children = [write(path) for path in paths]
        await until(lambda: all(child.poll() == 0 for child in children), 20)
        await tail.close()
        console.close()
        assert console.lost_lines == 0

    asyncio.run(follow())
    lines = screen.close()
    for name in "ab":
        mine = [line for line in lines if line.startswith(f"[{name}]: ")]
        assert mine == [f"[{name}]: {name} line {i} " + "x" * (i % 300) for i in range(3000)]
    assert len(lines) == 6000


def test_a_partial_line_is_shown_after_a_while_and_at_the_end(tmp_path: Path, screen: Screen) -> None:
    path = tmp_path / "log"

    async def follow() -> None:
        console = Console()
        tail = Tail(console, interval_s=0.01, partial_s=0.1)
        tail.start()
        tail.follow(str(path), "> ", screen.fd)
        with path.open("wb", buffering=0) as log:
            log.write("whole\nprompt é".encode()[:-1])  # half a character
            await until(lambda: b"> prompt \n" in screen.data)
            log.write("é".encode()[1:] + b" more\nlast")
        await tail.close()
        console.close()

    asyncio.run(follow())
    assert screen.close() == ["> whole", "> prompt ", "> é more", "> last"]


def test_long_lines_come_in_pieces_that_cut_no_character(tmp_path: Path, screen: Screen) -> None:
    path = tmp_path / "log"
    long, endless = "a" + "é" * 10_000, "ü" * 300_000
    path.write_text(f"{long}\nshort\n{endless}")
    lines = show(screen, {str(path): "> "})
    assert all(line.startswith("> ") and len(line.encode()) <= MAX_PIECE_BYTES + 2 for line in lines)
    assert "�" not in "".join(lines)
    assert "".join(line.removeprefix("> ") for line in lines) == long + "short" + endless


def test_garbage_cannot_upset_the_terminal(tmp_path: Path, screen: Screen) -> None:
    path = tmp_path / "log"
    path.write_bytes(bytes(range(256)) * 100 + b"\n\x1b[31mred\x1b[0m\tok\r\n 10%\r 20%\r 30%\nend\n")
    lines = show(screen, {str(path): "> "})
    assert lines[-3:] == ["> \x1b[31mred\x1b[0m\tok", ">  30%", "> end"]
    shown = set(screen.data)
    assert shown & set(range(32)) <= set(b"\t\n\x1b")


def test_a_console_that_takes_nothing_stops_nobody(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(100_000)))
    console = Console(max_bytes=300_000)
    tail = Tail(console)
    tail.follow(str(path), "> ", write_fd)
    began = time.monotonic()
    while tail._advance(tail._files[str(path)], time.monotonic()):
        pass
    assert time.monotonic() - began < 10.0  # nobody reads the pipe
    assert console.lost_lines > 50_000
    assert not console.close(timeout_s=0.05)
    got = b""
    closer = threading.Thread(target=console.close, args=(10.0,))
    closer.start()
    while b"only in the log files\n" not in got:
        got += os.read(read_fd, 65536)
    closer.join()
    lines = got.decode().splitlines()
    note = next(line for line in lines if "only in the log files" in line)
    assert note == f"… {console.lost_lines} lines only in the log files"
    assert len(lines) - 1 + console.lost_lines == 100_000
    os.close(read_fd)
    os.close(write_fd)


def test_a_closed_console_loses_lines_but_raises_nothing(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    path = tmp_path / "log"
    path.write_text("one\ntwo\n")
    console = Console()
    tail = Tail(console)
    tail.follow(str(path), "", write_fd)
    asyncio.run(tail.close())
    console.close()
    assert console.lost_lines == 2
    os.close(write_fd)


def test_a_file_far_ahead_is_counted_not_shown(tmp_path: Path, screen: Screen) -> None:
    path = tmp_path / "log"
    line = b"x" * 99 + b"\n"
    path.write_bytes(line * 400_000)
    lines = show(screen, {str(path): ""}, max_bytes=64 << 20)
    notes = [int(text.split()[1]) for text in lines if text.startswith("…")]
    assert sum(notes) > 200_000
    assert len(lines) - len(notes) + sum(notes) in range(400_000, 400_000 + 10)  # a line cut by a skip counts twice


def test_truncated_missing_and_finished_files(tmp_path: Path, screen: Screen) -> None:
    path, missing = tmp_path / "log", tmp_path / "missing"
    path.write_text("first attempt\n")
    console = Console()
    tail = Tail(console)
    for each in (path, missing):
        tail.follow(str(each), "", screen.fd)
    tail.poll(0.0)
    path.write_text("again\n")
    tail.poll(1.0)
    open_before = len(os.listdir("/proc/self/fd"))
    tail.finish(str(path))
    tail.finish(str(missing))
    tail.finish("never followed")
    assert len(os.listdir("/proc/self/fd")) == open_before - 1
    console.close()
    assert screen.close() == ["first attempt", "again"]


def test_a_file_that_cannot_be_read_is_said(tmp_path: Path, screen: Screen) -> None:
    lines = show(screen, {str(tmp_path): "> "})
    assert lines == [f"everstep: cannot follow {tmp_path}: Is a directory"]


def test_last_lines(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert last_lines(str(path)) == ""
    path.write_bytes(b"")
    assert last_lines(str(path)) == ""
    path.write_bytes("".join(f"line {i} é\n" for i in range(10_000)).encode() + b"Error: \xff\x00\n\n")
    assert last_lines(str(path), n=3) == "line 9998 é\nline 9999 é\nError: �?\n"
    assert last_lines(str(path), n=1000, max_bytes=40) == "line 9998 é\nline 9999 é\nError: �?\n"
    path.write_bytes(b"y" * 50_000)
    assert len(last_lines(str(path))) in range(16384, 16384 + 5)


def test_prefixes() -> None:
    assert line_prefix(3, 1, "default") == "[rank3]: "
    assert line_prefix(3, 1, "r", "[${role_name} ${rank}/${local_rank} ${x}]:") == "[r 3/1 ${x}]:"
    assert output.format_lines(b"> ", b"\n") == b"> \n"
