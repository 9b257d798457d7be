"""Waking a collective that waits for a dead peer: shut the worker's connections to the job's nodes from outside.

A gloo collective that lost a peer two hops away sits in epoll until its own time-out of minutes, and its
`abort()` does not wake it. Its agent can: `pidfd_getfd` gives a second descriptor of the same open socket, and
`shutdown` on it makes the kernel tell the waiter at once. Nothing of the worker's memory is touched.

One waiter is not told: gloo forgets the buffer whose message is half read (torch 2.13; a cut at any moment of a ring
of four leaves a survivor asleep in 1 to 3 of 100). So a cut first waits until nothing moves on these connections,
which is soon: the ring runs dry at the lost peer (0 of 200 asleep; 23 ms in the median, 93 at most).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import ipaddress
import itertools
import os
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeVar

from everstep.control import procfs
from everstep.control.host import ProcessHandle

_PIDFD_GETFD = 438  # the same number on every architecture that joined the unified table (x86-64, aarch64)
_IPPROTO_MPTCP = 262
_BYTES_ACKED = 120  # in struct tcp_info: two counters of 8 bytes, then what was received
LOOK_S = 0.01  # nothing moved between two looks this far apart: all is still
UNCONNECTED = (errno.ENOTCONN, errno.EINVAL, errno.ECONNRESET)  # or no longer
STILL_S = 0.25  # who goes on after this time is cut all the same
_libc = ctypes.CDLL(None, use_errno=True)

T = TypeVar("T")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class CutRefused(PermissionError):
    """This agent may not reach into the worker's descriptors: no ptrace right. Say so once, then rely on SIGKILL."""


class Peers:
    """The job's nodes by number: single addresses, or networks such as "10.4.0.0/16". Raises ValueError for a name."""

    def __init__(self, addresses: Collection[str]) -> None:
        networks = [ipaddress.ip_network(text.partition("%")[0], strict=False) for text in addresses]
        self._single = {net.network_address for net in networks if net.prefixlen == net.max_prefixlen}
        self._networks = [net for net in networks if net.prefixlen != net.max_prefixlen]

    def __contains__(self, address: Address) -> bool:
        return address in self._single or any(address in network for network in self._networks)


def cut(
    pids: Collection[int], addresses: Collection[str], except_ports: Collection[int] = (), only_port: int = 0
) -> int:
    """Shut down the processes' connected TCP sockets whose peer is one of `addresses`; returns how many.

    Connections with a port in `except_ports` on either side stay (the controller's); with `only_port`, all but those
    with this one. Listening, Unix, UDP and unconnected sockets are never touched. 0 for a process that is gone.
    Raises CutRefused without the right.
    """
    chosen = _Chosen(Peers(addresses), except_ports, only_port)
    if not only_port:
        until_still(lambda: {pid: _each(pid, lambda s: _moved(s, chosen)) for pid in pids})
    return sum(sum(_each(pid, lambda s: _shut(s, chosen))) for pid in pids)


def own() -> frozenset[int]:
    """This process's sockets, by inode."""
    found = set()
    for fd in _socket_fds(os.getpid()):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.fstat(fd).st_ino)
    return frozenset(found)


def cut_own(
    addresses: Collection[str],
    except_ports: Collection[int],
    wanted: Callable[[int], bool],
    still: bool = True,
) -> int:
    """The same for the calling process, which needs no right for it. `wanted` says of an inode whether it is meant.

    Not `still`: at once, where nobody who waits has to be told.
    """
    chosen = _Chosen(Peers(addresses), except_ports, wanted=wanted)
    if still:
        until_still(lambda: _each_own(lambda s: _moved(s, chosen)))
    return sum(_each_own(lambda s: _shut(s, chosen)))


def local_addresses() -> set[str]:
    """Every address of this host: gloo binds the one its host name resolves to, not the one its node is known by."""
    found = {"127.0.0.0/8", "::1"}
    try:
        lines = procfs.read_all("/proc/net/fib_trie").decode("ascii", "replace").splitlines()
        for before, line in itertools.pairwise(lines):
            if "host LOCAL" in line:
                found.add(before.split()[-1])
        for line in procfs.read_all("/proc/net/if_inet6").decode("ascii", "replace").splitlines():
            found.add(str(ipaddress.IPv6Address(int(line.split()[0], 16))))
    except FileNotFoundError:  # a kernel without one of the two protocols
        return found
    return found


def _socket_fds(pid: int) -> list[int]:
    base = f"/proc/{pid}/fd"
    try:
        return [int(name) for name in os.listdir(base) if _names_socket(f"{base}/{name}")]
    except PermissionError as error:
        raise _refused(pid, error) from error


def _names_socket(path: str) -> bool:
    try:
        return os.readlink(path).startswith("socket:")
    except FileNotFoundError:  # closed meanwhile
        return False


class _Chosen(NamedTuple):
    """Which connections are meant."""

    peers: Peers
    except_ports: Collection[int]
    only_port: int = 0
    wanted: Callable[[int], bool] = lambda inode: True

    def include(self, sock: socket.socket) -> bool:
        """Raises OSError for one that is not connected, or no longer."""
        if not self.wanted(os.fstat(sock.fileno()).st_ino) or not _is_tcp(sock):
            return False
        peer, ports = sock.getpeername(), {sock.getsockname()[1], sock.getpeername()[1]}
        if not ports.isdisjoint(self.except_ports) or (self.only_port and self.only_port not in ports):
            return False
        return _address(peer[0]) in self.peers


def _each(pid: int, do: Callable[[socket.socket], T]) -> list[T]:
    """Of each socket of another process; nothing for one that is gone."""
    try:
        with ProcessHandle(pid) as process:
            return _of_all((_copy_fd(process.fd, fd) for fd in _socket_fds(pid)), do)
    except procfs.GONE:
        return []


def _each_own(do: Callable[[socket.socket], T]) -> list[T]:
    return _of_all((_dup(fd) for fd in _socket_fds(os.getpid())), do)


def _of_all(copies: Iterable[int], do: Callable[[socket.socket], T]) -> list[T]:
    """What is done with each; the copies are closed."""
    done = []
    for copy in copies:
        if copy < 0:
            continue
        try:
            sock = socket.socket(fileno=copy)
        except OSError as error:  # the number was closed and now names a file
            os.close(copy)
            if error.errno == errno.ENOTSOCK:
                continue
            raise
        with sock:
            done.append(do(sock))
    return done


def until_still(moved: Callable[[], object]) -> None:
    """Until no byte moved between two looks: no message is half read."""
    deadline = time.monotonic() + STILL_S
    before, now = None, moved()
    while now and now != before and time.monotonic() < deadline:
        time.sleep(LOOK_S)
        before, now = now, moved()


def _moved(sock: socket.socket, chosen: _Chosen) -> tuple[int, ...]:
    """How many bytes came and went so far, and how many wait to be read; empty: it is not meant."""
    try:
        if not chosen.include(sock):
            return ()
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_ACKED + 16)
        waiting = int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), sys.byteorder)
    except OSError as error:
        if error.errno in (*UNCONNECTED, errno.EOPNOTSUPP):
            return ()
        raise
    return (*struct.unpack_from("QQ", info.ljust(_BYTES_ACKED + 16, b"\0"), _BYTES_ACKED), waiting)


def _is_tcp(sock: socket.socket) -> bool:
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
        return False
    if sock.proto not in (socket.IPPROTO_TCP, _IPPROTO_MPTCP):
        return False
    return not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


def _shut(sock: socket.socket, chosen: _Chosen) -> bool:
    try:
        if not chosen.include(sock):
            return False
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno in UNCONNECTED:
            return False
        raise
    return True


def _address(text: str) -> Address:
    address = ipaddress.ip_address(text.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _dup(fd: int) -> int:
    """The same of our own; it needs no right."""
    try:
        return os.dup(fd)
    except OSError as error:
        if error.errno == errno.EBADF:
            return -1
        raise


def _copy_fd(pidfd: int, fd: int) -> int:
    """Our own close-on-exec descriptor of the other process's open file; -1 when it was closed meanwhile."""
    copy = int(_libc.syscall(_PIDFD_GETFD, pidfd, fd, 0))
    if copy >= 0:
        return copy
    code = ctypes.get_errno()
    if code == errno.EBADF:
        return -1
    error = OSError(code, os.strerror(code))
    if code in (errno.EPERM, errno.ENOSYS):
        raise _refused(None, error) from error
    raise error


def _refused(pid: int | None, error: OSError) -> CutRefused:
    who = "a worker" if pid is None else f"process {pid}"
    return CutRefused(
        error.errno,
        f"cannot shut connections of {who} ({error.strerror}): give the container CAP_SYS_PTRACE (and Linux >= 5.6); "
        "without it a collective that waits for a lost peer ends only when its process is killed",
    )
