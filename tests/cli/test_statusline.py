"""The last row of a real (pseudo) terminal: what others write scrolls above it, and it is given back."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

ROWS, COLUMNS = 12, 40

# A session of its own whose controlling terminal is standard output; `echo` writes as an agent does: without asking.
PROGRAM = """
import os, subprocess, sys
os.close(os.open(os.ttyname(2), os.O_RDWR))  # a session's first terminal becomes its own
from everstep.cli.statusline import StatusLine
row = StatusLine(2, lambda text: os.write(2, text.encode()))
for number in range(20):
    assert row.show(lambda columns: f"row {number}".ljust(columns)[:columns])
    subprocess.run(["echo", f"line {number}"], stdout=2, check=True)
row.close()
subprocess.run(["echo", "the end"], stdout=2, check=True)
"""


class Screen:
    """As much of a terminal as the status line needs: cursor, scroll region, saved cursor, clearing."""

    def __init__(self) -> None:
        self.lines = [""] * ROWS
        self.row, self.column, self.saved = 0, 0, (0, 0)
        self.bottom = ROWS - 1
        self.past: list[str] = []  # scrolled out at the top

    def feed(self, text: str) -> None:
        for code, letters in re.findall(r"(\x1b[78]|\x1b\[[0-9;]*[A-Za-z])|([^\x1b])", text):
            if letters:
                self._letter(letters)
            elif code[1] in "78":
                self._keep(code[1] == "7")
            else:
                self._control(code[2:-1], code[-1])

    def _keep(self, save: bool) -> None:
        if save:
            self.saved = (self.row, self.column)
        else:
            self.row, self.column = self.saved

    def _letter(self, letter: str) -> None:
        if letter == "\r":
            self.column = 0
        elif letter == "\n" and self.row == self.bottom:
            self.past.append(self.lines.pop(0))
            self.lines.insert(self.bottom, "")
        elif letter == "\n":
            self.row = min(ROWS - 1, self.row + 1)
        else:
            line = self.lines[self.row].ljust(self.column)
            self.lines[self.row] = line[: self.column] + letter + line[self.column + 1 :]
            self.column += 1

    def _control(self, numbers: str, final: str) -> None:
        values = [int(number) for number in numbers.split(";") if number]
        if final == "r":
            self.bottom = (values[1] if len(values) > 1 else ROWS) - 1
            self.row = self.column = 0
        elif final == "H":
            self.row, self.column = values[0] - 1, values[1] - 1
        elif final == "A":
            self.row = max(0, self.row - values[0])
        elif final == "K":
            self.lines[self.row] = ""
        else:
            assert final == "m", f"unknown sequence {numbers}{final}"


def played(program: str, **env: str) -> tuple[int, str]:
    """Exit code and all that was written to the terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environ = {**os.environ, "TERM": "xterm-256color", **env}
    command = [sys.executable, "-c", program]
    process = subprocess.Popen(
        command, stdin=follower, stdout=follower, stderr=follower, start_new_session=True, env=environ
    )
    os.close(follower)
    data = b""
    try:
        while chunk := os.read(leader, 4096):
            data += chunk
    except OSError:  # EIO: nobody has the terminal open any more
        pass
    os.close(leader)
    return process.wait(20), data.decode()


def test_what_others_write_scrolls_above_the_row() -> None:
    code, text = played(PROGRAM)
    screen = Screen()
    before, mark, after = text.partition("line 15")
    assert code == 0 and mark, text
    screen.feed(before + mark)
    assert screen.lines[-1].split() == ["row", "15"] and screen.lines[-2] == "line 15"
    screen.feed(after)
    assert screen.bottom == ROWS - 1, "the whole screen scrolls again"
    shown = [line for line in (*screen.past, *screen.lines) if line]
    assert shown == [*(f"line {number}" for number in range(20)), "the end"]


def test_a_process_that_is_killed_leaves_the_terminal_as_it_was() -> None:
    """Its user's shell does not know that only a part of the screen scrolls."""
    killed = PROGRAM.replace("row.close()", "os.kill(os.getpid(), 9)")
    code, text = played(killed)
    screen = Screen()
    before, mark, after = text.partition("line 19")
    screen.feed(before + mark)
    assert code == -9 and screen.bottom == ROWS - 2 and screen.lines[-1].split() == ["row", "19"]
    screen.feed(after)
    assert screen.bottom == ROWS - 1 and screen.lines[-3:] == ["line 19", "", ""]


def test_no_row_where_a_terminal_cannot_do_it() -> None:
    code, text = played("from everstep.cli.statusline import usable; print(usable(2))", TERM="dumb")
    assert (code, text.strip()) == (0, "False")
    stranger = "from everstep.cli.statusline import usable; print(usable(2))"  # not its controlling terminal
    assert played(stranger) == (0, "False\r\n")
