"""What `everstep run` does on its host: starts the controller (where it belongs here) and the agents, and minds them.

It trains nothing and decides nothing. A controller that dies is started again on the same listening socket,
so nobody is ever refused; an agent that dies is reported at once, swept up after, and started again. Its own
death ends everything it started (parent-death signals).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import BinaryIO

import msgspec

from everstep.cli import presence
from everstep.cli.joining import Joined, join
from everstep.cli.narrate import Narrator
from everstep.cli.seat import Seat, num_slots, require_room, take_seat
from everstep.cli.showing import Showing
from everstep.cli.vaults import FINISH_S, Vaults
from everstep.control import sweep
from everstep.control.output import Console
from everstep.control.prepare import AgentOptions
from everstep.control.tls import client_context
from everstep.control.token import create_token, read_token
from everstep.control.transport import connect
from everstep.control.voice import PATIENCE_S, speak_through
from everstep.core import wire
from everstep.core.config import RunConfig
from everstep.core.errors import ExitCode, Unreachable, UsageError

BROKEN = (ExitCode.NODE_LOST, ExitCode.INTERNAL)  # an agent that exits so is worth another try
AGENT_LIVES = 16  # of one node; a node that dies more often is broken
CONTROLLER_PAUSE_S = 5.0  # before the next life of one that ended by itself
CONTROLLER_DEATHS = 20  # by signals within a minute: from then on it comes back more slowly, and training goes on
CONTROLLER_REST_S = 1.0
PR_SET_PDEATHSIG = 1


def run(config: RunConfig) -> int:
    """Run the job to its end, or this host's part in it; returns the exit code (see core.errors)."""
    slots = num_slots(config.nodes.nproc_per_node)
    if config.nodes.local_nodes:  # spare ones run workers only in the place of others
        require_room(slots, config.nodes.local_nodes)
        _require_log_dir(config)
    seat = take_seat(config)
    joined = None if seat.listener else join(config, seat)
    if isinstance(joined, signal.Signals):
        return 128 + joined
    try:
        launcher = Launcher.joining(config, seat, slots, joined) if joined else Launcher.hosting(config, seat, slots)
    except OSError as error:
        raise UsageError(f"no run folder in {config.logs.run_dir} (--run-dir): {error.strerror}") from error
    console, before = Console(), sys.stderr
    speak_through(console)
    try:
        return asyncio.run(launcher.run())
    finally:
        sys.stderr = before
        console.close(PATIENCE_S)


def _require_log_dir(config: RunConfig) -> None:
    """Refuse a --log-dir in which the nodes of this host could not make their folders."""
    if not config.logs.log_dir:
        return
    folder = Path(config.logs.log_dir).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryDirectory(dir=folder).cleanup()
    except OSError as error:
        why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        raise UsageError(f"no logs can be kept in {folder} (--log-dir): {why}") from error


class Launcher:
    """One `everstep run`: the processes of this host."""

    def __init__(self, config: RunConfig, seat: Seat, slots: int, job: str, run_dir: Path) -> None:
        self.config = config
        self.job = job
        self.run_dir = run_dir
        self.listener = seat.listener
        self.present: BinaryIO | None = None  # its lock shows that this launcher lives
        self.host, self.port = seat.host, seat.port
        self.seat = seat
        self.tls = client_context(config.control.tls_cert)
        self.token_file = Path(seat.token) if seat.token else run_dir / "token"
        self.controller: asyncio.subprocess.Process | None = None
        self.agents: dict[str, asyncio.subprocess.Process] = {}
        self.incarnations: dict[str, str] = {}
        self.stops = 0
        self.slots = slots
        self.broken_nodes: set[str] = set()  # whose agents died AGENT_LIVES times
        self.ending = asyncio.Event()
        self.exit_code = int(ExitCode.INTERNAL)
        self.minders: set[asyncio.Task[None]] = set()
        self.showing: Showing | None = None  # the dashboard, where the controller is
        self.vaults = Vaults(config, self.token_file, len(seat.nodes), self._start_vault)

    @classmethod
    def hosting(cls, config: RunConfig, seat: Seat, slots: int) -> Launcher:
        """This host has the controller: a new job, its run folder, its token."""
        stamp = time.strftime("%Y%m%d-%H%M%S")
        job = f"{config.job or Path(config.worker.target).stem or 'job'}-{stamp}-{secrets.token_hex(2)}"
        launcher = cls(config, seat, slots, job, Path(config.logs.run_dir).absolute() / job)
        launcher.run_dir.mkdir(parents=True)
        if not launcher.token_file.exists() and not config.control.token_file:
            launcher.token_file.parent.mkdir(parents=True, exist_ok=True)
            create_token(launcher.token_file)
        (launcher.run_dir / "config.json").write_bytes(msgspec.json.encode(config))
        cert = config.control.tls_cert and str(Path(config.control.tls_cert).absolute())
        where = presence.Address(launcher.host, launcher.port, job, str(launcher.token_file), cert)
        launcher.present = presence.publish(launcher.run_dir, where)
        _point_to(launcher.run_dir)
        return launcher

    @classmethod
    def joining(cls, config: RunConfig, seat: Seat, slots: int, joined: Joined) -> Launcher:
        """The controller is elsewhere, and has said which job this is."""
        run_dir = Path(config.logs.run_dir).absolute() / f"{joined.job}-{socket.gethostname()}-{os.getpid()}"
        run_dir.mkdir(parents=True)
        nodes = tuple((node, address or joined.address) for node, address in seat.nodes)
        return cls(config, msgspec.structs.replace(seat, nodes=nodes), slots, joined.job, run_dir)

    async def run(self) -> int:
        _set_subreaper()
        loop = asyncio.get_running_loop()
        for name in self.config.restart.signals:
            loop.add_signal_handler(signal.Signals[name], self._signalled, signal.Signals[name])
        narrator = Narrator(self.run_dir, self.job, self.config) if self.listener else None
        if narrator:
            narrator.begin(f"{self.host}:{self.port}")
            await self._start_controller()
            self._mind(self._mind_controller())
        for node, address in self.seat.nodes:
            await self._start_agent(node, address)
            self._mind(self._mind_agent(node, address))
            self._mind(self.vaults.mind(node))
        if self.listener:
            self._show()
        while not self.ending.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), 0.2)
            self._reap_strays()
            if narrator:
                narrator.catch_up()
        await self._close()
        if narrator:
            narrator.end(self.exit_code)
        return self.exit_code

    def _mind(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self.minders.add(task)
        task.add_done_callback(self._minded)

    def _minded(self, task: asyncio.Task[None]) -> None:
        """A defect in a minder ends the run, loudly."""
        self.minders.discard(task)
        if not task.cancelled() and task.exception() is not None:
            print(f"everstep: internal error: {task.exception()!r}", file=sys.stderr)
            self.ending.set()

    # The controller -------------------------------------------------------------------------------------

    async def _start_controller(self) -> None:
        assert self.listener is not None
        fd = self.listener.fileno()
        self.controller = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "everstep.control.controller"),
            *("--run-dir", str(self.run_dir), "--listen-fd", str(fd), "--job", self.job),
            *("--token-file", str(self.token_file)),
            pass_fds=[fd],
            preexec_fn=_die_with_parent,
        )
        self._keep("controller.pid", str(self.controller.pid))

    async def _mind_controller(self) -> None:
        deaths: list[float] = []
        while True:
            assert self.controller is not None
            status = await self.controller.wait()
            if 0 <= status < ExitCode.INTERNAL or status > 128:
                self.exit_code = status
                break
            deaths = [t for t in deaths if time.monotonic() - t < 60] + [time.monotonic()]
            print(f"everstep: the controller died ({_words(status)}); starting it again", file=sys.stderr)
            if status > 0:  # it gave up by itself: what made it do so may last
                await asyncio.sleep(CONTROLLER_PAUSE_S)
            elif len(deaths) >= CONTROLLER_DEATHS:
                await asyncio.sleep(CONTROLLER_REST_S)
            await self._start_controller()
        self.ending.set()

    def _show(self) -> None:
        self.showing = Showing.open(self.config, self.run_dir, _die_with_parent)
        if self.showing:
            self._keep("dashboard.url", self.showing.url)
            self._mind(self.showing.mind())

    # Agents ---------------------------------------------------------------------------------------------

    async def _start_agent(self, node: str, address: str, again: bool = False) -> None:
        options = AgentOptions(
            node=node,
            incarnation=secrets.token_hex(8),
            node_rank=self._node_rank(node),
            address=address,
            host=self.host,
            port=self.port,
            job=self.job,
            slots=self.slots,
            log_dir=str(self._log_dir(node)),
            token_file=str(self.token_file),
            launcher_pid=os.getpid(),
            remote=self.listener is None,
            config=self.config,
            vault=self.vaults.listen(node, address),
            again=again,
        )
        self.incarnations[node] = options.incarnation
        with open(os.memfd_create("everstep-agent"), "wb") as file:  # needs no room on a disk
            file.write(msgspec.json.encode(options))
            file.flush()
            self.agents[node] = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "everstep.control.agent", f"/proc/self/fd/{file.fileno()}"),
                pass_fds=[file.fileno()],
                preexec_fn=_die_with_parent,
                stdin=asyncio.subprocess.DEVNULL,
            )
        self._keep(f"agent-{node}.pid", str(self.agents[node].pid))

    async def _start_vault(self, command: list[str], fds: list[int], name: str) -> asyncio.subprocess.Process:
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *command, pass_fds=fds, preexec_fn=_die_with_parent, stdin=null, stdout=null
        )
        self._keep(name, str(process.pid))
        return process

    def _keep(self, name: str, text: str) -> None:
        """For people and tools, which never see half of it: a full disk must not end the job for it."""
        try:
            (self.run_dir / f"{name}.new").write_text(text)
            (self.run_dir / f"{name}.new").replace(self.run_dir / name)
        except OSError as error:
            print(f"everstep: {self.run_dir / name}: {error.strerror}", file=sys.stderr)

    def _node_rank(self, node: str) -> int:
        """Local nodes in their order; on several hosts what --node-rank says."""
        names = [name for name, _ in self.seat.nodes]
        return self.config.nodes.node_rank if len(names) == 1 else names.index(node)

    def _log_dir(self, node: str) -> Path:
        base = (
            Path(self.config.logs.log_dir).absolute() / self.job if self.config.logs.log_dir else self.run_dir / "logs"
        )
        return base / node

    async def _mind_agent(self, node: str, address: str) -> None:
        for life in range(1, AGENT_LIVES + 1):
            status = await self.agents[node].wait()
            if self.ending.is_set() or (status >= 0 and status not in BROKEN):
                break
            await self._tell(wire.NodeDied(node, self.incarnations[node], status))
            await asyncio.to_thread(sweep.purge, self.job, node, ())
            if self.stops:
                break
            if life == AGENT_LIVES:
                print(f"everstep: the agent of {node} dies again and again; giving up", file=sys.stderr)
                self.broken_nodes.add(node)
                break
            print(f"everstep: the agent of {node} died ({_words(status)}); starting it again", file=sys.stderr)
            await self._start_agent(node, address, again=True)
        names = {name for name, _ in self.seat.nodes}
        if self.broken_nodes == names and self.config.nodes.max <= len(names):  # nobody else can go on
            self.exit_code = int(ExitCode.INTERNAL)
            self.ending.set()
        elif self.listener is None:
            self.exit_code = self.agents[node].returncode or 0
            self.ending.set()

    async def _tell(self, message: wire.Message) -> None:
        """Say something to the controller; it may be down just now, then its own means must do."""
        hello = wire.Hello(role="launcher", node="", incarnation="", job=self.job)
        try:
            link = await connect(self.host, self.port, read_token(self.token_file), hello, tls=self.tls)
        except Unreachable as error:
            print(f"everstep: {error}", file=sys.stderr)
            return
        link.send(message)
        await link.drained()
        link.close()

    # The end --------------------------------------------------------------------------------------------

    def _signalled(self, signum: signal.Signals) -> None:
        """First signal: stop with grace. The second one means now."""
        self.stops += 1
        grace = self.config.restart.grace_s if self.stops == 1 else 0.0
        said = f"stopping, at most {grace:.0f} s" if self.stops == 1 else "stopping at once"
        print(f"everstep: {signum.name}: {said}", file=sys.stderr)
        self._mind(self._tell(wire.StopRequest(f"{signum.name} to the launcher", int(signum), grace)))
        self._mind(self._insist(signum, grace))

    async def _insist(self, signum: signal.Signals, grace_s: float) -> None:
        """A controller that cannot stop the job (no room for its journal, say) does not keep it alive for ever."""
        await asyncio.sleep(
            2 * (grace_s + self.config.control.stop_margin_s)
        )  # to end the job; to see the agents leave
        print(
            f"everstep: the controller did not stop the job after {signum.name}; ending it here",
            file=sys.stderr,
        )
        self.exit_code = 128 + signum
        self.ending.set()

    async def _close(self) -> None:
        """The controller is gone; its agents were told to leave. Whoever stays is not needed any more."""
        shown = asyncio.create_task(self.showing.close()) if self.showing else None
        waiting = [asyncio.ensure_future(p.wait()) for p in self.agents.values() if p.returncode is None]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=self.config.control.stop_margin_s)
            for process in self.agents.values() if late else ():
                if process.returncode is None:
                    process.kill()
        for task in list(self.minders):
            task.cancel()
        if self.controller is not None and self.controller.returncode is None:  # it could not end the job
            self.controller.kill()
            await self.controller.wait()
        for node in self.agents:
            await asyncio.to_thread(sweep.purge, self.job, node, ())
        if not await self.vaults.close(FINISH_S if self.stops < 2 else 0.0) and self.exit_code == ExitCode.OK:
            self.exit_code = int(ExitCode.FAILED)  # the vault said what is not on disk
        if shown:
            await shown
        self._reap_strays()

    def _reap_strays(self) -> None:
        """Orphans of a dead agent, or of a worker without a zygote, came to us: nobody else can reap them."""
        page = self.showing.process if self.showing else None
        processes = (self.controller, page, *self.agents.values(), *self.vaults.processes)
        ours = {process.pid for process in processes if process is not None}
        while (found := _next_dead()) and found not in ours:  # ours are left to those who wait for them
            os.waitpid(found, 0)


def _next_dead() -> int:
    """A child that has ended and is not reaped yet; 0: there is none."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0
    return found.si_pid if found else 0


def _point_to(run_dir: Path) -> None:
    """`latest` names the newest run."""
    latest = run_dir.parent / "latest"
    temporary = latest.with_name(f".latest-{run_dir.name}")
    temporary.symlink_to(run_dir.name)
    try:
        temporary.replace(latest)
    except IsADirectoryError:
        temporary.unlink()
        print(f"everstep: note: {latest} is a folder and not a link to the newest run; it stays", file=sys.stderr)


def _words(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _set_subreaper() -> None:
    """Orphans of a dead agent become our children, and are found by the sweep."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
