"""Workers' output: files first, the console second. Workers write straight into their log files; `Tail` shows them.

So no output is lost when an agent dies, and no worker ever waits for a console. The console is written by a
thread of its own from a bounded queue: a terminal that is held with Ctrl-S stops nobody; what it misses is
counted and said. Each line is written whole, with the rank in front.
"""

from __future__ import annotations

import asyncio
import collections
import os
import select
import string
import threading
import time

MAX_PIECE_BYTES = 8192  # longer lines are shown in pieces
_CHUNK_BYTES = 256 << 10  # of one file in one poll: 1 ms of work for the event loop
_SKIP_BYTES = 8 << 20  # a file this far ahead of the console is counted, not shown
_ATOMIC_BYTES = select.PIPE_BUF  # one write of at most this is never mixed with another process's
_UNSAFE = bytes({*range(32), 127} - set(b"\t\n\r\x1b"))  # control bytes that would upset a terminal
_SAFE = bytes.maketrans(_UNSAFE, b"?" * len(_UNSAFE))


class Console:
    """Writes blocks of whole lines to descriptors, from one thread, never blocking the caller."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self.lost_lines = 0  # in total; they are in the log files
        self._max_bytes = max_bytes
        self._unsaid: dict[int, int] = {}  # descriptor -> lost lines not yet told
        self._queue: collections.deque[tuple[int, bytes, int]] = collections.deque()
        self._queued_bytes = 0
        self._closing = False
        self._broken: set[int] = set()
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="console", daemon=True)
        self._thread.start()

    def has_room(self, num_bytes: int) -> bool:
        """Whether a block of this size would be queued; one that is larger than the queue needs it empty."""
        return self._queued_bytes == 0 or self._queued_bytes + num_bytes <= self._max_bytes

    def write(self, fd: int, block: bytes, num_lines: int) -> None:
        """Queue whole lines (ending in a newline), or count them as lost when the console is too far behind."""
        if not self.has_room(len(block)):
            self.lose(fd, num_lines)
            return
        with self._changed:
            note = self._note(fd)
            self._queue.append((fd, note + block, num_lines))
            self._queued_bytes += len(note) + len(block)
            self._changed.notify()

    def lose(self, fd: int, num_lines: int) -> None:
        with self._changed:
            self.lost_lines += num_lines
            self._unsaid[fd] = self._unsaid.get(fd, 0) + num_lines

    def close(self, timeout_s: float = 2.0) -> bool:
        """Write what is queued; False when the console did not take it all within `timeout_s`."""
        with self._changed:
            for fd in list(self._unsaid):
                note = self._note(fd)
                self._queue.append((fd, note, 0))
                self._queued_bytes += len(note)
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _note(self, fd: int) -> bytes:
        lost = self._unsaid.pop(fd, 0)
        return f"… {lost} lines only in the log files\n".encode() if lost else b""

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                fd, block, num_lines = self._queue[0]  # stays counted until it is written
            shown = fd not in self._broken and _write_lines(fd, block)
            with self._changed:
                if not shown:
                    self._broken.add(fd)
                    self.lost_lines += num_lines
                self._queue.popleft()
                self._queued_bytes -= len(block)


def _write_lines(fd: int, block: bytes) -> bool:
    """Write a block in pieces that end with a line where possible; False when nobody reads any more."""
    start = 0
    while start < len(block):
        end = block.rfind(b"\n", start, start + _ATOMIC_BYTES) + 1 or block.find(b"\n", start) + 1 or len(block)
        while start < end:
            try:
                start += os.write(fd, block[start:end])
            except BlockingIOError:  # somebody made the shared terminal non-blocking
                select.select([], [fd], [])
            except OSError:  # closed pipe, terminal gone: training goes on, the log files have it all
                return False
    return True


class _Followed:
    """One log file and how far it was shown."""

    def __init__(self, path: str, prefix: str, to_fd: int) -> None:
        self.path = path
        self.prefix = prefix.encode()
        self.to_fd = to_fd
        self.fd = -1
        self.position = 0
        self.pending = b""  # a line without its end
        self.pending_since = 0.0

    def read(self) -> bytes:
        """The next bytes, nothing at the end or while there is no file. A file cut short is read from its start."""
        if self.fd < 0:
            try:
                self.fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                return b""
        data = os.read(self.fd, _CHUNK_BYTES)
        if not data and os.fstat(self.fd).st_size < self.position:
            self.position = os.lseek(self.fd, 0, os.SEEK_SET)
            data = os.read(self.fd, _CHUNK_BYTES)
        self.position += len(data)
        return data

    def behind(self) -> int:
        return os.fstat(self.fd).st_size - self.position

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Tail:
    """Shows many growing files on the console from the event loop: about 2 us a file and poll when idle."""

    def __init__(self, console: Console, interval_s: float = 0.05, partial_s: float = 1.0) -> None:
        self._console = console
        self._interval_s = interval_s
        self._partial_s = partial_s
        self._files: dict[str, _Followed] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def follow(self, path: str, prefix: str, to_fd: int) -> None:
        """Show `path` (which need not exist yet), from its start, on descriptor `to_fd`."""
        if path not in self._files:
            self._files[path] = _Followed(path, prefix, to_fd)

    def finish(self, path: str) -> None:
        """Show the rest of a file whose writers are gone, its unfinished line too, and forget it."""
        file = self._files.pop(path, None)
        if file is None:
            return
        while self._advance(file, time.monotonic()):
            pass
        self._show(file, file.pending)
        file.close()

    async def close(self) -> None:
        """Show the rest of all files. The console stays open."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        for path in list(self._files):
            self.finish(path)
            await asyncio.sleep(0)

    async def _run(self) -> None:
        while True:
            self.poll(time.monotonic())
            await asyncio.sleep(self._interval_s)

    def poll(self, now: float) -> None:
        """Show what was written since the last poll, a bounded part of each file."""
        for file in list(self._files.values()):
            self._advance(file, now)

    def _advance(self, file: _Followed, now: float) -> bool:
        """Show one chunk; False when there was none."""
        try:
            data = file.read()
            if data and file.behind() > _SKIP_BYTES:
                self._skip(file, data)
                return True
        except OSError as error:
            self._files.pop(file.path, None)
            file.close()
            self._console.write(file.to_fd, f"everstep: cannot follow {file.path}: {error.strerror}\n".encode(), 1)
            return False
        if data:
            self._take(file, data, now)
        if file.pending and now - file.pending_since >= self._partial_s:  # a prompt, or a progress bar
            end = _piece_end(file.pending, len(file.pending))
            part, file.pending, file.pending_since = file.pending[:end], file.pending[end:], now
            self._show(file, part)
        return bool(data)

    def _take(self, file: _Followed, data: bytes, now: float) -> None:
        """Show the whole lines, or whole pieces of an endless one; keep the rest."""
        buffer = file.pending + data
        end = buffer.rfind(b"\n") + 1 or _piece_end(buffer, len(buffer) - len(buffer) % MAX_PIECE_BYTES)
        if end or not file.pending:
            file.pending_since = now
        file.pending = buffer[end:]
        self._show(file, buffer[:end])

    def _skip(self, file: _Followed, data: bytes) -> None:
        """Count, without showing, what is too much to show."""
        lines, skipped = (file.pending + data).count(b"\n"), len(data)
        while skipped < _SKIP_BYTES and (data := file.read()):
            lines += data.count(b"\n")
            skipped += len(data)
        file.pending = b""
        self._console.lose(file.to_fd, lines)

    def _show(self, file: _Followed, text: bytes) -> None:
        if not text:
            return
        if not self._console.has_room(len(text)):
            self._console.lose(file.to_fd, text.count(b"\n") or 1)
            return
        block = format_lines(file.prefix, text)
        if block:
            self._console.write(file.to_fd, block, block.count(b"\n"))


def format_lines(prefix: bytes, text: bytes) -> bytes:
    """Each line with its prefix, safe for a terminal: valid UTF-8, no control bytes but colours and tabs.

    Of a line that overwrites itself with carriage returns (a progress bar) the last state is shown. A line that
    begins with the prefix already (torch puts its own before tracebacks) gets no second one.
    """
    text = text.translate(_SAFE).decode("utf-8", "replace").encode()
    lines = text.removesuffix(b"\n").split(b"\n")
    if b"\r" in text:
        lines = [_last_state(line) for line in lines]
    if max(map(len, lines)) > MAX_PIECE_BYTES:
        lines = [piece for line in lines for piece in _pieces(line)]
    return b"".join([(line if line.startswith(prefix) else prefix + line) + b"\n" for line in lines])


def line_prefix(rank: int, local_rank: int, role: str, template: str = "") -> str:
    """What stands before each line: "[rank3]: ", or torchrun's TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE filled in."""
    if not template:
        return f"[rank{rank}]: "
    return string.Template(template).safe_substitute(role_name=role, rank=rank, local_rank=local_rank)


def _last_state(line: bytes) -> bytes:
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _pieces(line: bytes) -> list[bytes]:
    found = []
    while len(line) > MAX_PIECE_BYTES:
        end = _piece_end(line, MAX_PIECE_BYTES)
        found.append(line[:end])
        line = line[end:]
    return [*found, line]


def _piece_end(text: bytes, end: int) -> int:
    """The largest position up to `end` that does not cut a UTF-8 character (of well-formed text)."""
    for back in range(1, min(4, end) + 1):
        lead = text[end - back]
        if lead >= 0xC0:
            length = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
            return end if length <= back else end - back
        if lead < 0x80:
            break
    return end


def last_lines(path: str, n: int = 20, max_bytes: int = 16384) -> str:
    """The last `n` lines of a log, read from its last `max_bytes`; empty when there is no file."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return ""
    try:
        size = os.fstat(fd).st_size
        raw = os.pread(fd, max_bytes, max(0, size - max_bytes))
    finally:
        os.close(fd)
    lines = raw.split(b"\n")
    if size > max_bytes and len(lines) > 1:
        lines = lines[1:]  # cut in the middle
    while lines and not lines[-1].strip():
        lines.pop()
    return format_lines(b"", b"\n".join(lines[-n:])).decode() if lines else ""
