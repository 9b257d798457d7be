"""Carries out what `state.reconcile` decides: owns the memory, runs the tasks in threads of low priority.

All methods may be called from any thread. One lock guards the machine; nothing slow happens under it.
"""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from everstep.state import memory, reconcile, slots
from everstep.state.available import available_bytes
from everstep.state.image import Damaged, Index
from everstep.state.memory import Region
from everstep.state.slots import News, Shard, Work
from everstep.state.talk import Kept, Persist

# Of the threads for tasks. At 19 a thread that holds the interpreter's lock may not run for long: all wait for it.
NICE = 10
MAX_WHY = 500  # characters


class Written(Protocol):
    """`complete`: all shards of the step are on disk. `wrote`: by us."""

    @property
    def complete(self) -> bool: ...
    @property
    def wrote(self) -> bool: ...


class Persister(Protocol):
    """Writes images to one place on disk. Called in a thread; one write of a shard at a time."""

    def write(self, index: Index, data: memoryview, complete: Callable[[], None]) -> Written:
        """Raises OSError, ValueError, Damaged. `index` may have sums. `complete` is called when the step is; older ones
        may be pruned after that."""


class Sender(Protocol):
    def __call__(self, endpoint: str, index: Index, view: memoryview, cancelled: threading.Event) -> None:
        """Copy an image to a peer. Raises Cancelled, Damaged (says the peer), OSError, TalkError."""


class Cancelled(Exception):
    """A task stopped because it is not worth it any more."""


class NoRoom(Exception):
    """No memory for an image. In bytes: what it needs, what is free, what the vault may use, what is busy."""

    def __init__(self, needed_bytes: int, free_bytes: int, budget_bytes: int, busy_bytes: int) -> None:
        super().__init__(
            f"an image of {needed_bytes / 1e6:,.1f} MB does not fit: {free_bytes / 1e6:,.1f} MB are free, of "
            f"{budget_bytes / 1e6:,.1f} MB which the vault may use (--vault-memory) {busy_bytes / 1e6:,.1f} MB are busy"
        )
        self.needed_bytes, self.free_bytes = needed_bytes, free_bytes
        self.budget_bytes, self.busy_bytes = budget_bytes, busy_bytes


class NotKept(Exception):
    """There is no such image here."""


class Keeper:
    """The images of one node. `persister`: "module:name" of what makes a Persister of (where, **settings)."""

    def __init__(
        self,
        budget_bytes: int,
        send: Sender,
        tell: Callable[[News], None],
        unmap: Callable[[int], None],
        persister: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._send, self._tell, self._unmap, self._persister = send, tell, unmap, persister
        self._clock = clock
        self._changed = threading.Condition()  # its lock guards all below
        self._slots = slots.Slots(budget_bytes)
        self._regions: dict[int, Region] = {}
        self._indexes: dict[int, Index] = {}
        self._persist: dict[int, Persist] = {}
        self._summing: dict[int, threading.Lock] = {}
        self._cancels: dict[int, threading.Event] = {}
        self._persisters: dict[str, Persister] = {}
        self._making = threading.Lock()
        self._numbers = itertools.count(1)
        self._ended = False
        workers = sum(slots.WORKERS.values())
        self._threads = ThreadPoolExecutor(workers, "task", initializer=_yield_to_training)
        threading.Thread(target=self._keep_time, name="time", daemon=True).start()

    def name(self) -> int:
        """A number for a connection, or for who reads or writes otherwise."""
        return next(self._numbers)

    # Writing --------------------------------------------------------------------------------------------

    def ask(self, writer: int, num_bytes: int) -> tuple[int, int, Region]:
        """Memory for an image: number of the image, of the memory. Raises NoRoom, OSError."""
        available = available_bytes()
        with self._changed:
            commands = self._feed(slots.Asked(writer, 0, num_bytes, available))
            for command in commands:
                if isinstance(command, slots.Refuse):
                    raise NoRoom(*command[2:])
            give = next(command for command in commands if isinstance(command, slots.Give))
            region = self._regions.get(give.memory)
        if region is None:  # the pages take a while, so not under the lock
            try:
                region = Region(num_bytes)
            except OSError:
                self.close(writer, give.image)
                raise
            with self._changed:
                self._regions[give.memory] = region
        return give.image, give.memory, region

    def seal(self, image: int, index: Index, peers: Sequence[str] = (), persist: Persist | None = None) -> None:
        """The image is whole. Raises ValueError for one that is not as was asked."""
        with self._changed:
            pending = self._slots.images.get(image)
            if pending is None or pending.shard is not None or index.num_bytes > pending.num_bytes:
                raise ValueError(f"image {image} is not being written, or has more bytes than were asked for")
            self._indexes[image] = index
            self._summing[image] = threading.Lock()
            if persist is not None:
                self._persist[image] = persist
            shard = Shard(index.shard, index.num_shards)
            where = persist.where if persist else ""
            self._feed(slots.Sealed(image, shard, index.step, index.epoch, tuple(peers), where))

    def give_up(self, image: int) -> None:
        with self._changed:
            if self._is_pending(image):
                self._feed(slots.GivenUp(image))

    def close(self, connection: int, image: int = 0) -> None:
        """The connection is gone, with what it wrote and read; `image`: only that one, which it could not get."""
        with self._changed:
            if image and self._is_pending(image):
                number = self._slots.images[image].memory
                self._feed(slots.GivenUp(image))
                self._feed(slots.Lost(number))
            elif not image:
                self._feed(slots.Closed(connection))

    def _is_pending(self, image: int) -> bool:
        return image in self._slots.images and self._slots.images[image].shard is None

    # Reading --------------------------------------------------------------------------------------------

    def kept(self) -> tuple[Kept, ...]:
        with self._changed:
            return tuple(
                Kept(i.step, i.shard.number, i.shard.of, slots.state_of(self._slots, i), i.epoch, i.num_bytes)
                for i in sorted(self._slots.images.values(), key=lambda image: image.age)
                if i.shard is not None and i.usable
            )

    def begin(self, reader: int, shard: Shard, step: int) -> tuple[int, Region]:
        """Read that image until `end`. Raises NotKept."""
        with self._changed:
            image = slots.find(self._slots, shard, step)
            if image is None:
                steps = sorted(kept.step for kept in slots.kept(self._slots, shard))
                raise NotKept(f"no image of step {step}, shard {shard.number} of {shard.of}; steps kept: {steps}")
            self._feed(slots.ReadBegan(reader, image.number))
            return image.number, self._regions[image.memory]

    def end(self, reader: int, image: int) -> None:
        with self._changed:
            if image in self._slots.images and reader in self._slots.images[image].readers:
                self._feed(slots.ReadEnded(reader, image))

    @contextmanager
    def reading(self, shard: Shard, step: int) -> Iterator[tuple[int, Index, memoryview]]:
        reader = self.name()
        image, region = self.begin(reader, shard, step)
        try:
            yield image, self.summed(image), region.view
        finally:
            self.end(reader, image)

    def newest(self, shard: Shard) -> int | None:
        """The step of the newest image of that shard whose sums are known."""
        with self._changed:
            found = [i for i in slots.kept(self._slots, shard) if self._indexes[i.number].sums]
            return max(found, key=lambda image: image.age).step if found else None

    def index(self, shard: Shard, step: int) -> Index | None:
        with self._changed:
            image = slots.find(self._slots, shard, step)
            return None if image is None else self._indexes[image.number]

    # Integrity ------------------------------------------------------------------------------------------

    def summed(self, image: int, cancelled: threading.Event | None = None) -> Index:
        """Its index, with the sums, computed once. Raises Cancelled, also when the image goes meanwhile: one that
        nobody holds."""
        with self._changed:
            summing = self._summing.get(image)
        if summing is None:
            raise Cancelled
        with summing:
            index, view = self._data(image)
            if not index.sums:
                index = memory.with_sums(index, _until(cancelled, memory.sums_of(index, view)))
                with self._changed:
                    self._data(image)  # still: else they are sums of another's bytes
                    self._indexes[image] = index
        return index

    def _data(self, image: int) -> tuple[Index, memoryview]:
        with self._changed:
            if image not in self._indexes:
                raise Cancelled
            return self._indexes[image], self._regions[self._slots.images[image].memory].view

    def verify(self, shard: Shard, step: int) -> tuple[int, ...]:
        """The sums of an image, computed again. Raises Damaged: it is not used any more; NotKept."""
        with self.reading(shard, step) as (image, index, view):
            for chunk, found in enumerate(memory.sums_of(index, view)):
                if found != index.sums[chunk]:
                    why = f"chunk {chunk} of step {step}, shard {shard.number}, changed in the vault's memory"
                    self.spoil(image, why)
                    raise Damaged(why)
            return index.sums

    def spoil(self, image: int, why: str) -> None:
        with self._changed:
            self._feed(slots.Spoiled(image, why))

    # The machine ----------------------------------------------------------------------------------------

    def _feed(self, event: slots.Event) -> list[slots.Command]:
        self._slots, commands = reconcile.step(self._slots, event, self._clock())
        for command in commands:
            self._carry_out(command)
        self._changed.notify_all()
        return commands

    def _carry_out(self, command: slots.Command) -> None:
        match command:
            case slots.Run(task) if not self._ended:
                self._cancels[task.number] = threading.Event()
                self._threads.submit(self._run, task)
            case slots.Cancel(task):
                self._cancels[task].set()
            case slots.Discard(number):
                region = self._regions.pop(number, None)
                if region is not None:
                    region.close()
                    self._unmap(number)
            case slots.Forget(image):
                del self._indexes[image], self._summing[image]
                self._persist.pop(image, None)
            case News():
                self._tell(command)

    def _run(self, task: slots.Task) -> None:
        try:
            complete = self._work(task, self._cancels[task.number])
        except Cancelled:
            self._finish(slots.Failed(task.number, ""))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is said and tried again
            self._finish(slots.Failed(task.number, f"{type(error).__name__}: {error}"[:MAX_WHY]))
        else:
            self._finish(slots.Done(task.number, complete))

    def _work(self, task: slots.Task, cancelled: threading.Event) -> bool:
        """Whether the step is complete on disk now."""
        if task.work is Work.WRITE:
            return self._write(task)
        index = self.summed(task.image, cancelled)
        if task.work is Work.SEND:
            try:
                self._send(task.target, index, self._data(task.image)[1][: index.num_bytes], cancelled)
            except Damaged:  # is it ours that is damaged, or what arrived?
                self.verify(Shard(index.shard, index.num_shards), index.step)
                raise
        return False

    def _write(self, task: slots.Task) -> bool:
        """It does not wait for sums that are not known yet: writing makes its own."""
        index, view = self._data(task.image)
        shard = Shard(index.shard, index.num_shards)
        complete = News(slots.COMPLETE, shard, index.step, target=task.target, complete=True)
        persister = self._persister_of(self._persist[task.image])
        try:
            written = persister.write(index, view[: index.num_bytes], lambda: self._tell(complete))
        except Damaged:
            self.verify(shard, index.step)
            raise
        if not written.wrote and not written.complete:
            raise Cancelled  # another process is writing it, and may die: look again
        return written.complete

    def _finish(self, event: slots.Done | slots.Failed) -> None:
        with self._changed:
            del self._cancels[event.task]
            self._feed(event)

    def _persister_of(self, persist: Persist) -> Persister:
        """Late: what it imports is heavy, and a vault that never writes does not need it."""
        key = f"{persist.where} {sorted(persist.settings.items())}"
        with self._making:
            if key not in self._persisters:
                module, _, name = self._persister.partition(":")
                make: Callable[..., Any] = getattr(importlib.import_module(module), name)
                self._persisters[key] = make(persist.where, **persist.settings)
            return self._persisters[key]

    # Time and end ---------------------------------------------------------------------------------------

    def _keep_time(self) -> None:
        with self._changed:
            while not self._ended:
                now = self._clock()
                wake = slots.wake_s(self._slots, now)
                self._changed.wait(None if wake is None else wake - now)
                if wake is not None and self._clock() >= wake:
                    self._feed(slots.Tick())

    def unwritten(self, timeout_s: float) -> int:
        """How many images are not on disk as they should be, once none is being written or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: not self._to_write(failed=False), timeout_s)
            self._ended = True
            self._changed.notify_all()
            return self._to_write(failed=True)

    def _to_write(self, failed: bool) -> int:
        """`failed`: also those that have failed and wait for another try."""
        tasks = [task for task in self._slots.tasks.values() if task.work is Work.WRITE]
        return sum(failed or task.running or not task.attempts for task in tasks)


def _yield_to_training() -> None:
    os.nice(NICE)  # of this thread alone, on Linux


def _until(cancelled: threading.Event | None, sums: Iterator[int]) -> Iterator[int]:
    for found in sums:
        yield found
        if cancelled is not None and cancelled.is_set():
            raise Cancelled
