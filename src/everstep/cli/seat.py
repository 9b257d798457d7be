"""Where this launcher sits: does it host the controller, at which address, and which nodes does it run?"""

from __future__ import annotations

import glob
import os
import resource
import secrets
import socket
from pathlib import Path

import msgspec

from everstep.control.transport import AddressInUse, listen
from everstep.core.config import RunConfig
from everstep.core.endpoint import Hosting, Place, owns_address, place_controller
from everstep.core.errors import UsageError

MOST_SLOTS = 4096  # keys of an epoch's workers and of their later lives, see control.prepare
WORKER_DESCRIPTORS = 8  # in the agent: page, channel, logs, its process; two more until the warm process has them
OWN_DESCRIPTORS = 64  # of the agent
WORKER_TASKS = 2  # a worker, and the thread of the agent that waits for its death; a script's own come on top
PID_MAX = Path("/proc/sys/kernel/pid_max")
USER_TOKEN = Path("~/.everstep/token")  # for jobs over several hosts that share a home directory


class Seat(msgspec.Struct, frozen=True):
    """`nodes`: (name, address) of each node to run here; no address: the one that the controller sees us by.
    `token`: empty for one of the run's own.
    """

    listener: socket.socket | None  # this host has the controller
    host: str
    port: int
    nodes: tuple[tuple[str, str], ...]
    token: str


def take_seat(config: RunConfig) -> Seat:
    """Decide, and listen if the controller is ours. Raises UsageError (an address in use, no devices)."""
    place = place_controller(config, owns_address)
    listener = None
    if place.hosting is Hosting.HOST:
        listener = listen(place.host, place.port)
    elif place.hosting is Hosting.TRY:
        try:
            listener = listen(place.host, place.port)
        except AddressInUse:
            listener = None  # a controller runs there already: join it
    port = listener.getsockname()[1] if listener else place.port
    local_only = listener is not None and config.nodes.max <= config.nodes.local_nodes
    token = config.control.token_file or ("" if local_only else str(USER_TOKEN.expanduser()))
    return Seat(listener, place.host, port, _nodes(config, place, listener, local_only), token)


def _nodes(
    config: RunConfig, place: Place, listener: socket.socket | None, local_only: bool
) -> tuple[tuple[str, str], ...]:
    count = config.nodes.local_nodes
    if local_only:
        total = count + config.nodes.standbys
        if total == 1:
            return (("node0", config.nodes.local_addr or "127.0.0.1"),)
        return tuple((f"node{k}", f"127.0.0.{k + 2}") for k in range(total))
    address = config.nodes.local_addr or (_address_towards(place.host, place.port) if listener else "")
    name = f"{socket.gethostname()}-{secrets.token_hex(2)}"  # containers may share a host name
    return tuple((name if count == 1 else f"{name}.{k}", address) for k in range(count))


def _address_towards(host: str, port: int) -> str:
    """Our address on the way to the controller, as the routing table has it; nothing is sent."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def num_slots(nproc: int | str) -> int:
    """Workers a node runs: a number, `cpu`, `gpu`, `xpu`, or `auto` (devices when there are any, else processors)."""
    if isinstance(nproc, int):
        return nproc
    if nproc == "cpu":
        return os.cpu_count() or 1
    count = _num_devices(nproc)
    if count:
        return count
    if nproc == "auto":
        return os.cpu_count() or 1
    raise UsageError(f"--nproc-per-node {nproc}: this host has no such device")


def require_room(slots: int, num_nodes: int) -> None:
    """Refuse more workers a node than this machine's limits allow when it runs `num_nodes`. Raises UsageError."""
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, of_user = resource.getrlimit(resource.RLIMIT_NPROC)
    tasks = WORKER_TASKS * num_nodes
    most = [
        (MOST_SLOTS, "a node of ours runs no more"),
        (int(PID_MAX.read_text()) // tasks, f"{PID_MAX} bounds processes and threads"),
    ]
    if descriptors != resource.RLIM_INFINITY:
        fit = max(0, descriptors - OWN_DESCRIPTORS) // WORKER_DESCRIPTORS
        most.append((fit, f"its agent may open {descriptors} files (ulimit -Hn)"))
    if of_user != resource.RLIM_INFINITY and os.geteuid():  # it does not bind root
        most.append((of_user // tasks, f"this user may run {of_user} processes and threads (ulimit -Hu)"))
    fit, why = min(most)
    if slots > fit:
        raise UsageError(f"{slots} workers a node (--nproc-per-node) are too many, {fit} would fit here: {why}")


def _num_devices(kind: str) -> int:
    """Devices by their files: asking a driver would need torch, and would touch them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if kind != "xpu" and visible is not None:
        return len([d for d in visible.split(",") if d.strip() and d.strip() != "-1"])
    patterns = {"xpu": ["/dev/dri/renderD*"], "gpu": ["/dev/nvidia[0-9]*"], "auto": ["/dev/nvidia[0-9]*"]}
    return sum(len(glob.glob(pattern)) for pattern in patterns[kind])
