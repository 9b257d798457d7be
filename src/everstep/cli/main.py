"""Entry point of `everstep`: finds the command, runs it, and turns a user's error into one line and an exit code.

A command is a function, or an app of several, named in `COMMANDS` by its import path; cyclopts reads its signature and
imports it only when it is called. `run` has a parser of its own (its options end at the script) and does not even load
cyclopts.
"""

from __future__ import annotations

import difflib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.core.errors import EverstepError, ExitCode, UsageError

if TYPE_CHECKING:
    from cyclopts import App

# Name -> (import path of its function, one line of help). A function returns its exit code, or None for 0.
COMMANDS = {
    "ckpt": ("everstep.cli.ckpt:app", "List, check, compare, export, reshape and prune checkpoints."),
    "dashboard": ("everstep.cli.dashboard:dashboard", "Serve the page that shows a job, live or recorded."),
    "doctor": ("everstep.cli.doctor:doctor", "Examine this machine, or several and the links between them."),
    "drain": ("everstep.cli.drain:drain", "Take a node or a worker out of a running job; the others go on."),
    "explain": (
        "everstep.cli.incidents:explain_command",
        "Tell all about one incident: what, who, why, cost, and what to do.",
    ),
    "incidents": ("everstep.cli.incidents:incidents", "List what happened to a job, and what it cost."),
    "ledger": ("everstep.cli.ledger:ledger", "Show which samples the committed steps of a job consumed."),
    "plan": ("everstep.cli.plan:plan", "Recommend intervals, copies, standbys and strategy for a job, with its ETTR."),
    "profile": ("everstep.cli.looking:profile", "Show where a worker of a running job spends its time: a flame graph."),
    "replay": ("everstep.cli.dashboard:replay", "Serve the page that shows a job, and play its record from the start."),
    "report": ("everstep.cli.report:report", "Write what became of a job as a page, and as data."),
    "run": ("everstep.cli.main:run", "Run a training script through failures (torchrun's flags are accepted)."),
    "save": ("everstep.cli.save:save", "Save the state of a running job to its checkpoints, now."),
    "schedules": (
        "everstep.cli.schedules:schedules",
        "Play random faults against the control plane on a virtual clock.",
    ),
    "sim": ("everstep.cli.sim:app", "Simulate a job on a failing cluster: what it costs, and what helps."),
    "stacks": ("everstep.cli.looking:stacks", "Show the stacks of a running job's workers, now."),
    "status": ("everstep.cli.status:status", "Show how a job is doing, live."),
    "top": ("everstep.cli.top:top", "Watch a job on the terminal."),
    "trace": ("everstep.cli.trace:trace", "Write what a job's workers did as a trace for Perfetto."),
}


def run(*tokens: str) -> int:
    """Run a training script through failures: `everstep run [options] script.py [arguments of the script]`."""
    from everstep.cli import options

    line = options.split(tokens)
    if line.has("--help"):
        sys.stdout.write(options.help_text())
        return ExitCode.OK
    request = options.request(line, os.environ)
    for note in request.said:
        print(f"everstep: note: {note}", file=sys.stderr)
    if request.dry_run:
        from everstep.core.layers import to_toml

        sys.stdout.write(to_toml(request.resolved))
        return ExitCode.OK
    from everstep.cli import runner  # asyncio and all of control: not needed to refuse a bad command line

    return runner.run(request.config)


def app() -> App:
    """The cyclopts application with every command registered by its import path."""
    from cyclopts import App

    def version() -> str:
        from importlib.metadata import version

        return version("everstep")

    made = App(
        name="everstep",
        help="Keeps a PyTorch training job running through failures.",
        version=version,
        result_action="return_value",
        exit_on_error=False,
        print_error=False,
    )
    for name, (path, text) in COMMANDS.items():
        made.command(path, name=name, help=text)
    return made


def dispatch(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code. Raises EverstepError for what the user can mend."""
    if arguments[:1] == ["run"]:
        return run(*arguments[1:])
    if arguments and not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
        close = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; there are: {', '.join(COMMANDS)}"
        raise UsageError(f"unknown command {arguments[0]!r}{hint}")
    from cyclopts import CycloptsError

    try:
        code = app()(list(arguments))
    except CycloptsError as error:
        raise UsageError(" ".join(str(error).split())) from error
    return int(code or 0)


def main(arguments: Sequence[str] | None = None) -> int:
    """What the `everstep` program calls; its return value is the exit status."""
    _open_standard_streams()
    try:
        code = int(dispatch(list(sys.argv[1:] if arguments is None else arguments)))
        sys.stdout.flush()
        return code
    except EverstepError as error:
        print(f"everstep: error: {error}", file=sys.stderr)
        return int(error.code)
    except BrokenPipeError:  # `everstep ... | head`: whoever read this has enough, and is owed no traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is buffered still goes nowhere, silently
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("everstep: SIGINT: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


def _open_standard_streams() -> None:
    """Descriptors 0, 1 and 2 exist: else the next files opened get these numbers, and are written to as a console."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
            os.set_inheritable(fd, True)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115 - open for good
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
