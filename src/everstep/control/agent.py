"""The agent of one node: keeps a zygote warm, runs the node's workers, and tells the controller how they are.

Run: python -m everstep.control.agent OPTIONS.json        (`everstep run` starts it)

A loop that feeds events to control.node and carries out its commands. Losing the controller changes nothing
for the workers; losing the agent ends them (parent-death signals down the line).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from everstep.control import node as n
from everstep.control import sockets, sweep
from everstep.control.crew import Crew
from everstep.control.kernel import KernelLog
from everstep.control.launch import Answer, Forked, Reaped, Spawner, SpawnFailed, SpawnRequest, Warm
from everstep.control.load import LoadSampler
from everstep.control.looking import look_at
from everstep.control.oom import OomWatch
from everstep.control.output import Console, Tail
from everstep.control.preflight import KEY as EXAM
from everstep.control.preflight import Preflight
from everstep.control.prepare import KEYS, STORE, AgentOptions, Workplace
from everstep.control.spawner import PlainSpawner, ZygoteSpawner
from everstep.control.stacks import take_stacks
from everstep.control.tls import client_context
from everstep.control.token import read_token
from everstep.control.tracing import Tracer
from everstep.control.trackers import see_out
from everstep.control.transport import Link, backoff, connect
from everstep.control.urgency import MERGE_S
from everstep.control.voice import PATIENCE_S, speak_through
from everstep.core import wire
from everstep.core.errors import EverstepError, ExitCode, Unreachable
from everstep.core.formation import SessionReport
from everstep.core.types import Directive, EpochPlan, Exit, NodeProgress, NodeReport, StacksAsked

LOOK_S = 0.02  # an error that escaped a script is seen after at most this long
TICK_S = 0.1

LEAVE_SIGNAL = signal.SIGUSR2  # give this node up: it leaves the job at once, the others go on

PR_SET_PDEATHSIG = 1


class Agent:
    """One agent process. `run()` returns the process's exit code."""

    def __init__(self, options: AgentOptions, token: bytes, console: Console) -> None:
        self.options = options
        self.config = options.config
        self.token = token
        self.place = Workplace(options)
        self.incarnation = options.incarnation
        self.listener = self.place.open_store_socket()
        self.node = n.Node(
            NodeReport(
                node=options.node,
                incarnation=self.incarnation,
                seq=1,
                sent_s=time.monotonic(),
                slots=options.slots,
                address=options.address,
                node_rank=options.node_rank,
                store_port=self.listener.getsockname()[1],
                versions=self.place.versions(),
                examined=-1,
            ),
            fence_s=self.config.control.fence_s if options.remote else float("inf"),
            exit_s=self.config.hang.exit_s,
        )
        self.oom = OomWatch()
        self.load = LoadSampler()
        self.kernel = KernelLog(self.config.logs.kernel)
        self.spawner: Spawner = self._make_spawner()
        self.preflight = Preflight(options, self.place.zygote_env(), self._examined)
        self.tail = Tail(console)
        self.tracer = Tracer(options, self.place.trace_bytes)
        self.crew: Crew | None = None
        self.link: Link | None = None
        self.events: deque[n.NodeEvent] = deque()
        self.held: asyncio.TimerHandle | None = None  # sends the report that may wait for later changes
        self.cut_refused = False
        self.quitting = asyncio.Event()
        self.exit_code = int(ExitCode.OK)
        self.broken: BaseException | None = None  # a defect of ours, in a callback or a task that nobody awaits
        self.tasks: set[asyncio.Task[None]] = set()

    def _make_spawner(self) -> Spawner:
        worker = self.config.worker
        if not worker.zygote or worker.kind == "program":
            return PlainSpawner(self._answered, python=worker.python or sys.executable)
        return ZygoteSpawner(
            self._answered,
            on_lost=self._zygote_lost,
            preload=worker.preload,
            env=self.place.zygote_env(),
            python=worker.python or sys.executable,
        )

    # The machine ----------------------------------------------------------------------------------------

    def feed(self, event: n.NodeEvent) -> None:
        """One event through the machine. Events that its commands cause wait until all commands are carried out."""
        self.events.append(event)
        if len(self.events) > 1:
            return
        while self.events:
            self.node, commands = n.step(self.node, self.events[0], time.monotonic())
            for command in commands:
                self._carry_out(command)
            self.events.popleft()

    def _carry_out(self, command: n.Command) -> None:
        crew = self.crew
        match command:
            case n.Launch(plan):
                self._launch(plan.epoch)
            case n.Respawn(local_rank, life) if crew:
                self._respawn(crew, local_rank, life)
            case n.Tell(formation) if crew:
                crew.tell(formation)
            case n.SignalWorkers(local_ranks, signum) if crew:
                judged = signum == signal.SIGKILL and not self.node.killed
                crew.signal(local_ranks, signum, hung=judged)
            case n.CutSockets(local_ranks, late) if crew:
                self._cut(crew, local_ranks, late)
            case n.EndLingering(local_rank) if crew:
                crew.end_lingering(local_rank)
            case n.StopAtStep(local_ranks, step) if crew:
                crew.stop_at(local_ranks, step)
            case n.AskSave(number) if crew:
                crew.ask_save(number)
            case n.Examine(number):
                self.preflight.ask(number)
            case n.Sweep(epoch):
                self._sweep(epoch)
            case n.Report(report, soon):
                self._report_soon() if soon else self._report(report)
            case n.Quit():
                if self.options.remote:  # the launcher of a joined node has no other way to know
                    self.exit_code = self.node.directive.exit_code
                self.quitting.set()

    def _report_soon(self) -> None:
        if self.held is None:
            self.held = asyncio.get_running_loop().call_later(MERGE_S, self._report_held)

    def _report_held(self) -> None:
        if self.held is not None:
            self._report(self.node.report)

    def _report(self, report: NodeReport) -> None:
        if self.held is not None:
            self.held.cancel()
            self.held = None
        if self.link is not None:
            self.link.send(msgspec.structs.replace(report, sent_s=time.monotonic()))

    def _launch(self, epoch: int) -> None:
        plan = self.node.plan
        assert plan is not None
        try:
            workers = [w for w in self.node.report.workers if not w.gone]  # drained places stay empty
            requests = [(w.local_rank, self.place.request(plan, w.local_rank, w.life, self.token)) for w in workers]
        except OSError as error:
            self._give_up(f"{self.options.node} has no place for its logs: {error}")
            return
        for local_rank, request in requests:
            self._follow(plan, local_rank, request)
        if plan.members[0].node == self.options.node:
            self._start_store(epoch * KEYS + KEYS + STORE, plan.world_size)
        self.crew = Crew(plan, requests, self.spawner, self.oom, self._failed, self._gone, self._session)
        self.crew.start(time.monotonic_ns())
        self.tracer.follow(*self.crew.workers.values())
        if self.node.directive.formation is not None:
            self.crew.tell(self.node.directive.formation)

    def _respawn(self, crew: Crew, local_rank: int, life: int) -> None:
        try:
            request = self.place.request(crew.plan, local_rank, life, self.token)
        except OSError as error:
            self._give_up(f"{self.options.node} has no place for its logs: {error}")
            return
        former = crew.workers.get(local_rank)  # none: the place was drained when its node started
        for path, _ in self.place.console(former.request, local_rank) if former is not None else ():
            self.tail.finish(path)
        self._follow(crew.plan, local_rank, request)
        crew.respawn(local_rank, request, time.monotonic_ns())
        self.tracer.follow(crew.workers[local_rank])

    def _follow(self, plan: EpochPlan, local_rank: int, request: SpawnRequest) -> None:
        """What the worker writes shows on the console, as far as it is wanted there."""
        for path, fd in self.place.console(request, local_rank):
            rank = plan.rank(self.options.node, local_rank)
            self.tail.follow(path, self.place.prefix(rank, local_rank), fd)

    def _session(self, local_rank: int, report: SessionReport) -> None:
        self.feed(n.SessionSpoke(self.node.report.epoch, local_rank, report))

    def _start_store(self, key: int, world_size: int) -> None:
        """The listening socket goes to the store's process; a fresh one is opened for the next epoch."""
        self.spawner.spawn(self.place.store_request(key, world_size), self.listener.fileno())
        self.listener.close()
        self.listener = self.place.open_store_socket()
        self.feed(n.StoreOpened(self.listener.getsockname()[1]))

    def _failed(self, local_rank: int, exit: Exit) -> None:
        self._heartbeat()  # the last steps before the fault, to the millisecond
        self.feed(n.WorkerFailed(self.node.report.epoch, local_rank, exit))

    def _gone(self, local_rank: int, exit: Exit) -> None:
        self._heartbeat()  # its last steps and saves: its end may end the job
        self.tracer.over(local_rank)
        self.feed(n.WorkerGone(self.node.report.epoch, local_rank, exit))

    def _cut(self, crew: Crew, local_ranks: tuple[int, ...], late: bool) -> None:
        addresses = {m.address for m in crew.plan.members} | sockets.local_addresses()
        try:
            crew.cut(local_ranks, addresses, {self.options.port}, late)
        except sockets.CutRefused as refused:
            if not self.cut_refused:
                self.cut_refused = True
                print(f"everstep: {refused}; workers that wait for a dead one end at the grace", file=sys.stderr)

    def _sweep(self, epoch: int) -> None:
        """Nothing of the epoch may be left: its store, loader processes, whatever its workers started."""
        crew = self.crew
        if crew is not None:
            for worker in crew.workers.values():
                for path, _ in self.place.console(worker.request, worker.local_rank):
                    self.tail.finish(path)
            crew.forget()
            self.crew = None
        self._purge()
        self.feed(n.Swept(epoch))

    def _purge(self) -> None:
        traces = sweep.Traces(reapers=(self.spawner.pid,) if self.spawner.pid else ())
        purged = sweep.purge(self.options.job, self.options.node, (), traces, trackers_s=0)
        self._spawn(see_out(purged.trackers))
        if purged.remaining:
            print(f"everstep: processes {purged.remaining} cannot be killed", file=sys.stderr)

    # The spawner ----------------------------------------------------------------------------------------

    def _answered(self, answer: Answer) -> None:
        now_ns = time.monotonic_ns()
        crew = self.crew
        match answer:
            case Forked(key=key) | Reaped(key=key) | SpawnFailed(key=key) if key == EXAM:
                self.preflight.answered(answer, time.monotonic())
            case Forked(key, pid):
                worker = crew.by_key.get(key) if crew else None
                if worker is not None:
                    worker.pid = pid
                    self.feed(n.WorkerStarted(key // KEYS, worker.local_rank, pid))
            case SpawnFailed(key, why) if crew:
                crew.failed_to_start(key, why, now_ns)
            case Reaped() if crew:
                crew.reaped(answer, now_ns)
            case Warm():
                self.place.warm(answer)

    def _examined(self, number: int, unfit: str) -> None:
        self.feed(n.Examined(number, unfit))

    def _zygote_lost(self, why: str) -> None:
        """Its workers died with it. Give the node up: a fresh agent has a fresh zygote."""
        self._give_up(f"the zygote of {self.options.node} is lost: {why}")

    def _give_up(self, why: str) -> None:
        print(f"everstep: {why}", file=sys.stderr)
        self.exit_code = int(ExitCode.NODE_LOST)
        self.quitting.set()

    # The controller -------------------------------------------------------------------------------------

    async def _keep_link(self) -> None:
        hello = wire.Hello(role="agent", node=self.options.node, incarnation=self.incarnation, job=self.options.job)
        tls = client_context(self.config.control.tls_cert)
        waits = backoff()
        lost_s = time.monotonic()
        while True:
            try:
                link = await connect(self.options.host, self.options.port, self.token, hello, tls=tls)
            except Unreachable as error:
                idle = self.crew is None
                if idle and (error.refused or time.monotonic() - lost_s > self.config.control.join_timeout_s):
                    print(f"everstep: {self.options.node}: {error}", file=sys.stderr)
                    self.exit_code = int(ExitCode.UNREACHABLE)
                    self.quitting.set()
                    return
                await asyncio.sleep(next(waits))
                continue
            waits = backoff()
            self.link = link
            self.feed(n.LinkChanged(True))
            async for message in link:
                self._received(message)
            self.link, lost_s = None, time.monotonic()
            self.feed(n.LinkChanged(False))

    def _received(self, message: wire.Message) -> None:
        match message:
            case Directive():
                known = self.node.directive
                if (message.term, message.seq) == (known.term, known.seq):
                    self._report(self.node.report)  # it did not hear us: say it again
                self.feed(n.Directed(message))
            case StacksAsked() if self.crew is not None and message.epoch == self.node.report.epoch:
                self._spawn(self._answer_stacks(self.crew, message))

    async def _answer_stacks(self, crew: Crew, asked: StacksAsked) -> None:
        node = self.options.node
        try:
            work = look_at(crew, asked, node) if asked.look else take_stacks(crew, asked, node, self.kernel)
            taken = await work
        except OSError as error:  # one that is just going: evidence is not worth a node
            print(f"everstep: the stacks of {self.options.node}'s workers were not taken: {error}", file=sys.stderr)
            return
        if self.link is not None:
            self.link.send(taken)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled():
            self._break(task.exception())

    def _broke(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """What a callback of the loop raised would be a line on the console, and this agent half dead."""
        self._break(context.get("exception") or RuntimeError(context["message"]))

    def _break(self, error: BaseException | None) -> None:
        """End, with the traceback and ExitCode.INTERNAL: the launcher starts a fresh agent in our place."""
        if error is not None:
            self.broken = self.broken or error
            self.quitting.set()

    # Time -----------------------------------------------------------------------------------------------

    async def _every(self, period_s: float, act: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(period_s)
            act()

    def _look(self) -> None:
        if self.crew is not None:
            for worker in self.crew.look():
                self.feed(n.TermSeen(self.node.report.epoch, worker.local_rank))
            if self.crew.just_stepped():
                self._heartbeat()  # the first step ends an incident: it is told at once

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        if self.crew is None:
            self.preflight.tick(self.spawner, time.monotonic())
        for worker in self.crew.lingering() if self.crew is not None else ():
            self.feed(n.WorkerLingers(self.node.report.epoch, worker.local_rank, worker.silent_s(now_ns)))
        self.feed(n.Ticked())

    def _heartbeat(self) -> None:
        if self.link is None:
            return
        now_ns = time.monotonic_ns()
        workers = tuple(w.progress(now_ns) for w in self.crew.workers.values()) if self.crew else ()
        epoch, load = self.node.report.epoch, self.load.take(self.crew.pids() if self.crew else {})
        self.oom.last = load or self.oom.last
        self.link.send(NodeProgress(self.options.node, self.incarnation, epoch, time.monotonic(), workers, load))

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._broke)
        for name in self.config.restart.signals:
            signal.signal(signal.Signals[name], signal.SIG_IGN)  # sent to everybody: the launcher stops the job
        # What we start inherits this: our SIGTERM to a process that is not isolated yet waits until it is.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        loop.add_signal_handler(LEAVE_SIGNAL, lambda: self.feed(n.LeaveAsked()))
        self._purge()  # an earlier agent of this name may have left something
        try:
            self.place.check_logs()
        except OSError as error:
            self._give_up(f"{self.options.node} has no place for its logs: {error}")
            return self.exit_code
        await self.spawner.start()
        self.preflight.begin(self.spawner, time.monotonic())
        self.tail.start()
        self.load.start()
        running = [
            asyncio.create_task(work)
            for work in (
                self._keep_link(),
                self._every(LOOK_S, self._look),
                self._every(TICK_S, self._tick),
                self._every(self.config.heartbeat_s, self._heartbeat),
            )
        ]
        quitting = asyncio.create_task(self.quitting.wait())
        done, _ = await asyncio.wait([*running, quitting], return_when=asyncio.FIRST_COMPLETED)
        for task in [*running, quitting]:
            task.cancel()
        await self._close()
        for task in done - {quitting}:
            task.result()  # a defect of ours must not pass silently
        if self.broken is not None:
            raise self.broken
        return self.exit_code

    async def _close(self) -> None:
        self.load.close()
        self._report_held()
        await self.tail.close()
        await self.spawner.close()
        self.tracer.close()
        self.listener.close()
        self.kernel.close()
        if self.link is not None:
            self.link.close()
            await self.link.drained()


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # a handful for each worker
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    options = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=AgentOptions)
    if os.getppid() != options.launcher_pid:
        return int(ExitCode.NODE_LOST)  # the launcher died before we were ready

    console = Console()
    speak_through(console)

    async def run() -> int:
        return await Agent(options, read_token(Path(options.token_file)), console).run()

    try:
        return asyncio.run(run())
    except EverstepError as error:
        print(f"everstep: {error}", file=sys.stderr)
        return int(error.code)
    except Exception:  # noqa: BLE001 - told apart from the job's own codes, then the launcher starts another agent
        traceback.print_exc()
        return int(ExitCode.INTERNAL)
    finally:
        console.close(PATIENCE_S)  # the last lines of a failed worker matter most


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
