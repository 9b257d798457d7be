"""The workers of one epoch on one node, from their fork to their last trace: what the agent sees and does.

Facts only: who started, failed, ended and how. What to do about it is decided by control.node.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from everstep.control import procfs, robust, sockets
from everstep.control.channel import Channel
from everstep.control.host import ProcessHandle
from everstep.control.launch import Kind, Reaped, Spawner, SpawnRequest
from everstep.control.oom import OomWatch, explain_signal
from everstep.core.formation import Formation, SessionReport
from everstep.core.logged import decode
from everstep.core.page import STACKS_SIGNAL, STOP_NOW, Page, Word
from everstep.core.types import EpochPlan, Exit, ExitCause, Phase, WorkerProgress
from everstep.core.work import StepWork

TRACEBACK_TAIL = 2000  # characters of an error message kept
LAST_WORDS_S, LAST_WORDS_TRIES = 0.002, 25  # the agent waits at most their product for a stopped worker's stacks
MOST_WORK = 32  # steps of a worker that one message tells of


def file_size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


class Worker:
    """One worker process. `request.key` is its name towards the spawner."""

    def __init__(self, local_rank: int, rank: int, request: SpawnRequest, page: Page | None) -> None:
        self.local_rank = local_rank
        self.rank = rank
        self.request = request
        self.page = page
        self.channel: Channel | None = None
        self.pid = 0
        self.gone = False
        self.failed_told = False
        self.term_told = False
        self.dead = False  # past its last instruction: the kernel released its mutex
        self.asked_to_stop = False  # by us
        self.killed = False  # by us
        self.hung = False  # killed because a detector judged it
        self.lingered_s = 0.0  # killed because its process outlived its script by this much
        self.last: procfs.ProcessSample | None = None
        self.peak_rss_bytes = 0  # as the kernel counted it; known after the end
        self.watch: robust.DeathWatch | None = None
        self.born_ns = 0
        self.speaks = False  # its script opened a session
        self.looked_bytes = 0  # of its stacks, up to what a person asked for: no incident is about these
        self.told_step = 0  # its work was told up to here

    def word(self, word: Word) -> int:
        return self.page[word] if self.page is not None else 0

    def signal(self, signum: int) -> None:
        """Signal it if it runs. A stopped process handles nothing but SIGKILL."""
        if self.gone or self.dead or not self.pid:
            return
        sample = procfs.sample(self.pid)
        if signum == signal.SIGTERM and sample is not None and sample.state == "T":
            signum = signal.SIGKILL
        self.asked_to_stop = True
        self.killed = self.killed or signum == signal.SIGKILL
        try:
            os.kill(self.pid, signum)
        except ProcessLookupError:
            return  # it ended by itself; its zygote will tell

    def silent_s(self, now_ns: int) -> float:
        """Since its last sign of life, the end of its script included."""
        signs = (Word.LIFE_NS, Word.STEP_NS, Word.PHASE_NS, Word.FINISHED_NS)
        return (now_ns - max(self.born_ns, *map(self.word, signs))) / 1e9

    def last_words(self) -> None:
        """Let a worker that is stopped write its stacks before it is killed: it has to be woken for that."""
        sample = procfs.sample(self.pid) if self.pid and not self.gone else None
        if sample is None or not sample.stopped or not self.request.stacks:
            return
        before = file_size(self.request.stacks)
        os.kill(self.pid, STACKS_SIGNAL)
        os.kill(self.pid, signal.SIGCONT)
        with ProcessHandle(self.pid) as process:
            for _ in range(LAST_WORDS_TRIES):
                if process.gone(LAST_WORDS_S) or file_size(self.request.stacks) > before:
                    return

    def error_message(self) -> str:
        """Last line of what @record or our own hook wrote about the error that escaped the script."""
        try:
            text = Path(self.request.env["TORCHELASTIC_ERROR_FILE"]).read_text(encoding="utf-8")
            message = json.loads(text)["message"]
            said = message if isinstance(message, str) else message.get("message", "")
        except (OSError, ValueError, KeyError):
            return ""
        lines = str(said).strip().splitlines()
        return lines[-1][-TRACEBACK_TAIL:] if lines else ""

    def ended(self, cause: ExitCause, at_ns: int, message: str, status: int | None = None) -> Exit:
        code = os.waitstatus_to_exitcode(status) if status is not None else None
        total = self.word(Word.TOTAL_STEP)
        return Exit(
            cause=cause,
            at_s=at_ns / 1e9,
            code=code if code is not None and code >= 0 else None,
            signal=-code if code is not None and code < 0 else None,
            message=message,
            rss_bytes=self.rss_bytes(cause is ExitCause.OOM),
            step=self.word(Word.STEPS),
            total_step=total - 1,
        )

    def rss_bytes(self, out_of_memory: bool) -> int:
        """Memory at the end: the last sample, unless it was growing, or ended before the first one."""
        last = self.last.rss_bytes if self.last else 0
        return max(last, self.peak_rss_bytes) if out_of_memory else last or self.peak_rss_bytes

    def progress(self, now_ns: int) -> WorkerProgress:
        """Signs of life right now."""
        if self.pid:
            sample = procfs.sample(self.pid)
            self.last = sample if sample is not None and sample.rss_bytes else self.last

        def age(at_ns: int) -> float:
            # A sign given while the sample was taken is later than `now_ns`.
            return max(0, now_ns - max(at_ns, self.born_ns)) / 1e9

        first, last = self.word(Word.FIRST_STEP_NS), self.last
        life = max(self.word(w) for w in (Word.LIFE_NS, Word.STEP_NS, Word.PHASE_NS))
        finished = self.gone or self.word(Word.FINISHED_NS) or self.word(Word.FAILED_NS)
        return WorkerProgress(
            rank=self.rank,
            local_rank=self.local_rank,
            step=self.word(Word.STEPS),
            total_step=self.word(Word.TOTAL_STEP) - 1,
            phase=Phase.DONE if finished else Phase(self.word(Word.PHASE)),
            phase_age_s=age(self.word(Word.PHASE_NS)),
            step_age_s=age(self.word(Word.STEP_NS)),
            life_age_s=age(life),
            first_step_age_s=age(first) if first else -1.0,
            collectives=self.word(Word.COLLECTIVES),
            batches=self.word(Word.BATCHES),
            loads=self.word(Word.LOADS),
            saves=self.word(Word.SAVES),
            saved_step=self.word(Word.SAVED_STEP) - 1,
            stopped=bool(last and last.stopped and not self.gone),
            rss_bytes=last.rss_bytes if last else 0,
            cpu_s=last.cpu_s if last else 0.0,
            work=self._new_work(),
            logged=decode(self.page.values()) if self.page is not None else None,
            kept_step=self.word(Word.KEPT_STEP) - 1,
            born_age_s=age(0),
            stepped=bool(self.word(Word.STEP_NS)),
        )

    def _new_work(self) -> tuple[StepWork, ...]:
        """Of the steps since it was asked last. Of many those whose numbers a power of two divides: nodes which report
        at other moments then tell of the same ones."""
        if self.page is None:
            return ()
        self.told_step = min(self.told_step, self.page[Word.STEPS])  # a session went back
        found = self.page.work(self.told_step)
        every = 1
        while len(found) > MOST_WORK * every:
            every *= 2
        if found:
            self.told_step = found[-1].step
        return tuple(work for work in found if work.step % every == 0)

    def forget(self) -> None:
        """Free what only the agent holds. The worker must be gone."""
        if self.watch is not None:
            self.watch.close()
            self.watch = None
        if self.page is not None:
            self.page.close()
            self.page = None
        if self.channel is not None:
            self.channel.close()
            self.channel = None


class Crew:
    """All workers of `plan` on `node`. Callbacks run in the event loop, each with the local rank and the Exit."""

    def __init__(
        self,
        plan: EpochPlan,
        requests: Iterable[tuple[int, SpawnRequest]],
        spawner: Spawner,
        oom: OomWatch,
        on_failed: Callable[[int, Exit], None],
        on_gone: Callable[[int, Exit], None],
        on_session: Callable[[int, SessionReport], None],
    ) -> None:
        self.plan = plan
        self.spawner = spawner
        self.oom = oom
        self.oom_before = oom.count()
        self.on_failed = on_failed
        self.on_gone = on_gone
        self.on_session = on_session
        self.formation: Formation | None = None
        self.stepped = False  # the first step of all was told
        self.workers: dict[int, Worker] = {}
        self.by_key: dict[int, Worker] = {}
        for local_rank, request in requests:
            self._add(local_rank, request)

    def _add(self, local_rank: int, request: SpawnRequest) -> Worker:
        name, size = f"{self.plan.epoch}-{local_rank}", request.ring_bytes
        page = None if request.kind is Kind.PROGRAM else Page.create(name, size)
        worker = Worker(local_rank, self.plan.rank(request.env["EVERSTEP_NODE"], local_rank), request, page)
        self.workers[local_rank] = self.by_key[request.key] = worker
        return worker

    def start(self, now_ns: int) -> None:
        for worker in self.workers.values():
            self._spawn(worker, now_ns)

    def respawn(self, local_rank: int, request: SpawnRequest, now_ns: int) -> None:
        """A new process in the place of one that is gone, or in an empty one."""
        former = self.workers.get(local_rank)
        if former is not None:
            assert former.gone
            former.forget()
            del self.by_key[former.request.key]
        self._spawn(self._add(local_rank, request), now_ns)

    def _spawn(self, worker: Worker, now_ns: int) -> None:
        worker.born_ns = now_ns
        if worker.page is None:  # not Python: no hooks, no session
            self.spawner.spawn(worker.request)
            return
        robust.init(worker.page)
        loop = asyncio.get_running_loop()

        def died(at_ns: int) -> None:
            loop.call_soon_threadsafe(self._died, worker, at_ns)

        worker.watch = robust.DeathWatch(worker.page, died)
        worker.channel = Channel(worker.request.worker, lambda report: self._spoke(worker, report))
        self.spawner.spawn(worker.request, worker.page.fd, worker.channel.theirs)
        worker.channel.handed_over()

    # Sessions -------------------------------------------------------------------------------------------

    def tell(self, formation: Formation) -> None:
        """Every worker with a session hears of it; one that opens its session later, then."""
        self.formation = formation
        for worker in self.workers.values():
            if worker.channel is not None and worker.speaks:
                worker.channel.tell(formation)

    def _spoke(self, worker: Worker, report: SessionReport) -> None:
        if worker.gone:
            return
        if not worker.speaks and self.formation is not None and worker.channel is not None:
            worker.channel.tell(self.formation)
        worker.speaks = True
        self.on_session(worker.local_rank, report)

    # What happens to them -------------------------------------------------------------------------------

    def _died(self, worker: Worker, at_ns: int) -> None:
        """The kernel released its mutex: it is past its last instruction. The status comes with the reaping."""
        worker.dead = True
        if worker.gone or worker.failed_told or worker.asked_to_stop or worker.word(Word.FINISHED_NS):
            return
        self._tell_failed(worker, worker.ended(ExitCause.SIGNAL, at_ns, "died; the status is not known yet"))

    def look(self) -> list[Worker]:
        """Tell who failed inside (an error escaped the script); return who got a SIGTERM from outside."""
        asked = []
        for worker in self.workers.values():
            failed_ns = worker.word(Word.FAILED_NS)
            if failed_ns and not worker.failed_told and not worker.gone:
                self._tell_failed(worker, self._error(worker, failed_ns))
            if worker.word(Word.TERM_NS) and not worker.term_told and not worker.asked_to_stop:
                worker.term_told = True
                asked.append(worker)
        return asked

    def pids(self) -> dict[int, int]:
        """By local rank, of those that run."""
        return {k: worker.pid for k, worker in self.workers.items() if worker.pid and not worker.gone}

    def just_stepped(self) -> bool:
        """True once: when every worker has made its first step."""
        if self.stepped or not all(w.word(Word.FIRST_STEP_NS) for w in self.workers.values()):
            return False
        self.stepped = True
        return True

    def lingering(self) -> list[Worker]:
        """Whose script ended well while their process is still there. Its exit handlers, its threads and its
        libraries' tear-down run now; a thread that still trains gives signs of life."""
        return [w for w in self.workers.values() if w.word(Word.FINISHED_NS) and not (w.gone or w.dead or w.killed)]

    def _tell_failed(self, worker: Worker, exit: Exit) -> None:
        worker.failed_told = True
        self.on_failed(worker.local_rank, exit)

    def _error(self, worker: Worker, at_ns: int, status: int | None = None) -> Exit:
        """An exception or a non-zero sys.exit: the page holds the status, the error file the message."""
        message = worker.error_message()
        code = worker.word(Word.EXIT_STATUS) - 1
        cause = ExitCause.ERROR if message else ExitCause.EXIT_CODE
        ended = worker.ended(cause, at_ns, message or f"exit status {code}", status)
        return msgspec.structs.replace(ended, code=code, signal=None) if code >= 0 else ended

    def reaped(self, answer: Reaped, now_ns: int) -> None:
        worker = self.by_key.get(answer.key)
        if worker is None or worker.gone:
            return
        worker.gone = True
        worker.peak_rss_bytes = answer.max_rss_bytes
        self.on_gone(worker.local_rank, self._how(worker, answer, now_ns))

    def failed_to_start(self, key: int, why: str, now_ns: int) -> None:
        worker = self.by_key.get(key)
        if worker is not None and not worker.gone:
            worker.gone = True
            self.on_gone(worker.local_rank, worker.ended(ExitCause.ERROR, now_ns, f"could not be started: {why}"))

    def _how(self, worker: Worker, answer: Reaped, now_ns: int) -> Exit:
        status = answer.status
        failed_ns = worker.word(Word.FAILED_NS)
        if os.WIFSIGNALED(status):
            return self._signalled(worker, status, failed_ns, now_ns)
        if failed_ns:
            return self._error(worker, failed_ns, status)
        code = os.waitstatus_to_exitcode(status)
        if code:
            message = worker.error_message() or f"exit status {code}"
            return worker.ended(ExitCause.EXIT_CODE, now_ns, message, status)
        if worker.page is None or worker.word(Word.FINISHED_NS):  # to its peers it was gone when its script was
            return worker.ended(ExitCause.OK, worker.word(Word.FINISHED_NS) or now_ns, "", status)
        if worker.asked_to_stop:
            return worker.ended(ExitCause.STOPPED, now_ns, "left by os._exit(0) when asked to stop", status)
        why = "left by os._exit(0) before its script ended"
        return worker.ended(ExitCause.UNFINISHED, now_ns, why, status)

    def _signalled(self, worker: Worker, status: int, failed_ns: int, now_ns: int) -> Exit:
        if failed_ns:  # the error came first; a signal of ours only shortened its end
            return self._error(worker, failed_ns, status)
        if worker.lingered_s:
            why = f"its script ended; killed because its process did not end in {worker.lingered_s:.0f} s more"
            return worker.ended(ExitCause.OK, now_ns, why, status)
        if worker.word(Word.FINISHED_NS) and worker.asked_to_stop:
            why = "its script had ended; a signal of ours only shortened its tear-down"
            return worker.ended(ExitCause.OK, worker.word(Word.FINISHED_NS), why, status)
        if worker.hung:
            return worker.ended(ExitCause.STOPPED, now_ns, "killed: judged hung", status)
        killed_now = self.oom.count()
        cause, why = explain_signal(
            os.WTERMSIG(status),
            sent_by_us=worker.killed if os.WTERMSIG(status) == signal.SIGKILL else worker.asked_to_stop,
            grace_exceeded=worker.killed,
            oom_before=self.oom_before,
            oom_after=killed_now,
            last_rss=worker.rss_bytes(killed_now > self.oom_before),
            hint=self.oom.hint(),
        )
        return worker.ended(cause, now_ns, why, status)

    # What is done to them -------------------------------------------------------------------------------

    def signal(self, local_ranks: Iterable[int], signum: int, hung: bool = False) -> None:
        for worker in (self.workers[r] for r in local_ranks):
            worker.hung = worker.hung or (hung and not worker.failed_told)
            if signum == signal.SIGTERM and worker.page is not None:
                worker.page[Word.STOP_AT_STEP] = STOP_NOW
            if hung:
                worker.last_words()
            worker.signal(signum)

    def end_lingering(self, local_rank: int) -> None:
        worker = self.workers[local_rank]
        worker.lingered_s = worker.silent_s(time.monotonic_ns())
        worker.signal(signal.SIGKILL)

    def stop_at(self, local_ranks: Iterable[int], step: int) -> None:
        """Each worker sends itself SIGTERM at this step: all leave the loop at the same one."""
        for worker in (self.workers[r] for r in local_ranks):
            worker.asked_to_stop = True
            if worker.page is not None:
                worker.page[Word.STOP_AT_STEP] = step

    def ask_save(self, number: int) -> None:
        """Sessions look before each vote. A worker that is not there yet restores what is newer than the wish."""
        for worker in self.workers.values():
            if worker.page is not None:
                worker.page[Word.SAVE_ASKED] = number

    def cut(self, local_ranks: Iterable[int], addresses: set[str], except_ports: set[int], late: bool = False) -> int:
        """Shut the TCP connections of these workers to the epoch's nodes (late: to its store alone).

        Raises sockets.CutRefused.
        """
        assert self.plan.master_port
        pids = [self.workers[r].pid for r in local_ranks if self.workers[r].pid and not self.workers[r].gone]
        return sockets.cut(pids, addresses, except_ports, self.plan.master_port if late else 0)

    def ask_stacks(self, local_ranks: Iterable[int]) -> list[Worker]:
        """Let these workers write their stacks (a stopped one wakes up for it). Returns who was asked."""
        asked = [self.workers[r] for r in local_ranks if r in self.workers and not self.workers[r].gone]
        asked = [w for w in asked if w.pid and w.word(Word.READY_NS)]
        for worker in asked:
            os.kill(worker.pid, STACKS_SIGNAL)
        return asked

    def forget(self) -> None:
        for worker in self.workers.values():
            worker.forget()
