"""Where the job's controller listens, and whether this node is the one that hosts it.

torchrun names a rendezvous endpoint, or the node with rank 0; every node is started with the same arguments. So each
decides for itself: who owns the address hosts, everybody else joins.
"""

from __future__ import annotations

import enum
import errno
import ipaddress
import re
import socket
from collections.abc import Callable, Mapping
from typing import NamedTuple

from everstep.core.config import RunConfig
from everstep.core.errors import UsageError

RENDEZVOUS_PORT = 29400  # torchrun's default of --rdzv-endpoint
MASTER_PORT = 29500  # torchrun's default of --master-port


class Hosting(enum.Enum):
    HOST = "host"  # listen here, or fail
    TRY = "try"  # listen here; when the port is taken a controller runs already: join it
    JOIN = "join"


class Place(NamedTuple):
    """Address of the controller. Port 0: any free one (only with HOST). `why` is for people."""

    host: str
    port: int
    hosting: Hosting
    why: str


def parse_endpoint(text: str, default_port: int, key: str) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT, an IPv6 address, or [IPv6]:PORT. Raises UsageError, naming `key`."""
    bare_v6 = text.count(":") > 1 and not text.startswith("[")
    match = re.fullmatch(r"\[(?P<v6>[0-9a-fA-F:.%\w]+)\](:(?P<p6>\d+))?|(?P<host>[\w.-]+)(:(?P<port>\d+))?", text)
    if bare_v6 and _is_ip(text):
        return text, default_port
    if match is None:
        raise UsageError(
            f"{key} = {text!r}: expected HOST or HOST:PORT, as in node1:{default_port} or [fe80::1]:{default_port}"
        )
    digits = match["p6"] or match["port"]
    port = default_port if digits is None else int(digits)
    if port > 65535:
        raise UsageError(f"{key} = {text!r}: the port must be between 0 and 65535")
    return match["v6"] or match["host"], port


def controller_address(config: RunConfig, origins: Mapping[str, str] | None = None) -> tuple[str, int] | None:
    """Host and port that the settings name for the controller; None when nobody outside this machine needs to know.

    Raises UsageError for a malformed one. `origins`: key -> where it was set, for the message.
    """
    rendezvous, nodes = config.rendezvous, config.nodes

    def parse(key: str, text: str, default_port: int) -> tuple[str, int]:
        return parse_endpoint(text, default_port, f"{key} ({(origins or {}).get(key, 'the default')})")

    if rendezvous.standalone:
        return None
    if config.control.controller:
        return parse("control.controller", config.control.controller, RENDEZVOUS_PORT)
    if rendezvous.endpoint:
        return parse("rendezvous.endpoint", rendezvous.endpoint, RENDEZVOUS_PORT)
    if nodes.max <= nodes.local_nodes:
        return None
    if rendezvous.backend == "static":
        host, port = parse("rendezvous.master_addr", rendezvous.master_addr or "127.0.0.1", 0)
        if port:
            raise UsageError(f"rendezvous.master_addr = {rendezvous.master_addr!r}: the port goes into --master-port")
        return host, rendezvous.master_port or MASTER_PORT
    return "localhost", RENDEZVOUS_PORT


def place_controller(config: RunConfig, owns: Callable[[str], bool]) -> Place:
    """Where the controller is, and whether this node hosts it. `owns` tells whether an address is this machine's."""
    rendezvous, rank = config.rendezvous, config.nodes.node_rank
    address = controller_address(config)
    if address is None:
        return Place("127.0.0.1", 0, Hosting.HOST, "the whole job is on this machine")
    host, port = address
    if not config.control.controller:
        if rendezvous.backend == "static" and rank >= 0:
            return Place(host, port, Hosting.JOIN if rank else Hosting.HOST, f"node rank {rank}")
        is_host = rendezvous.conf.get("is_host", "").lower()
        if is_host:
            hosting = Hosting.HOST if is_host in ("1", "true", "t", "yes", "y") else Hosting.JOIN
            return Place(host, port, hosting, f"is_host={is_host}")
    return _by_address(config, host, port, owns)


def _by_address(config: RunConfig, host: str, port: int, owns: Callable[[str], bool]) -> Place:
    if not owns(host):
        if port == 0:
            raise UsageError(f"{host}:0 is no address of this machine, and port 0 means any free port: name the port")
        return Place(host, port, Hosting.JOIN, f"{host} is another machine")
    if port == 0 and config.nodes.min > config.nodes.local_nodes:
        raise UsageError(
            f"{host}:0 means any free port, which the other nodes cannot know "
            f"(nodes.min = {config.nodes.min}): name the port"
        )
    whole = config.nodes.max <= config.nodes.local_nodes and not config.control.controller
    # A whole job is on this machine: a controller which is there already is another job's, nothing to join.
    return Place(host, port, Hosting.HOST if whole or not port else Hosting.TRY, f"{host} is this machine")


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_ip(host) and ipaddress.ip_address(host).is_loopback)


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def owns_address(host: str) -> bool:
    """Whether `host` is this machine: its own name, or an address one can bind here (the kernel's own test)."""
    if host in ("localhost", socket.gethostname()):
        return True
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return False  # a name nobody knows yet may belong to a node that is still starting
    return any(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                return False
            raise
    return True
