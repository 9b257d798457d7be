"""How the warm process sees its agent go."""

from __future__ import annotations

import signal
import socket

from everstep.control.zygote import Zygote


def test_an_agent_that_goes_with_answers_unread_is_the_end_of_the_connection() -> None:
    """The kernel then tells of a connection that was reset."""
    handler, wakeup = signal.getsignal(signal.SIGCHLD), signal.set_wakeup_fd(-1)
    try:
        agents, zygotes = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with zygotes:
            zygote = Zygote(zygotes, set())
            zygotes.send(b"an answer")
            agents.close()
            assert zygote.serve() is None
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGCHLD, handler)
