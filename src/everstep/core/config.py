"""Everything `everstep run` needs to know, as typed and frozen groups; `core.layers` finds their values.

Each field is one key of everstep.toml (`[nodes] min = 2`) and of `--set nodes.min=2`. Durations are seconds.
`check()` refuses combinations which cannot work, above all time-outs stacked in the wrong order: an outer one which
ends before the inner one it waits for turns a fault of a second into minutes.
"""

from __future__ import annotations

import enum
import re
import signal
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec

from everstep.core.errors import UsageError
from everstep.core.types import JobSpec

Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]


JOB_NAME_REFUSED = r"[^\w.-]"  # a job's name is part of its run folder's


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Base of all groups: frozen, and a key we do not know is an error."""


class Nodes(Group, frozen=True):
    min: Positive = 1  # fewer than this never start
    max: Positive = 1
    nproc_per_node: Positive | Literal["auto", "cpu", "gpu", "xpu"] = 1
    standbys: Count = 0  # spare nodes beyond `max`, kept warm without a role
    local_nodes: Count = (
        1  # nodes to run on this machine, each on a loopback address of its own; 0: only the controller
    )
    node_rank: Annotated[int, msgspec.Meta(ge=-1)] = -1  # -1: the controller assigns it
    local_addr: str = ""  # where other nodes reach this one; empty: found out


class Restart(Group, frozen=True):
    max_restarts: Count = 100
    crash_loop: Positive = 3  # the same failure at the same step this often ends the job
    grace_s: Seconds = 30.0  # from SIGTERM to SIGKILL
    signals: tuple[str, ...] = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")  # these stop the job, with grace


class Hang(Group, frozen=True):
    timeout_s: Seconds = 0.0  # no step for this long is a hang; 0: limits learned from the job itself
    first_step_s: PositiveSeconds = 1800.0  # without timeout_s, silent starts of a kind seen before are judged sooner
    save_s: PositiveSeconds = 1800.0
    eval_s: PositiveSeconds = 1800.0
    exit_s: PositiveSeconds = 300.0  # from the script's end, or the last sign of life after it, to the process's
    safety_factor: Annotated[float, msgspec.Meta(ge=1)] = 5.0  # a learned limit is this many times what was seen


class Straggler(Group, frozen=True):
    """Who looks for workers that are slow for their work. What is found is told; with `act` a standby replaces it."""

    enabled: bool = True
    threshold: Annotated[float, msgspec.Meta(gt=0)] = 0.1  # slow: takes this much longer than usual, as a share
    lasts_s: Seconds = 10.0  # a slow-down that is over sooner is told nobody
    act: bool = False  # drain a slow worker's place once that is cheaper than to bear it, if a standby waits


class Std(enum.IntFlag):
    """Streams of a worker, numbered as torchrun does."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


class Logs(Group, frozen=True):
    run_dir: str = "everstep_runs"
    log_dir: str = ""  # where workers' logs go; empty: into the run folder
    redirects: str = "0"  # torchrun's syntax: "3", or by local rank "0:1,1:2"
    tee: str = "0"
    row: bool = True  # the last row of a terminal shows the progress; false: plain lines, as anywhere else
    kernel: str = "/dev/kmsg"  # the kernel's log, in which causes of incidents are looked for; empty: it is not read
    local_ranks_filter: tuple[Count, ...] = ()  # only these local ranks show on the console; empty: all
    role: str = "default"

    def console(self, local_rank: int) -> Std:
        """Which streams of this worker show on the console; its log files always get both."""
        if self.local_ranks_filter and local_rank not in self.local_ranks_filter:
            return Std.NONE
        redirected = std_of(self.redirects, "logs.redirects", local_rank)
        return (Std.ALL & ~redirected) | std_of(self.tee, "logs.tee", local_rank)


class Report(Group, frozen=True):
    """What report.html tells beside accelerators' time."""

    price: Annotated[float, msgspec.Meta(ge=0)] = 0.0  # of an accelerator for an hour; 0: no money is told
    currency: str = "USD"


class Rendezvous(Group, frozen=True):
    standalone: bool = False
    endpoint: str = ""
    id: str = ""
    backend: str = "static"
    conf: dict[str, str] = {}
    master_addr: str = ""
    master_port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0


class Control(Group, frozen=True):
    controller: str = ""  # HOST:PORT; empty: from the rendezvous settings
    token_file: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    join_timeout_s: PositiveSeconds = 600.0  # too few nodes for this long: the job fails
    last_call_s: Seconds = 5.0  # between min and max nodes: wait this long for more
    heartbeat_s: PositiveSeconds = 0.5
    reconnect_s: Seconds = 0.5  # after a closed connection, before the node counts as lost
    lease_s: PositiveSeconds = 10.0  # without a heartbeat, before the node counts as lost
    recover_s: PositiveSeconds = 10.0  # a restarted controller waits this long for its nodes
    stop_margin_s: Seconds = 5.0  # beyond the grace, before a node that does not stop counts as lost
    fence_s: PositiveSeconds = 60.0  # a node that hears nothing for this long stops its workers


class Vault(Group, frozen=True):
    """The process that keeps images of the state for the workers of a node, if its script makes any."""

    memory: str = ""  # for images, as in 8G; 0: no vault; empty: half of what is available at the start
    rate: str = ""  # bytes per second of each copy to another node, as in 500M; empty: as fast as it goes


class Preflight(Group, frozen=True):
    """What is looked at before a node takes part: one that is broken is refused, and told. Sizes as in 8G, 500M."""

    start: Literal["off", "quick", "full"] = "quick"  # before the first start: a millisecond; full: see docs/doctor.md
    again: Literal["off", "quick", "full"] = "full"  # before a node that was lost is used again
    shm: str = "1M"  # less room than this in /dev/shm is broken
    disk: str = "256K"  # less room than this for logs
    memory: str = "32M"  # less available memory
    descriptors: Count = 64  # fewer files that a process may open


class Trace(Group, frozen=True):
    """What workers write down of their steps for `everstep trace`, in files of their node's log folder."""

    size: str = "4M"  # of a place's files, the newest spans; 0: no trace


class Dashboard(Group, frozen=True):
    """The page that shows the job, served beside the controller. Elsewhere than on loopback all of it needs a token."""

    enabled: bool = True
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 7070  # any free one when it is taken
    otlp: str = ""  # http://HOST:PORT of an OpenTelemetry collector that is to hear of the job; empty: none
    names: tuple[str, ...] = ()  # host names by which browsers reach it through a proxy
    private: bool = False  # reading needs the token on loopback too: others work on this machine


class Worker(Group, frozen=True):
    kind: Literal["script", "module", "program"] = "script"
    target: str = ""
    args: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()  # modules the warm process imports besides torch
    zygote: bool = True
    start_method: Literal["spawn", "fork", "forkserver"] = "spawn"  # as torchrun: of no effect on a script
    run_path: bool = False
    python: str = ""  # another interpreter for the workers
    omp_num_threads: Count = 0  # 0: what the environment says, else 1 when a node has several workers
    virtual_local_rank: bool = False  # every worker sees LOCAL_RANK=0 and its own device as number 0


class RunConfig(Group, frozen=True):
    nodes: Nodes = Nodes()
    restart: Restart = Restart()
    hang: Hang = Hang()
    straggler: Straggler = Straggler()
    logs: Logs = Logs()
    report: Report = Report()
    rendezvous: Rendezvous = Rendezvous()
    control: Control = Control()
    worker: Worker = Worker()
    vault: Vault = Vault()
    preflight: Preflight = Preflight()
    trace: Trace = Trace()
    dashboard: Dashboard = Dashboard()
    env: dict[str, str] = {}  # added to every worker's environment, on top of its launcher's
    job: str = ""  # name; empty: the rendezvous id, else made up
    expect_steps: Count = 0  # a job that ends with fewer optimizer steps failed; 0: unknown

    @property
    def heartbeat_s(self) -> float:
        """How often an agent reports progress: often enough for the hang time-out."""
        usual = self.control.heartbeat_s
        return min(usual, self.hang.timeout_s / 20) if self.hang.timeout_s else usual


def size_of(text: str, key: str) -> int:
    """Bytes of 8G, 500M, 1.5T, 64K or a plain number; units are powers of 1024. Raises UsageError, naming `key`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(i?B)?", text, re.IGNORECASE)
    if match is None:
        raise UsageError(f"{key} = {text!r}: expected a size as in 8G, 500M or 1048576")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def std_of(text: str, key: str, local_rank: int) -> Std:
    """Streams that torchrun's -r/-t syntax names for a local rank: "0".."3" for all, or "RANK:0..3,...".

    Raises UsageError, naming `key`, when the text is neither.
    """
    if re.fullmatch(r"[0-3]", text):
        return Std(int(text))
    if not re.fullmatch(r"\d+:[0-3](,\d+:[0-3])*", text):
        raise UsageError(
            f"{key} = {text!r}: expected 0 (none), 1 (stdout), 2 (stderr), 3 (both), or such a number "
            f"for each local rank, as in 0:1,1:2"
        )
    pairs = (item.split(":") for item in text.split(","))
    return Std({int(rank): int(streams) for rank, streams in pairs}.get(local_rank, 0))


def job_spec(config: RunConfig, job_id: str) -> JobSpec:
    """What of the configuration the controller must know."""
    control, restart = config.control, config.restart
    return JobSpec(
        job=job_id,
        min_nodes=config.nodes.min,
        max_nodes=config.nodes.max,
        max_restarts=restart.max_restarts,
        grace_s=restart.grace_s,
        join_timeout_s=control.join_timeout_s,
        last_call_s=control.last_call_s,
        reconnect_s=control.reconnect_s,
        lease_s=control.lease_s,
        recover_s=control.recover_s,
        stop_margin_s=control.stop_margin_s,
        fence_s=control.fence_s,
        crash_loop=restart.crash_loop,
        hang_timeout_s=config.hang.timeout_s,
        expect_steps=config.expect_steps,
        script=config.worker.target,
    )


# The ladder of time-outs: (inner, factor, outer, why). factor * inner must not exceed outer.
LADDER = (
    ("control.heartbeat_s", 3, "control.lease_s", "two lost heartbeats must not lose a healthy node"),
    ("control.reconnect_s", 1, "control.lease_s", "a closed connection must be judged before a silent one"),
    ("control.lease_s", 1, "control.recover_s", "a restarted controller must wait at least a lease for its nodes"),
    ("control.recover_s", 1, "control.fence_s", "nodes must outlive a restart of the controller"),
    ("hang.timeout_s", 1, "hang.first_step_s", "a first step takes longer than the others"),
    ("hang.timeout_s", 1, "hang.save_s", "a save must not be taken for a hang"),
    ("hang.timeout_s", 1, "hang.eval_s", "an evaluation must not be taken for a hang"),
)


def check(config: RunConfig, origins: Mapping[str, str] | None = None) -> None:
    """Raise UsageError for values which are fine one by one and cannot work together.

    `origins`: key -> where it was set, for the message.
    """
    said = _Said(config, origins or {})
    nodes = config.nodes
    if nodes.min > nodes.max:
        raise UsageError(f"{said('nodes.min')} must not be above {said('nodes.max')}")
    if nodes.local_nodes > nodes.max:
        raise UsageError(
            f"{said('nodes.local_nodes')} must not be above {said('nodes.max')}; "
            f"spare nodes are nodes.standbys (--standbys)"
        )
    if config.rendezvous.backend == "static" and nodes.node_rank >= nodes.max:
        raise UsageError(f"{said('nodes.node_rank')} must be below {said('nodes.max')}: ranks of nodes count from 0")
    if config.rendezvous.standalone and nodes.min > nodes.local_nodes:
        raise UsageError(
            f"--standalone is one machine, which runs {said('nodes.local_nodes')}; that is below {said('nodes.min')}"
        )
    if re.search(JOB_NAME_REFUSED, config.job):
        raise UsageError(f"{said('job')}: expected letters, digits, '-', '_' and '.' only")
    if bool(config.control.tls_cert) != bool(config.control.tls_key):
        raise UsageError("control.tls_cert and control.tls_key belong together: give both or neither")
    for name in config.restart.signals:
        if name not in signal.Signals.__members__ or name in ("SIGKILL", "SIGSTOP"):
            raise UsageError(f"{said('restart.signals')}: {name!r} is not a signal that can be handled (SIGUSR1, ...)")
    for key, text in (("logs.redirects", config.logs.redirects), ("logs.tee", config.logs.tee)):
        std_of(text, f"{key} ({said.origin(key)})", 0)
    for key, text in (
        ("vault.memory", config.vault.memory),
        ("vault.rate", config.vault.rate),
        ("trace.size", config.trace.size),
    ):
        size_of(text or "0", f"{key} ({said.origin(key)})")
    for name in ("shm", "disk", "memory"):
        key = f"preflight.{name}"
        size_of(getattr(config.preflight, name), f"{key} ({said.origin(key)})")
    _check_ladder(config, said)


def _check_ladder(config: RunConfig, said: _Said) -> None:
    for inner, factor, outer, why in LADDER:
        low, high = said.number(inner), said.number(outer)
        if factor * low > high:
            times = f"{factor} times " if factor > 1 else ""
            raise UsageError(f"time-outs in the wrong order: {times}{said(inner)} exceeds {said(outer)}; {why}")


class _Said:
    """Says a key with its value and origin, as people would look for it."""

    def __init__(self, config: RunConfig, origins: Mapping[str, str]) -> None:
        self.config, self.origins = config, origins

    def value(self, key: str) -> object:
        found: object = self.config
        for name in key.split("."):
            found = getattr(found, name)
        return found

    def origin(self, key: str) -> str:
        return self.origins.get(key, "the default")

    def number(self, key: str) -> float:
        value = self.value(key)
        assert isinstance(value, int | float)
        return value

    def __call__(self, key: str) -> str:
        value = self.value(key)
        shown = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{key} = {shown} ({self.origin(key)})"
