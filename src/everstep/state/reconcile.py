"""The vault's decisions: which memory a new image gets, which images stay, what is sent and written when. Pure.

Memory is double-buffered: an image stays readable until its memory is needed, which is never before a newer one of its
shard is sealed and nobody reads, sends or writes it. What an image still owes (checksums, copies at peers, a copy on
disk) is a task; tasks are tried again, one second later at first and ten at most, until they are done or a newer image
of the shard owes the same: memory and peers want the newest, the disk has a queue of one.
"""

from __future__ import annotations

import functools
from typing import TypeVar

import msgspec

from everstep.state.slots import (
    SKIPPED,
    WORKERS,
    Allocate,
    Asked,
    Cancel,
    Closed,
    Command,
    Discard,
    Done,
    Event,
    Failed,
    Forget,
    Give,
    GivenUp,
    Image,
    Lost,
    Memory,
    News,
    ReadBegan,
    ReadEnded,
    Refuse,
    Run,
    Sealed,
    Slots,
    Spoiled,
    State,
    Task,
    Tick,
    Work,
    kept,
    superseded,
)

FIRST_RETRY_S, LAST_RETRY_S = 1.0, 10.0
STARTS_PER_S = 20  # of tasks, however many fail at once
SLACK_BYTES = 32 << 20  # or a quarter: memory larger than needed by more is not used for a smaller image
STALE_STEPS = 2  # as many newer steps kept here make an image of a shard that nobody saves here any more stale

T = TypeVar("T")


def step(slots: Slots, event: Event, now_s: float) -> tuple[Slots, list[Command]]:
    said: list[Command] = []
    slots = _handle(event, slots, said, now_s)
    return _start(slots, said, now_s), said


@functools.singledispatch
def _handle(event: object, slots: Slots, _said: list[Command], _now_s: float) -> Slots:
    assert isinstance(event, Tick), event
    return slots


@_handle.register
def _(event: Asked, slots: Slots, said: list[Command], _now_s: float) -> Slots:
    fitting = [m for m in slots.memories.values() if _fits(m, event.num_bytes) and _free(slots, m)]
    if fitting:  # one that the writer has mapped; an empty one, or else that of the oldest image
        memory = min(fitting, key=lambda m: (m.writer != event.writer, _worth(slots, m)))
        slots = _vacate(slots, memory.number, said)
        memory = msgspec.structs.replace(memory, writer=event.writer)
    else:
        slots, room = _make_room(slots, event, said)
        if not room:
            return slots
        number = slots.last_number + 1
        memory = Memory(number, event.num_bytes, event.writer)
        slots = msgspec.structs.replace(slots, last_number=number)
        said.append(Allocate(number, event.num_bytes))
    image = Image(slots.last_number + 1, memory.number, event.num_bytes, event.writer)
    said.append(Give(event.writer, event.request, image.number, memory.number))
    slots = msgspec.structs.replace(slots, last_number=image.number)
    return _put(msgspec.structs.replace(slots, memories={**slots.memories, memory.number: memory}), image)


@_handle.register
def _(event: Sealed, slots: Slots, said: list[Command], now_s: float) -> Slots:
    image = msgspec.structs.replace(
        slots.images[event.image],
        shard=event.shard,
        step=event.step,
        epoch=event.epoch,
        peers=event.peers,
        where=event.where,
    )
    slots = _put(slots, image)
    for other in kept(slots, event.shard):
        if other.epoch < image.epoch and other.step > image.step:
            why = f"step {other.step} was rolled back: step {image.step} was made again in epoch {image.epoch}"
            slots = _put(slots, msgspec.structs.replace(other, broken=why))
    owed = [(Work.SUM, ""), *((Work.SEND, peer) for peer in image.peers)]
    owed += [(Work.WRITE, image.where)] if image.where else []
    for work, target in owed:
        number = slots.last_number + 1
        task = Task(number, work, image.number, target, due_s=now_s)
        if _owed_by_newer(slots, task, image):  # it comes late
            said += [_skipped(image, "a newer one is to be written", target)] if work is Work.WRITE else []
            continue
        slots = msgspec.structs.replace(slots, tasks={**slots.tasks, number: task}, last_number=number)
    said.append(News(State.CACHED, event.shard, event.step))
    return _skip_old(slots, image, owed, said)


def _skip_old(slots: Slots, image: Image, owed: list[tuple[Work, str]], said: list[Command]) -> Slots:
    """What older images of the shard owe: not sent or written any more if the new one will be."""
    for task in list(slots.tasks.values()):
        old = slots.images[task.image]
        if old.shard != image.shard or old.age >= image.age:  # one may arrive after a newer one
            continue
        if (task.work, task.target) not in owed and not old.broken:
            continue
        if task.running:
            said += [Cancel(task.number)] if task.work is Work.SUM or old.broken else []
            continue
        slots = _without_task(slots, task)
        if task.work is Work.WRITE:
            said.append(_skipped(old, old.broken or f"step {image.step} is to be written instead", task.target))
    return slots


def _skipped(image: Image, why: str, target: str) -> News:
    assert image.shard is not None
    return News(SKIPPED, image.shard, image.step, why, target)


@_handle.register
def _(event: GivenUp, slots: Slots, _said: list[Command], _now_s: float) -> Slots:
    return _without_image(slots, event.image)


@_handle.register
def _(event: Closed, slots: Slots, said: list[Command], _now_s: float) -> Slots:
    for image in list(slots.images.values()):
        if image.shard is None and image.writer == event.connection:
            slots = _discard(_without_image(slots, image.number), image.memory, said)
        elif event.connection in image.readers:
            readers = tuple(reader for reader in image.readers if reader != event.connection)
            slots = _put(slots, msgspec.structs.replace(image, readers=readers))
    return slots


@_handle.register
def _(event: Lost, slots: Slots, said: list[Command], _now_s: float) -> Slots:
    return _discard(slots, event.memory, said)


@_handle.register
def _(event: ReadBegan, slots: Slots, _said: list[Command], _now_s: float) -> Slots:
    image = slots.images[event.image]
    assert image.usable
    return _put(slots, msgspec.structs.replace(image, readers=(*image.readers, event.reader)))


@_handle.register
def _(event: ReadEnded, slots: Slots, _said: list[Command], _now_s: float) -> Slots:
    image = slots.images[event.image]
    readers = list(image.readers)
    readers.remove(event.reader)
    return _put(slots, msgspec.structs.replace(image, readers=tuple(readers)))


@_handle.register
def _(event: Done, slots: Slots, said: list[Command], _now_s: float) -> Slots:
    task = slots.tasks.get(event.task)
    if task is None:  # sums that were given up
        return slots
    image = slots.images[task.image]
    slots = _without_task(slots, task)
    match task.work:
        case Work.SUM:
            return slots
        case Work.SEND:
            image = msgspec.structs.replace(image, backed_up=image.backed_up | {task.target})
            what = State.BACKED_UP if image.backed_up.issuperset(image.peers) else State.CACHED
        case Work.WRITE:
            image, what = msgspec.structs.replace(image, durable=True), State.PERSISTENT
    assert image.shard is not None
    if what is not State.CACHED:
        said.append(News(what, image.shard, image.step, target=task.target, complete=event.complete))
    return _put(slots, image)


@_handle.register
def _(event: Failed, slots: Slots, said: list[Command], now_s: float) -> Slots:
    task = slots.tasks.get(event.task)
    if task is None:
        return slots
    image = slots.images[task.image]
    assert image.shard is not None
    if image.broken or _owed_by_newer(slots, task, image):
        slots = _without_task(slots, task)
    else:
        after_s = min(FIRST_RETRY_S * 2 ** min(task.attempts, 10), LAST_RETRY_S)
        task = msgspec.structs.replace(task, running=False, attempts=task.attempts + 1, due_s=now_s + after_s)
        slots = msgspec.structs.replace(slots, tasks={**slots.tasks, task.number: task})
    if event.why:
        said.append(News(f"{task.work.value} failed", image.shard, image.step, event.why, task.target))
    return slots


def _owed_by_newer(slots: Slots, task: Task, image: Image) -> bool:
    for other in kept(slots, image.shard):
        if other.age > image.age:
            owed = {Work.SUM: True, Work.SEND: task.target in other.peers, Work.WRITE: task.target == other.where}
            if owed[task.work]:
                return True
    return False


@_handle.register
def _(event: Spoiled, slots: Slots, said: list[Command], _now_s: float) -> Slots:
    image = slots.images[event.image]
    assert image.shard is not None
    if not image.broken:
        said.append(News(State.BROKEN, image.shard, image.step, event.why))
    for task in [t for t in slots.tasks.values() if t.image == image.number]:
        if task.running:
            said.append(Cancel(task.number))
        else:
            slots = _without_task(slots, task)
    return _put(slots, msgspec.structs.replace(image, broken=image.broken or event.why))


# Tasks --------------------------------------------------------------------------------------------------


def _start(slots: Slots, said: list[Command], now_s: float) -> Slots:
    """Start what is due, newest images first, within the limits."""
    starts = tuple(start for start in slots.starts if start > now_s - 1.0)
    waiting = [task for task in slots.tasks.values() if not task.running and task.due_s <= now_s]
    for task in sorted(waiting, key=lambda task: (slots.images[task.image].age, -task.number), reverse=True):
        if len(starts) >= STARTS_PER_S:
            late = {t.number: msgspec.structs.replace(t, due_s=starts[0] + 1.0) for t in waiting if _idle(slots, t)}
            slots = msgspec.structs.replace(slots, tasks={**slots.tasks, **late})
            break
        if _may_start(slots, task):
            running = msgspec.structs.replace(task, running=True)
            slots = msgspec.structs.replace(slots, tasks={**slots.tasks, task.number: running})
            starts = (*starts, now_s)
            said.append(Run(running))
    return msgspec.structs.replace(slots, starts=starts)


def _idle(slots: Slots, task: Task) -> bool:
    return not slots.tasks[task.number].running


def _may_start(slots: Slots, task: Task) -> bool:
    image = slots.images[task.image]
    if image.broken:
        return False
    alike = [other for other in slots.tasks.values() if other.running and other.work is task.work]
    same = any(o.target == task.target and slots.images[o.image].shard == image.shard for o in alike)
    return len(alike) < WORKERS[task.work] and not same  # files and copies of two steps are never mixed


def _without_task(slots: Slots, task: Task) -> Slots:
    return msgspec.structs.replace(slots, tasks=_without(slots.tasks, task.number))


# Memory -------------------------------------------------------------------------------------------------


def _fits(memory: Memory, num_bytes: int) -> bool:
    return num_bytes <= memory.num_bytes <= num_bytes + max(num_bytes // 4, SLACK_BYTES)


def _image_in(slots: Slots, memory: int) -> Image | None:
    return next((image for image in slots.images.values() if image.memory == memory), None)


def _busy(slots: Slots, image: Image) -> bool:
    """In use.  Sums of what is not needed are given up, however far they are."""
    if image.shard is None or image.readers:
        return True
    return any(task.image == image.number and task.work is not Work.SUM for task in slots.tasks.values())


def _free(slots: Slots, memory: Memory) -> bool:
    image = _image_in(slots, memory.number)
    return image is None or (not _busy(slots, image) and (bool(image.broken) or superseded(slots, image)))


def _stale(slots: Slots, memory: Memory) -> bool:
    """The newest of a shard that is not saved here any more: others go on, or the state is cut differently now."""
    image = _image_in(slots, memory.number)
    if image is None or image.shard is None or _busy(slots, image):
        return False
    newer = [i for i in slots.images.values() if i.usable and i.age > image.age and i.step > image.step]
    recut = any(other.shard is not None and other.shard.of != image.shard.of for other in newer)
    return recut or len({other.step for other in newer}) >= STALE_STEPS


def _worth(slots: Slots, memory: Memory) -> tuple[int, ...]:
    image = _image_in(slots, memory.number)
    return () if image is None else (not image.broken, *image.age)


def _make_room(slots: Slots, event: Asked, said: list[Command]) -> tuple[Slots, bool]:
    """Memory that nobody needs goes, until there is room for a new one. False: refused."""
    dispensable = [m for m in slots.memories.values() if _free(slots, m) or _stale(slots, m)]
    dispensable.sort(key=lambda m: (not _free(slots, m), _worth(slots, m)))
    gone = 0
    for count in range(len(dispensable) + 1):
        free = min(slots.budget_bytes - slots.used_bytes, event.available_bytes) + gone
        if event.num_bytes <= free:
            for memory in dispensable[:count]:
                slots = _discard(_vacate(slots, memory.number, said), memory.number, said)
            return slots, True
        gone += dispensable[count].num_bytes if count < len(dispensable) else 0
    busy = slots.used_bytes - gone
    said.append(Refuse(event.writer, event.request, event.num_bytes, max(0, free), slots.budget_bytes, busy))
    return slots, False


def _vacate(slots: Slots, memory: int, said: list[Command]) -> Slots:
    image = _image_in(slots, memory)
    if image is None:
        return slots
    for task in [task for task in slots.tasks.values() if task.image == image.number]:
        said += [Cancel(task.number)] if task.running else []
        slots = _without_task(slots, task)
    said.append(Forget(image.number))
    return _without_image(slots, image.number)


def _discard(slots: Slots, memory: int, said: list[Command]) -> Slots:
    said.append(Discard(memory))
    return msgspec.structs.replace(slots, memories=_without(slots.memories, memory))


def _put(slots: Slots, image: Image) -> Slots:
    return msgspec.structs.replace(slots, images={**slots.images, image.number: image})


def _without_image(slots: Slots, image: int) -> Slots:
    return msgspec.structs.replace(slots, images=_without(slots.images, image))


def _without(table: dict[int, T], key: int) -> dict[int, T]:
    return {number: value for number, value in table.items() if number != key}
