"""torchrun's flags as `everstep run` understands them: one declaration each, which parsing, help and variables follow.

`docs/torchrun.md` says in prose what this table says in code. A flag either sets keys of the configuration, or is
accepted and said to be ignored, with the reason; none is dropped in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from everstep.core.errors import UsageError

Assign = Callable[[str], Mapping[str, object]]


@dataclass(frozen=True)
class Flag:
    """One option of `everstep run`.

    `assign` turns its text into keys and values ("" for a switch) and raises ValueError saying what is expected.
    `env`: variables with its default, the first that is set counts. `said`: told whenever it is used.
    """

    names: tuple[str, ...]
    help: str
    assign: Assign
    metavar: str = ""  # empty: a switch without a value
    env: tuple[str, ...] = ()
    said: str = ""
    torch: bool = False

    @property
    def name(self) -> str:
        """The long spelling with dashes."""
        return self.names[-1]


def key(name: str) -> Assign:
    """The text as it is; the type of the key decides what it must look like."""
    return lambda text: {name: text}


def switch(name: str, value: object) -> Assign:
    return lambda text: {name: value}


def nothing(text: str) -> Mapping[str, object]:
    return {}


def _nnodes(text: str) -> Mapping[str, object]:
    if not re.fullmatch(r"\d+(:\d+)?", text):
        raise ValueError("expected a number of nodes, or MIN:MAX as in 2:4")
    low, _, high = text.partition(":")
    return {"nodes.min": int(low), "nodes.max": int(high or low)}


def _ranks(text: str) -> Mapping[str, object]:
    if not re.fullmatch(r"(\d+(,\d+)*)?", text):
        raise ValueError("expected local ranks with commas between them, as in 0,1")
    return {"logs.local_ranks_filter": [int(rank) for rank in text.split(",") if rank]}


def _signals(text: str) -> Mapping[str, object]:
    return {"restart.signals": [name.strip() for name in text.split(",") if name.strip()]}


def _id(text: str) -> Mapping[str, object]:
    return {"rendezvous.id": "" if text == "none" else text}


# Keys of --rdzv-conf which have a meaning here. The others are kept in rendezvous.conf and have none.
CONF_KEYS = {
    "join_timeout": "control.join_timeout_s",
    "last_call_timeout": "control.last_call_s",
    "timeout": "control.join_timeout_s",
}


def _conf(text: str) -> Mapping[str, object]:
    assigned: dict[str, object] = {}
    for item in filter(None, text.split(",")):
        name, _, value = (part.strip() for part in item.partition("="))
        if not name or not value:
            raise ValueError("expected NAME=VALUE with commas between them, as in join_timeout=600,last_call_timeout=5")
        assigned[f"rendezvous.conf.{name}"] = value
        if name in CONF_KEYS:
            assigned[CONF_KEYS[name]] = value
    return assigned


def choice(assign: Assign, *choices: str) -> Assign:
    def checked(text: str) -> Mapping[str, object]:
        if text not in choices:
            raise ValueError("expected one of " + ", ".join(choices))
        return assign(text)

    return checked


def number(assign: Assign) -> Assign:
    """For values nobody reads: still refuse what torchrun refuses."""

    def checked(text: str) -> Mapping[str, object]:
        if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)", text):
            raise ValueError("expected a number")
        return assign(text)

    return checked


def _flag(
    names: str, metavar: str, assign: Assign, help: str, *, env: bool = True, said: str = "", also_env: str = ""
) -> Flag:
    spelled = tuple(names.split())
    variable = "PET_" + spelled[-1].removeprefix("--").replace("-", "_").upper()
    variables = (variable, also_env) if also_env else (variable,)
    return Flag(spelled, help, assign, metavar, variables if env else (), said, torch=True)


NODES = (
    _flag("--nnodes", "MIN:MAX", _nnodes, "number of nodes, or a range: the job runs with any number inside it"),
    _flag("--nproc-per-node", "N", key("nodes.nproc_per_node"), "workers per node: a number, auto, cpu, gpu or xpu"),
    _flag("--node-rank", "N", key("nodes.node_rank"), "static rendezvous: node 0 hosts the controller"),
    _flag("--local-addr", "ADDR", key("nodes.local_addr"), "where other nodes reach this one"),
)

RENDEZVOUS = (
    _flag("--standalone", "", switch("rendezvous.standalone", True), "one node, controller on loopback"),
    _flag("--rdzv-backend", "NAME", key("rendezvous.backend"), "any; the controller does the rendezvous"),
    _flag("--rdzv-endpoint", "HOST:PORT", key("rendezvous.endpoint"), "the controller's address; its owner hosts it"),
    _flag("--rdzv-id", "ID", _id, "the job's name, the same on all nodes"),
    _flag("--rdzv-conf", "K=V,...", _conf, "join_timeout, last_call_timeout, is_host; others have no effect"),
    _flag("--master-addr", "HOST", key("rendezvous.master_addr"), "static rendezvous: the controller's host"),
    _flag("--master-port", "PORT", key("rendezvous.master_port"), "static rendezvous: the controller's port"),
)

WORKERS = (
    _flag("-m --module", "", nothing, "run a module, as python -m does"),
    _flag("--no-python", "", nothing, "run a program which is not Python"),
    _flag("--run-path", "", switch("worker.run_path", True), "run the script with runpy.run_path"),
    _flag("--max-restarts", "N", key("restart.max_restarts"), "failures to survive (100; torchrun: 0)"),
    _flag("--role", "NAME", key("logs.role"), "name of the workers' role"),
    _flag("--signals-to-handle", "NAMES", _signals, "signals which stop the job, with commas between them"),
    _flag(
        "--shutdown-timeout",
        "SECONDS",
        key("restart.grace_s"),
        "torchrun's name for --grace",
        also_env="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    ),
    _flag(
        "--virtual-local-rank",
        "",
        switch("worker.virtual_local_rank", True),
        "every worker sees LOCAL_RANK 0 and one device",
    ),
    _flag(
        "--start-method",
        "NAME",
        choice(key("worker.start_method"), "spawn", "fork", "forkserver"),
        "no effect",
        said="no effect: workers are forked from a warm process, or started afresh with --no-zygote",
    ),
    _flag(
        "--monitor-interval",
        "SECONDS",
        number(nothing),
        "ignored",
        said="ignored: the kernel reports a worker's death at once, nothing is polled",
    ),
    _flag(
        "--numa-binding",
        "MODE",
        choice(nothing, "node", "socket", "exclusive", "core-complex"),
        "ignored",
        env=False,
        said="ignored: workers keep the CPU affinity of the launcher (bind that with numactl)",
    ),
)

LOGS = (
    _flag("--log-dir", "DIR", key("logs.log_dir"), "where workers' logs go (the run folder)"),
    _flag(
        "-r --redirects",
        "SPEC",
        key("logs.redirects"),
        "keep off the console: 0 none, 1 stdout, 2 stderr, 3 both, or 0:1,1:2",
    ),
    _flag("-t --tee", "SPEC", key("logs.tee"), "show on the console although redirected; same syntax"),
    _flag("--local-ranks-filter", "RANKS", _ranks, "only these local ranks show on the console"),
    _flag(
        "--duplicate-stdout-filters",
        "TEXTS",
        nothing,
        "ignored",
        said="ignored: every worker's whole log is kept, filter it there",
    ),
    _flag(
        "--duplicate-stderr-filters",
        "TEXTS",
        nothing,
        "ignored",
        said="ignored: every worker's whole log is kept, filter it there",
    ),
    _flag(
        "--logs-specs",
        "NAME",
        nothing,
        "ignored",
        env=False,
        said="ignored: it names a class inside torchrun's launcher; see --log-dir",
    ),
    _flag(
        "--event-log-handler",
        "NAME",
        nothing,
        "ignored",
        said="ignored: events go to the job's journal in the run folder",
    ),
)

GROUPS = {"Nodes": NODES, "Rendezvous": RENDEZVOUS, "Workers": WORKERS, "Logs": LOGS}


def conflicts(used: Mapping[str, tuple[str, str]]) -> None:
    """Refuse combinations torchrun refuses. `used`: flag name -> (text, origin)."""
    if "--no-python" in used and "--module" in used and "--run-path" not in used:
        raise UsageError(
            f"{used['--no-python'][1]} and {used['--module'][1]} exclude each other: a module needs Python"
        )


def remarks(used: Mapping[str, tuple[str, str]]) -> list[str]:
    """What to tell about torchrun's flags in use that mean something else, or nothing, here."""
    said: list[str] = []
    backend = used.get("--rdzv-backend", ("static", ""))[0]
    if backend not in ("static", "c10d"):
        said.append(
            f"--rdzv-backend {backend}: no such service is contacted; Everstep's own controller does the rendezvous, "
            "at the address of --rdzv-endpoint, which must be a node of the job"
        )
    if backend != "static" and "--node-rank" in used:
        said.append(f"{used['--node-rank'][1]}: no effect with --rdzv-backend {backend}: the controller assigns ranks")
    conf = [item.partition("=")[0].strip() for item in used.get("--rdzv-conf", ("", ""))[0].split(",") if item]
    idle = [name for name in conf if name not in CONF_KEYS and name != "is_host"]
    if idle:
        said.append(f"--rdzv-conf: no effect here: {', '.join(idle)}")
    if "--run-path" in used and used.keys() & {"--module", "--no-python"}:
        said.append("--run-path takes precedence over --module and --no-python, as under torchrun")
    if used.keys() & {"--master-addr", "--master-port"} and (backend != "static" or "--rdzv-endpoint" in used):
        said.append("--master-addr and --master-port: no effect beside --rdzv-endpoint or a backend other than static")
    return said
