"""The controller's part in showing where workers are: whom a person means, the agents that are asked, the file in the
run folder, the line in the journal, and the answer.

Nothing of it touches the job's state: a controller that dies forgets who asked, and they ask again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from everstep.control import drain
from everstep.control.job import ENDED, Job
from everstep.control.link import Link
from everstep.core import events as e
from everstep.core import wire
from everstep.core.errors import UsageError
from everstep.core.sampled import Sampled
from everstep.core.types import StacksAsked, StacksTaken
from everstep.observe import flame

FOLDER = "looks"
MOST = 64  # workers at a time: a node's answer is one message
PENDING = 8  # wishes at a time
KEPT = 200  # files, the newest
SECONDS = (0.2, 60.0)
ANSWER_S = 6.0  # the agents have this much longer than the sampling

Send = Callable[[str, StacksAsked], None]


class Look(msgspec.Struct):
    """One wish. `waiting`: nodes that did not answer yet, with their workers' ranks."""

    number: int
    asked: wire.LookRequest
    link: Link
    waiting: dict[str, list[int]]
    titles: dict[int, str]  # rank -> who it is
    stacks: dict[int, str] = {}
    notes: dict[int, str] = {}
    sampled: dict[int, Sampled] = {}


class Looks:
    def __init__(self, run_dir: Path, send: Send, record: Callable[[e.Record], None]) -> None:
        self._run_dir, self._send, self._record = run_dir, send, record
        self._looks: dict[int, Look] = {}
        self._last = 0
        self._tasks: set[asyncio.Task[None]] = set()

    def ask(self, link: Link, message: wire.Message, job: Job) -> bool:
        """Whether it is such a wish. The answer follows when there is one."""
        if not isinstance(message, wire.LookRequest):
            return False
        try:
            self._begin(link, message, job)
        except (UsageError, OSError) as error:  # or the folder cannot be read
            link.send(wire.Reply({"refused": str(error)}))
        return True

    def saw(self, taken: StacksTaken) -> bool:
        """Whether these are for such a wish."""
        look = self._looks.get(taken.look)
        if look is not None and look.waiting.pop(taken.node, None) is not None:
            look.stacks |= taken.stacks
            look.notes |= taken.notes
            look.sampled |= taken.sampled
            if not look.waiting:
                self._finish(look.number)
        return taken.look > 0

    def _begin(self, link: Link, asked: wire.LookRequest, job: Job) -> None:
        places = whom(job, asked)
        if len(self._looks) >= PENDING:
            raise UsageError(f"{PENDING} wishes to see workers are being answered: try again in a moment")
        assert job.plan is not None
        ranks = {node: [job.plan.rank(node, k) for k in local] for node, local in places.items()}
        titles = {rank: f"rank {rank} on {node}" for node, there in ranks.items() for rank in there}
        look = Look(self._number(), asked, link, ranks, titles)
        self._looks[look.number] = look
        seconds = asked.seconds if asked.what == "profile" else 0.0
        asyncio.get_running_loop().call_later(seconds + ANSWER_S, self._finish, look.number)
        for node, local in places.items():
            wish = StacksAsked("", job.plan.epoch, local, look=look.number, seconds=seconds, threads=asked.threads)
            self._send(node, wish)

    def _number(self) -> int:
        known = (name.partition("-")[0] for name in self._names())
        self._last = max(self._last, *(int(text) for text in known if text.isdecimal()), 0) + 1
        return self._last

    def _names(self) -> list[str]:
        folder = self._run_dir / FOLDER
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def _finish(self, number: int) -> None:
        """All have answered, or nobody is waited for any more."""
        look = self._looks.pop(number, None)
        if look is None:
            return
        for node, ranks in look.waiting.items():
            away = f"{node} did not answer: it is away, or its workers change just now"
            look.notes |= dict.fromkeys(ranks, away)
        task = asyncio.create_task(self._reply(look))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _reply(self, look: Look) -> None:
        made = await asyncio.to_thread(self._made, look)  # a large picture takes a while, and a slow disk
        if "file" in made:
            ranks = tuple(sorted(look.titles))
            self._record(e.LookTaken(look.number, made["what"], ranks, made["file"], made["summary"]))
        look.link.send(wire.Reply(made))

    def _made(self, look: Look) -> dict[str, Any]:
        """The answer. In a thread of its own."""
        if not look.sampled and not any(look.stacks.values()):
            notes = sorted(look.notes.items())
            return {"nothing": "; ".join(f"{look.titles[rank]}: {note}" for rank, note in notes)}
        try:
            return self._write(look)
        except OSError as error:
            return {"nothing": f"it cannot be written: {error}"}

    def _write(self, look: Look) -> dict[str, Any]:
        """The answer. Raises OSError."""
        folder = self._run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        for rank, sampled in look.sampled.items():  # of one worker
            name = f"{look.number:06}-profile-rank{rank}"
            title = look.titles[rank]
            (folder / f"{name}.json").write_bytes(msgspec.json.encode(sampled))
            (folder / f"{name}.html").write_text(flame.document(sampled, title), encoding="utf-8")
            what, file = "profile", f"{name}.html"
            summary = f"{title}, {sampled.seconds:.1f} s: {flame.summary(sampled)}"
        if not look.sampled:
            what, file = "stacks", f"{look.number:06}-stacks.txt"
            summary = f"stacks of {len(look.stacks)} of {len(look.titles)} workers"
            (folder / file).write_text(text(look.titles, look.stacks, look.notes), "utf-8", "replace")
        names = self._names()
        for old in names[:-KEPT]:
            (folder / old).unlink(missing_ok=True)
        notes = {str(rank): f"{look.titles[rank]}: {note}" for rank, note in look.notes.items()}
        return {"what": what, "file": f"{FOLDER}/{file}", "summary": summary, "notes": notes}


def whom(job: Job, asked: wire.LookRequest) -> dict[str, tuple[int, ...]]:
    """Local ranks by node. Raises UsageError, which says what there is."""
    plan = job.plan
    here = tuple(member.node for member in plan.members if member.node in job.nodes) if plan else ()
    if plan is None or not here or job.stage in ENDED:
        raise UsageError("no workers run just now")
    if asked.what == "profile" and not SECONDS[0] <= asked.seconds <= SECONDS[1]:
        raise UsageError(f"{asked.seconds:g} s: expected {SECONDS[0]:g} to {SECONDS[1]:g}")
    found: dict[str, set[int]] = {}
    for wanted in asked.workers or here:
        target = drain.find(job, wanted)
        node, _, number = (target, "", "") if target in job.nodes else target.rpartition("/")
        member = plan.member(node)
        slots = range(member.slots) if member else range(0)
        chosen = set(slots) if not number else {int(number)} & set(slots)
        if not chosen:
            raise UsageError(f"no worker of this job runs at {target}")
        found.setdefault(node, set()).update(chosen)
    count = sum(map(len, found.values()))
    if asked.what == "profile" and count != 1:
        raise UsageError(f"a profile is of one worker, and these are {count}: name one, by its rank or node/local_rank")
    if count > MOST:
        raise UsageError(f"{count} workers: at most {MOST} can be shown at a time; name some")
    return {node: tuple(sorted(local)) for node, local in found.items()}


def text(titles: Mapping[int, str], stacks: Mapping[int, str], notes: Mapping[int, str]) -> str:
    """One file for people."""
    parts = []
    for rank, title in sorted(titles.items()):
        note = notes.get(rank, "")
        parts.append(f"== {title}" + (f" ({note})" if note else "") + f"\n{stacks.get(rank, '')}")
    return "\n".join(parts)
