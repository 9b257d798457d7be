"""`everstep dashboard [RUN]` and `everstep replay RUN`: serve the page that shows a job, until interrupted.

The launcher of a job starts the first one too, as a process of low priority, with a socket that listens already.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from cyclopts import Parameter

from everstep.cli import presence
from everstep.cli.asking import ANSWER_S, LATEST, LOOK_S, ask
from everstep.cli.showing import listen_near, missing, url
from everstep.cli.viewing import journal_of
from everstep.control import token
from everstep.control.reading import ended
from everstep.core import wire
from everstep.core.config import RunConfig
from everstep.core.endpoint import is_loopback
from everstep.core.errors import EverstepError, UsageError

if TYPE_CHECKING:
    from everstep.dashboard.control import Question
    from everstep.observe.view import View

HOST, PORT = "127.0.0.1", 7070
TOKEN = "dashboard.token"
JOURNAL = "journal.jsonl"
Flag = Annotated[bool, Parameter(negative=())]
Names = Annotated[tuple[str, ...], Parameter(name="--name", negative=())]


def dashboard(
    run: Path = LATEST, *, host: str = HOST, port: int = PORT, names: Names = (),
    private: Flag = False, otlp: str = "", fd: Annotated[int, Parameter(show=False)] = -1,
) -> int:  # fmt: skip
    """Serve the page that shows a job, live or recorded: RUN is its run folder, or a journal file.

    Args:
        run: default: the newest one below ./everstep_runs.
        host: where to listen. Elsewhere than on loopback everything needs the token in dashboard.token.
        port: any free one when it is taken.
        names: further host names by which browsers reach it, through a proxy; repeatable.
        private: reading needs the token on loopback too.
        otlp: http://HOST:PORT of an OpenTelemetry collector, which is sent metrics and a trace of each incident.
        fd: a socket that listens already.
    """
    return _serve(run, host, port, names, private, fd, otlp=otlp)


def replay(run: Path, *, host: str = HOST, port: int = PORT, names: Names = (), private: Flag = False) -> int:
    """Serve the page that shows a job, and play its record from the start. Arguments as of `everstep dashboard`.

    Args:
        run: a run folder, or a journal file.
        host: where to listen.
        port: any free one when it is taken.
        names: further host names by which browsers reach it, through a proxy; repeatable.
        private: reading needs the token on loopback too.
    """
    return _serve(run, host, port, names, private, play=True)


class Reach:
    """The way to the controller of a job that runs."""

    def __init__(self, run: Path, address: presence.Address, grace_s: float) -> None:
        self._run, self._address = run, address
        self.grace_s = grace_s

    async def ask(self, question: Question) -> Mapping[str, Any] | str:
        follow = (wire.Query(),) if isinstance(question, wire.StopRequest) else ()  # which has no answer of its own
        more_s = LOOK_S + question.seconds if isinstance(question, wire.LookRequest) else 0.0
        return await ask(self._address, question, *follow, answer_s=ANSWER_S + more_s)

    def lives(self) -> bool | None:
        return presence.launcher_lives(self._run, self._address)


def _serve(
    run: Path, host: str, port: int, names: tuple[str, ...], private: bool, fd: int = -1, play: bool = False,
    otlp: str = "",
) -> int:  # fmt: skip
    why = missing()
    if why:
        raise UsageError(f"no dashboard: {why}")
    from everstep.dashboard import app, serve, source, stream
    from everstep.dashboard.guard import Guard
    from everstep.dashboard.notes import Notes

    folder = run if run.is_dir() else run.parent
    if fd < 0:  # a launcher is here before the controller's first word
        _refuse(run, port)
    reach = None if play else _reach(run)
    listener = socket.socket(fileno=fd) if fd >= 0 else listen_near(host, port)
    local = is_loopback(host)
    secret, where = _token(folder, needed=reach is not None or private or not local)
    guard = Guard(
        secret, {*names, *(() if local else (host, socket.gethostname()))}, open_reading=local and not private
    )
    newest = source.Source(run, reach.lives if reach else None)
    desk, notes = source.Desk("newest"), Notes()
    pages = stream.Stream(newest, desk)
    site = app.Site(
        run=folder, source=newest, stream=pages, guard=guard, notes=notes, desk=desk,
        past=source.Past(run), past_desk=source.Desk("past"), commands=reach, play=play,
    )  # fmt: skip
    with _exporting(otlp, fd >= 0) as newest.shown:
        if fd < 0:
            print(f"everstep: dashboard at {url(listener, host)}{where}; Ctrl-C ends it", file=sys.stderr, flush=True)
        serve.run(app.make(site), listener, pages, notes)
    return 0


@contextlib.contextmanager
def _exporting(otlp: str, beside: bool) -> Iterator[Callable[[View], None] | None]:
    """Who is told each view. `beside` a job, what is wrong with the export must not take the page away."""
    if not otlp:
        yield None
        return
    from everstep.observe.otlp import OtlpExport

    try:
        export = OtlpExport(otlp)
    except UsageError as error:
        if not beside:
            raise
        print(f"everstep: {error}", file=sys.stderr, flush=True)
        yield None
        return
    with export:
        yield export.update


def _refuse(run: Path, port: int) -> None:
    if not 0 <= port < 1 << 16:
        raise UsageError(f"--port {port}: expected 0 to 65535")
    journal_of(run)


def _reach(run: Path) -> Reach | None:
    """None when the job is over, or this is no run folder of a job that could be reached."""
    address = presence.read(run) if run.is_dir() else None
    if address is None or presence.launcher_lives(run, address) is False:
        return None
    if (run / JOURNAL).exists() and ended(run / JOURNAL) is not None:
        return None
    try:
        grace_s = msgspec.json.decode((run / "config.json").read_bytes(), type=RunConfig).restart.grace_s
    except (OSError, msgspec.DecodeError):  # of another version: what it then is by default
        grace_s = RunConfig().restart.grace_s
    return Reach(run, address, grace_s)


def _token(folder: Path, needed: bool) -> tuple[str, str]:
    """The dashboard's token, made if there is none, and where it is, in words."""
    if not needed:  # then there is no reason to write into a folder that may be somebody's archive
        return secrets.token_hex(token.NUM_BYTES), ""
    path = folder / TOKEN
    try:
        secret = token.read_token(path) if path.exists() else token.create_token(path)
    except EverstepError as error:  # a record on a disk that cannot be written, or of somebody else
        secret = secrets.token_hex(token.NUM_BYTES).encode()
        return secret.decode(), f" (token {secret.decode()}, for {error})"
    return secret.decode(), f" (token in {path})"
