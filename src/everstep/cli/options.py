"""Options of `everstep run`: its own flags beside torchrun's, and the way from a command line to a `RunConfig`.

Parsing stops at the first positional, the script: what follows is the script's, also when it looks like one of our
flags. A general argument parser looks for its flags everywhere, so tokens are split here, by the same declarations
that make the help text.
"""

from __future__ import annotations

import difflib
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from everstep.cli import torchrun
from everstep.cli.torchrun import Flag, key, nothing, switch
from everstep.control.launch import Kind
from everstep.control.target import why_not
from everstep.core.config import RunConfig
from everstep.core.endpoint import controller_address, is_loopback
from everstep.core.errors import UsageError
from everstep.core.layers import Layer, Resolved, Setting, from_set, from_toml, resolve, suggestion

DEFAULT_FILE = "everstep.toml"

OWN = (
    Flag(("--config",), f"settings file (./{DEFAULT_FILE} when there is one)", nothing, "FILE"),
    Flag(("--set",), "one setting, TOML syntax; wins over all others; repeatable", nothing, "KEY=VALUE"),
    Flag(("--grace",), "from SIGTERM to SIGKILL (30)", key("restart.grace_s"), "SECONDS"),
    Flag(("--hang-timeout",), "no step for this long is a hang (learned)", key("hang.timeout_s"), "SECONDS"),
    Flag(("--first-step-timeout",), "limit of the first step (1800)", key("hang.first_step_s"), "SECONDS"),
    Flag(("--save-timeout",), "limit of saving a checkpoint (1800)", key("hang.save_s"), "SECONDS"),
    Flag(("--eval-timeout",), "limit of an evaluation (1800)", key("hang.eval_s"), "SECONDS"),
    Flag(("--standbys",), "spare nodes to keep warm (0)", key("nodes.standbys"), "N"),
    Flag(("--local-nodes",), "nodes to run on this machine (1); 0: only the controller", key("nodes.local_nodes"), "N"),
    Flag(("--controller",), "the controller's address", key("control.controller"), "HOST:PORT"),
    Flag(("--token-file",), "secret shared by the job's nodes", key("control.token_file"), "FILE"),
    Flag(("--run-dir",), "where run folders are made (everstep_runs)", key("logs.run_dir"), "DIR"),
    Flag(("--job",), "name of the job", key("job"), "NAME"),
    Flag(("--preload",), "modules to import before forking; repeatable", nothing, "MODULES"),
    Flag(("--no-zygote",), "start every worker afresh", switch("worker.zygote", False)),
    Flag(("--expect-steps",), "fewer optimizer steps than this is a failure", key("expect_steps"), "N"),
    Flag(("--vault-memory",), "for images of the state, a node (half of what is free)", key("vault.memory"), "SIZE"),
    Flag(("--no-dashboard",), "serve no page that shows the job", switch("dashboard.enabled", False)),
    Flag(("--dry-run",), "print the resolved settings and exit", nothing),
    Flag(("-h", "--help"), "print this text and exit", nothing),
)

FLAGS = tuple(flag for group in torchrun.GROUPS.values() for flag in group) + OWN
BY_NAME = {name: flag for flag in FLAGS for name in flag.names}


class Use(NamedTuple):
    """A flag given a text, and where: its spelling, or the variable."""

    flag: Flag
    text: str
    origin: str


class CommandLine(NamedTuple):
    """Tokens, split: flags in order, and the script with all that follows it."""

    uses: tuple[Use, ...]
    script: tuple[str, ...]
    said: tuple[str, ...] = ()

    def has(self, name: str) -> bool:
        return any(use.flag.name == name for use in self.uses)

    def texts(self, name: str) -> list[str]:
        return [use.text for use in self.uses if use.flag.name == name]


class Request(NamedTuple):
    """What a command line asks for. `said`: lines to tell the person."""

    resolved: Resolved
    said: tuple[str, ...]
    dry_run: bool

    @property
    def config(self) -> RunConfig:
        return self.resolved.config


def split(tokens: Sequence[str]) -> CommandLine:
    """Split a command line at the script. Raises UsageError for an unknown flag or a missing value."""
    uses: list[Use] = []
    said: list[str] = []
    rest = list(tokens)
    while rest:
        token = rest[0]
        if token == "--":
            del rest[0]
            break
        if not token.startswith("-") or token == "-":
            break
        del rest[0]
        flag, spelled, text = _recognise(token, said)
        if flag.metavar and text is None:
            if not rest or _looks_like_flag(rest[0]):
                raise UsageError(f"{spelled} needs a value: {spelled} {flag.metavar} ({flag.help})")
            text = rest.pop(0)
        elif not flag.metavar and text is not None:
            raise UsageError(f"{spelled} takes no value, got {text!r}")
        uses.append(Use(flag, text or "", spelled))
    return CommandLine(tuple(uses), tuple(rest), tuple(said))


def _recognise(token: str, said: list[str]) -> tuple[Flag, str, str | None]:
    """The flag a token names, its spelling, and the value it carries: --flag=value, -r3, -r=3."""
    spelled, equals, value = token.partition("=")
    text = value if equals else None
    if not token.startswith("--"):
        short = BY_NAME.get(token[:2])
        if short is None or (len(token) > 2 and not short.metavar):
            raise UsageError(f"unknown flag {token!r}{_similar(spelled)}")
        return short, token[:2], token[2:].removeprefix("=") if len(token) > 2 else None
    name = "--" + spelled[2:].replace("_", "-")
    if name in BY_NAME:
        return BY_NAME[name], spelled, text
    # torchrun takes any unambiguous beginning of a flag; scripts in the wild use that.
    started = [flag for flag in FLAGS if flag.name.startswith(name)] if len(name) > 4 else []
    if len(started) == 1 and started[0].torch:
        said.append(f"{spelled} is taken as {started[0].name}")
        return started[0], spelled, text
    raise UsageError(
        f"unknown flag {spelled!r}{_similar(name)} (flags of the script go after it; see everstep run --help)"
    )


def _similar(name: str) -> str:
    close = difflib.get_close_matches(name, [flag.name for flag in FLAGS], n=1, cutoff=0.6)
    return suggestion(close[0] if close else None)


def _looks_like_flag(token: str) -> bool:
    return token.startswith("-") and len(token) > 1 and not re.fullmatch(r"-\d+(\.\d+)?", token)


def request(line: CommandLine, environ: Mapping[str, str]) -> Request:
    """Resolve a command line into a configuration: defaults < file < PET_* < flags < --set. Raises UsageError."""
    said = list(line.said)
    flags = {use.flag.name: use for use in line.uses}
    variables = {name: use for name, use in _from_environment(environ) if name not in flags}
    used = {name: (use.text, use.origin) for name, use in (variables | flags).items()}
    torchrun.conflicts(used)
    said += [f"{use.origin}: {use.flag.said}" for use in (variables | flags).values() if use.flag.said]
    said += torchrun.remarks(used)
    layers = [
        _file(line, said),
        _interpreter(environ),
        _layer(variables),
        _script(line.script, used),
        _layer(flags),
        _preload(line),
        *map(from_set, line.texts("--set")),
    ]
    resolved = resolve(layers)
    said += _reachable_from_here_only(resolved)
    dry_run = line.has("--dry-run")
    if not dry_run:
        _require_target(resolved.config, environ)
    return Request(resolved, tuple(said), dry_run)


def _from_environment(environ: Mapping[str, str]) -> Iterator[tuple[str, Use]]:
    for flag in FLAGS:
        variable = next((name for name in flag.env if environ.get(name)), None)
        if variable is None:
            continue
        text = environ[variable]
        if flag.metavar:
            yield flag.name, Use(flag, text, variable)
        elif not re.fullmatch(r"\d+", text):
            raise UsageError(f"{variable} = {text!r}: expected 0 or 1")
        elif int(text):
            yield flag.name, Use(flag, "", variable)


def _layer(uses: Mapping[str, Use]) -> Layer:
    """The settings that flags, or variables in their place, stand for."""
    layer: dict[str, Setting] = {}
    for use in uses.values():
        try:
            assigned = use.flag.assign(use.text)
        except ValueError as error:
            raise UsageError(f"{use.origin} {use.text!r}: {error}") from error
        for name, value in assigned.items():
            layer[name] = Setting(value, use.origin, text=isinstance(value, str))
    return layer


def _file(line: CommandLine, said: list[str]) -> Layer:
    given = line.texts("--config")
    if given:
        return from_toml(Path(given[-1]))
    if not Path(DEFAULT_FILE).exists():
        return {}
    said.append(f"settings from ./{DEFAULT_FILE}")
    return from_toml(Path(DEFAULT_FILE))


def _interpreter(environ: Mapping[str, str]) -> Layer:
    """PYTHON_EXEC, torchrun's way to name another interpreter. One cannot fork into it."""
    python = environ.get("PYTHON_EXEC", "")
    if not python or python == sys.executable:
        return {}
    return {"worker.python": Setting(python, "PYTHON_EXEC"), "worker.zygote": Setting(False, "PYTHON_EXEC")}


def _script(script: Sequence[str], used: Mapping[str, tuple[str, str]]) -> Layer:
    """The script named on the command line replaces the file's, with its kind and arguments."""
    layer: dict[str, Setting] = {}
    origin = "the command line"
    if script:
        layer["worker.target"] = Setting(script[0], origin)
        layer["worker.args"] = Setting(list(script[1:]), origin)
    kinds = {"--run-path": "script", "--module": "module", "--no-python": "program"}  # the first one in use counts
    kind = next((kind for name, kind in kinds.items() if name in used), "script" if script else None)
    if kind:
        layer["worker.kind"] = Setting(kind, origin)
    return layer


def _preload(line: CommandLine) -> Layer:
    modules = [name.strip() for text in line.texts("--preload") for name in text.split(",") if name.strip()]
    return {"worker.preload": Setting(modules, "--preload")} if modules else {}


def _reachable_from_here_only(resolved: Resolved) -> list[str]:
    address = controller_address(resolved.config, resolved.origins)
    nodes = resolved.config.nodes
    if address is None or nodes.max <= nodes.local_nodes or not is_loopback(address[0]):
        return []
    return [f"the controller's address {address[0]} is this machine's own: nodes on other machines cannot join"]


def _require_target(config: RunConfig, environ: Mapping[str, str]) -> None:
    """There is a script, and workers of this machine can run it. What other machines have, their own launchers see."""
    worker = config.worker
    if not worker.target:
        raise UsageError("no script given: everstep run [options] script.py [arguments of the script]")
    if not config.nodes.local_nodes:  # only the controller is here
        return
    why = why_not(Kind(worker.kind), worker.target, worker.python, {**environ, **config.env})
    if why:
        raise UsageError(why)


def help_text() -> str:
    """`everstep run --help`: all flags by group."""
    lines = [
        "usage: everstep run [options] script.py [arguments of the script]",
        "",
        "Run a torchrun script so that it comes back from failures. Every flag of torchrun is accepted, with dashes or",
        "underscores; docs/torchrun.md says what each means here. Settings are taken from, later ones winning:",
        f"defaults, {DEFAULT_FILE}, PET_* variables, flags, --set.",
    ]
    for title, flags in {"Everstep": OWN, **torchrun.GROUPS}.items():
        lines += ["", f"{title}:"]
        for flag in flags:
            spelled = f"  {', '.join(flag.names)} {flag.metavar}".rstrip()
            wrapped = textwrap.wrap(flag.help, 76) or [""]
            lines += [f"{spelled:<42} {wrapped[0]}" if len(spelled) < 42 else f"{spelled}\n{'':<42} {wrapped[0]}"]
            lines += [f"{'':<42} {more}" for more in wrapped[1:]]
    return "\n".join(lines) + "\n"
