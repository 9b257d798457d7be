"""Waking a collective that waits for a dead peer: shut the worker's connections to the job's nodes from outside.

A gloo collective that lost a peer two hops away sits in epoll until its own time-out of minutes, and its
`abort()` does not wake it. Its agent can: `pidfd_getfd` gives a second descriptor of the same open socket, and
`shutdown` on it makes the kernel tell the waiter at once. Nothing of the worker's memory is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import ipaddress
import itertools
import os
import socket
from collections.abc import Callable, Collection

from everstep.control import procfs
from everstep.control.host import ProcessHandle

_PIDFD_GETFD = 438  # the same number on every architecture that joined the unified table (x86-64, aarch64)
_IPPROTO_MPTCP = 262
_libc = ctypes.CDLL(None, use_errno=True)

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


def cut(pid: int, addresses: Collection[str], except_ports: Collection[int] = ()) -> int:
    """Shut down the process's connected TCP sockets whose peer is one of `addresses`; returns how many.

    Connections with a port in `except_ports` on either side stay (the controller's). Listening, Unix, UDP and
    unconnected sockets are never touched. 0 for a process that is gone. Raises CutRefused without the right.
    """
    peers = Peers(addresses)
    try:
        with ProcessHandle(pid) as process:
            copies = (_copy_fd(process.fd, fd) for fd in _socket_fds(pid))
            return sum(_cut_one(copy, peers, except_ports) for copy in copies)
    except procfs.GONE:
        return 0


def own() -> frozenset[int]:
    """This process's sockets, by inode."""
    found = set()
    for fd in _socket_fds(os.getpid()):
        with contextlib.suppress(OSError):  # closed meanwhile
            found.add(os.fstat(fd).st_ino)
    return frozenset(found)


def cut_own(addresses: Collection[str], except_ports: Collection[int], wanted: Callable[[int], bool]) -> int:
    """The same for the calling process, which needs no right for it. `wanted` says of an inode whether it is meant."""
    peers = Peers(addresses)
    copies = (_dup(fd) for fd in _socket_fds(os.getpid()))
    return sum(_cut_one(copy, peers, except_ports, wanted) for copy in copies)


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


def _cut_one(
    copy: int, peers: Peers, except_ports: Collection[int], wanted: Callable[[int], bool] = lambda inode: True
) -> bool:
    if copy < 0:
        return False
    try:
        sock = socket.socket(fileno=copy)
    except OSError as error:  # the number was closed and now names a file
        os.close(copy)
        if error.errno == errno.ENOTSOCK:
            return False
        raise
    with sock:
        if not wanted(os.fstat(sock.fileno()).st_ino):
            return False
        if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM:
            return False
        if sock.proto not in (socket.IPPROTO_TCP, _IPPROTO_MPTCP):
            return False
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        return _shut(sock, peers, except_ports)


def _shut(sock: socket.socket, peers: Peers, except_ports: Collection[int]) -> bool:
    try:
        peer, local = sock.getpeername(), sock.getsockname()
        if peer[1] in except_ports or local[1] in except_ports or _address(peer[0]) not in peers:
            return False
        sock.shutdown(socket.SHUT_RDWR)
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.EINVAL, errno.ECONNRESET):  # not connected, or no longer
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
