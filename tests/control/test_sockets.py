"""Shutting another process's connections: a real recv blocked in a child process ends at once."""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from everstep.control import sockets

# Connects (to host, port), holds a listener, a Unix pair and a UDP socket too, then waits for data for ever.
CHILD = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
pair = socket.socketpair()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); udp.connect(("127.0.0.1", 9))
idle = socket.socket()
link = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET)
link.connect((sys.argv[1], int(sys.argv[2])))
print(listener.getsockname()[1], flush=True)
try:
    print("got", len(link.recv(1)), flush=True)
except OSError as error:
    print("error", error.errno, flush=True)
pair[0].send(b"x"); assert pair[1].recv(1) == b"x"
udp.send(b"x")
link = listener.accept()[0]
print("accepted", flush=True)
"""


class Linked:
    """A child that waits on a connection to us."""

    def __init__(self, host: str = "127.0.0.1", listen: str = "127.0.0.1") -> None:
        family = socket.AF_INET6 if ":" in listen else socket.AF_INET
        with socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::") as server:
            self.port = server.getsockname()[1]
            command = [sys.executable, "-IS", "-c", CHILD, host, str(self.port)]
            self.child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            self.link = server.accept()[0]
        self.listener_port = int(self.line())

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def close(self) -> None:
        self.link.close()
        self.child.kill()
        self.child.communicate()


@pytest.fixture
def linked() -> Iterator[Linked]:
    pair = Linked()
    yield pair
    pair.close()


def test_a_blocked_recv_ends_at_once(linked: Linked) -> None:
    began = time.monotonic()
    assert sockets.cut([linked.child.pid], {"127.0.0.1"}) == 1
    assert linked.line() == "got 0"
    assert time.monotonic() - began < 5.0
    linked.link.settimeout(5)
    assert linked.link.recv(1) == b""  # the peer is told as well
    # Its listener, Unix and UDP sockets still work.
    socket.create_connection(("127.0.0.1", linked.listener_port), timeout=5).close()
    assert linked.line() == "accepted"


def test_other_peers_and_excepted_ports_stay(linked: Linked) -> None:
    pid = linked.child.pid
    assert sockets.cut([pid], {"127.0.0.2", "::1"}) == 0
    assert sockets.cut([pid], {"127.0.0.1"}, except_ports={linked.port}) == 0
    assert sockets.cut([pid], set()) == 0
    assert sockets.cut([pid], {"127.0.0.0/8"}) == 1
    assert sockets.cut([pid], {"127.0.0.0/8"}) in (0, 1)  # repeating is harmless


@pytest.mark.parametrize("host", ["::ffff:127.0.0.1", "::1"])
def test_ipv6_and_mapped_ipv4(host: str) -> None:
    linked = Linked(host, "::")
    try:
        address = host.removeprefix("::ffff:")
        assert sockets.cut([linked.child.pid], {address}) == 1
        assert linked.line() == "got 0"
    finally:
        linked.close()


def test_only_numbers_are_addresses() -> None:
    with pytest.raises(ValueError, match="node-7"):
        sockets.cut([1], {"node-7"})


def test_a_process_that_is_gone() -> None:
    child = subprocess.Popen(["/bin/true"])
    child.wait()
    assert sockets.cut([child.pid], {"127.0.0.1"}) == 0


def test_without_the_right_it_says_what_to_do(linked: Linked) -> None:
    body = (
        f"import os, sys; sys.path[:] = {sys.path!r}\n"
        "from everstep.control import sockets\n"
        "try: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "except PermissionError: sys.exit('not root')\n"
        f"try: sockets.cut([{linked.child.pid}], {{'127.0.0.1'}})\n"
        "except sockets.CutRefused as error: print('refused', 'CAP_SYS_PTRACE' in str(error))\n"
    )
    ran = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, check=False)
    if ran.stderr == "not root\n":
        pytest.skip("needs root to become another user")
    assert ran.stdout == "refused True\n", ran.stderr


def test_local_addresses_hold_the_one_in_use() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))  # sends nothing; asks the kernel for a route
        except OSError:
            pytest.skip("no route out of this machine")
        assert probe.getsockname()[0] in sockets.local_addresses()


def test_own_connections_are_cut_but_for_older_ones_and_excepted_ports() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as older,
        server.accept()[0] as older_end,
    ):
        keep = sockets.own()
        excepted = socket.create_server(("127.0.0.1", 0))
        with (
            excepted,
            socket.create_connection(server.getsockname()) as newer,
            server.accept()[0] as newer_end,
            socket.create_connection(excepted.getsockname()) as spared,
            excepted.accept()[0] as spared_end,
        ):
            assert (
                sockets.cut_own({"127.0.0.0/8"}, {excepted.getsockname()[1]}, lambda i: i not in keep) == 2
            )  # both ends of one
            assert newer.recv(1) == newer_end.recv(1) == b""
            for one, other in ((older, older_end), (spared, spared_end)):
                one.send(b"x")
                assert other.recv(1) == b"x"


def test_a_cut_waits_until_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo does not wake who reads half a message when its socket is shut, so what is under way arrives."""
    monkeypatch.setattr(sockets, "LOOK_S", 0.5)
    monkeypatch.setattr(sockets, "STILL_S", 10.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs = server.accept()[0]
    began = threading.Event()

    def send() -> None:
        for _ in range(30):
            theirs.sendall(b"x")
            began.set()
            time.sleep(0.005)

    sender = threading.Thread(target=send)
    with ours, theirs:
        sender.start()
        began.wait()
        inode = os.fstat(ours.fileno()).st_ino
        assert sockets.cut_own({"127.0.0.1"}, (), inode.__eq__) == 1
        sender.join()
        assert ours.recv(100, socket.MSG_WAITALL) == b"x" * 30


def test_who_never_rests_is_cut_all_the_same() -> None:
    looks = itertools.count(1)
    begin = time.monotonic()
    sockets.until_still(lambda: next(looks))
    assert time.monotonic() - begin >= sockets.STILL_S and next(looks) > 3


def test_only_the_connections_with_one_port(linked: Linked) -> None:
    pid = [linked.child.pid]
    assert sockets.cut(pid, {"127.0.0.1"}, only_port=linked.listener_port) == 0
    assert sockets.cut(pid, {"127.0.0.1"}, only_port=linked.port) == 1
    assert linked.line() == "got 0"
