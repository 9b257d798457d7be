"""What a vault holds, what happens to it, and what it is to do: the words of the machine in `state.reconcile`."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

SKIPPED = "skipped"  # a newer image is to be written in its place
COMPLETE = "complete"  # all shards of the step are on disk; what was there of older ones may still be removed


class State(str, enum.Enum):
    PENDING = "pending"  # being written
    CACHED = "cached"  # sealed, in this memory
    BACKED_UP = "backed up"  # its peers have it
    PERSISTENT = "persistent"  # on disk
    OBSOLETE = "obsolete"  # a newer one of its shard is sealed; readable until its memory is needed
    BROKEN = "broken"  # not what was written, or of a time that was rolled back: never used


class Work(str, enum.Enum):
    SUM = "checksums"
    SEND = "the copy at a peer"
    WRITE = "the copy on disk"


WORKERS = {Work.SUM: 1, Work.SEND: 2, Work.WRITE: 2}


class Shard(NamedTuple):
    number: int
    of: int


class Memory(msgspec.Struct, frozen=True):
    number: int
    num_bytes: int
    writer: int  # the last one: it has it mapped


class Image(msgspec.Struct, frozen=True):
    """`writer`: the connection that wrote it. `readers`: one entry for each reader, who may come twice."""

    number: int
    memory: int
    num_bytes: int
    writer: int
    shard: Shard | None = None  # none yet: pending
    step: int = 0
    epoch: int = 0
    peers: tuple[str, ...] = ()
    backed_up: frozenset[str] = frozenset()
    where: str = ""  # to be written there
    durable: bool = False
    broken: str = ""
    readers: tuple[int, ...] = ()

    @property
    def age(self) -> tuple[int, int, int]:
        """Larger is newer. After a rollback steps are made again, in a later epoch."""
        return self.epoch, self.step, self.number

    @property
    def usable(self) -> bool:
        return self.shard is not None and not self.broken


class Task(msgspec.Struct, frozen=True):
    """`target`: the peer's endpoint, or where on disk."""

    number: int
    work: Work
    image: int
    target: str = ""
    attempts: int = 0
    due_s: float = 0.0
    running: bool = False


class Slots(msgspec.Struct, frozen=True):
    budget_bytes: int
    memories: dict[int, Memory] = {}
    images: dict[int, Image] = {}
    tasks: dict[int, Task] = {}
    last_number: int = 0  # of a memory, an image or a task
    starts: tuple[float, ...] = ()  # of tasks within the last second

    @property
    def used_bytes(self) -> int:
        return sum(memory.num_bytes for memory in self.memories.values())


# Events -------------------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A writer wants memory. `available_bytes`: what the machine could give beyond what is used now."""

    writer: int
    request: int
    num_bytes: int
    available_bytes: int


class Sealed(NamedTuple):
    """The image is whole, and its writer will not touch its memory again."""

    image: int
    shard: Shard
    step: int
    epoch: int
    peers: tuple[str, ...] = ()
    where: str = ""


class GivenUp(NamedTuple):
    """The writer will not touch the memory again, nor seal it."""

    image: int


class Closed(NamedTuple):
    """A connection is gone. Its process may still write to what it had not sealed."""

    connection: int


class Lost(NamedTuple):
    """The memory, without an image, could not be had after all."""

    memory: int


class ReadBegan(NamedTuple):
    reader: int
    image: int


class ReadEnded(NamedTuple):
    reader: int
    image: int


class Done(NamedTuple):
    """`complete`: with this, all shards of the step are on disk."""

    task: int
    complete: bool = False


class Failed(NamedTuple):
    """`why` empty: it was cancelled."""

    task: int
    why: str


class Spoiled(NamedTuple):
    """An image is not what was written."""

    image: int
    why: str


class Tick(NamedTuple):
    pass


Event = Asked | Sealed | GivenUp | Closed | Lost | ReadBegan | ReadEnded | Done | Failed | Spoiled | Tick

# Commands -----------------------------------------------------------------------------------------------


class Allocate(NamedTuple):
    memory: int
    num_bytes: int


class Discard(NamedTuple):
    memory: int


class Give(NamedTuple):
    writer: int
    request: int
    image: int
    memory: int


class Refuse(NamedTuple):
    writer: int
    request: int
    needed_bytes: int
    free_bytes: int
    budget_bytes: int
    busy_bytes: int  # which nobody may take now: being written, read, sent


class Run(NamedTuple):
    task: Task


class Cancel(NamedTuple):
    """The task is not worth its memory any more; it may stop early. Its end is reported all the same."""

    task: int


class Forget(NamedTuple):
    image: int


class News(msgspec.Struct, frozen=True, tag="news"):
    """What became of an image: `what` is a State, or what failed (`why`), or SKIPPED or COMPLETE.

    `complete`, of one that is persistent: all shards of the step are on disk.
    """

    what: str
    shard: Shard
    step: int
    why: str = ""
    target: str = ""
    complete: bool = False


Command = Allocate | Discard | Give | Refuse | Run | Cancel | Forget | News


def state_of(slots: Slots, image: Image) -> State:
    if image.shard is None:
        return State.PENDING
    if image.broken:
        return State.BROKEN
    if superseded(slots, image):
        return State.OBSOLETE
    if image.durable:
        return State.PERSISTENT
    return State.BACKED_UP if image.peers and image.backed_up.issuperset(image.peers) else State.CACHED


def superseded(slots: Slots, image: Image) -> bool:
    return any(other.age > image.age for other in kept(slots, image.shard))


def kept(slots: Slots, shard: Shard | None) -> Iterator[Image]:
    """The usable images of a shard."""
    return (image for image in slots.images.values() if image.shard == shard and image.usable)


def find(slots: Slots, shard: Shard, step: int) -> Image | None:
    """The newest usable image of that shard and step."""
    return max((i for i in kept(slots, shard) if i.step == step), key=lambda image: image.age, default=None)


def wake_s(slots: Slots, now_s: float) -> float | None:
    """When the next task is due; None: never, of itself."""
    return min((task.due_s for task in slots.tasks.values() if task.due_s > now_s and not task.running), default=None)
