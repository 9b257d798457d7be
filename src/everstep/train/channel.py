"""The session's end of the socket to its agent: a thread hands on every formation, reports go up."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from everstep.comms import forks
from everstep.core import wire
from everstep.core.formation import Formation, SessionReport

READ_BYTES = 1 << 16
_open: set[int] = set()  # descriptors that a session of this process speaks over


class Channel:
    """Speaks over descriptor `fd`. `on_formation` is called in the channel's own thread.

    Raises ValueError when another session of this process does.
    """

    def __init__(self, fd: int, on_formation: Callable[[Formation], None]) -> None:
        if fd in _open:
            raise ValueError("this process has a session already: a script is one session, or one restartable function")
        _open.add(fd)
        self._fd = fd
        self._sockets = forks.Sockets(lambda: None)  # children of this process have nothing to say
        self._socket = self._sockets.new(lambda: socket.socket(fileno=fd))
        self._on_formation = on_formation
        self._sending = threading.Lock()
        self._thread = threading.Thread(target=self._listen, name="everstep-channel", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def report(self, report: SessionReport) -> None:
        """Tell the agent where this session stands; from any thread. An agent that is gone takes this worker along."""
        with self._sending:
            try:
                self._socket.sendall(wire.encode(report))
            except (BrokenPipeError, ConnectionResetError):
                return

    def _listen(self) -> None:
        reader = wire.FrameReader("the agent", trusted=True)
        while True:
            try:
                data = self._socket.recv(READ_BYTES)
            except OSError:  # closed
                return
            if not data:
                return
            for message in reader.feed(data):
                assert isinstance(message, Formation)
                self._on_formation(message)

    def close(self) -> None:
        """Ends the thread. No formation is heard any more."""
        with contextlib.suppress(OSError):  # the agent closed it before
            self._socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread and self._thread.is_alive():
            self._thread.join()
        self._socket.close()
        _open.discard(self._fd)
