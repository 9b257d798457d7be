"""The vault's machine: which memory is used again, what stays, what is sent and written; random lives of a vault."""

from __future__ import annotations

import collections
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.state import slots as s
from everstep.state.reconcile import STALE_STEPS, STARTS_PER_S, step
from everstep.state.slots import Shard, Slots, State, Work

MB = 1 << 20
ONE = Shard(0, 1)
DEEDS = ("ask", "ask", "seal", "seal", "drop", "die", "read", "unread", "done", "done", "fail", "spoil", "wait")


class Life:
    """A vault's machine, and what the world would see of it. Everything that must hold is checked after each event."""

    def __init__(self, budget_mb: int = 1000) -> None:
        self.slots, self.now = Slots(budget_mb * MB), 100.0
        self.writing: dict[int, int] = {}  # image -> writer
        self.reading: collections.Counter[tuple[int, int]] = collections.Counter()  # (reader, image)
        self.running: dict[int, s.Task] = {}
        self.news: list[s.News] = []
        self.refused: s.Refuse | None = None
        self.ever: dict[Shard, int] = {}  # newest step sealed
        self.starts: list[float] = []

    def feed(self, event: s.Event) -> list[s.Command]:
        before = self.slots
        self.slots, commands = step(before, event, self.now)
        self.refused = None
        for command in commands:
            self._carry_out(before, command)
        assert self.slots.used_bytes <= self.slots.budget_bytes
        for task in self.running.values():
            assert task.image in self.slots.images
        assert max(collections.Counter(t.work for t in self.running.values()).values(), default=0) <= 2
        targets = [(t.work, t.target, self.slots.images[t.image].shard) for t in self.running.values() if t.target]
        assert len(targets) == len(set(targets)), "two steps in one place"
        return commands

    def _carry_out(self, before: Slots, command: s.Command) -> None:
        match command:
            case s.Give(writer, _, image, memory):
                used = [i.number for i in self.slots.images.values() if i.memory == memory]
                assert used == [image], "one memory, two images"
                self.writing[image] = writer
            case s.Forget(image):
                self._may_go(before, image)
            case s.Refuse():
                assert command.needed_bytes > command.free_bytes
                self.refused = command
            case s.Run(task):
                self.running[task.number] = task
                self.starts = [t for t in self.starts if t > self.now - 1] + [self.now]
                assert len(self.starts) <= STARTS_PER_S
            case s.Cancel(number) if number not in self.slots.tasks:
                self.running.pop(number, None)  # sums of bytes that are gone: nobody waits for them
            case s.News():
                self.news.append(command)

    def _may_go(self, before: Slots, number: int) -> None:
        """Nobody uses an image that goes; its shard keeps one, unless that is not saved here any more."""
        image = before.images[number]
        assert image.shard is not None
        assert not any(self.reading[reader, number] for reader, i in self.reading if i == number)
        assert not any(t.image == number and t.work is not Work.SUM for t in self.running.values())
        newer = [i for i in before.images.values() if i.usable and i.epoch >= image.epoch and i.step > image.step]
        recut = any(i.shard and i.shard.of != image.shard.of for i in newer)
        others = [i for i in s.kept(before, image.shard) if i.age > image.age]
        assert image.broken or others or recut or len({i.step for i in newer}) >= STALE_STEPS

    def ask(self, writer: int = 1, mb: int = 100, available_mb: int = 10_000) -> int:
        """The image; 0 when it is refused."""
        self.feed(s.Asked(writer, 7, mb * MB, available_mb * MB))
        return 0 if self.refused else max(self.writing)

    def seal(self, image: int, number: int, shard: Shard = ONE, epoch: int = 1, **owed: Any) -> None:
        del self.writing[image]
        self.feed(s.Sealed(image, shard, number, epoch, **owed))

    def save(self, number: int, shard: Shard = ONE, **owed: Any) -> int:
        self.now += 1.0
        image = self.ask()
        self.seal(image, number, shard, **owed)
        return image

    def done(self, work: Work) -> s.Task:
        task = next(task for task in self.running.values() if task.work is work)
        self.feed(s.Done(self.running.pop(task.number).number))
        return task

    def failed(self, work: Work, why: str = "it broke") -> s.Task:
        task = next(task for task in self.running.values() if task.work is work)
        self.feed(s.Failed(self.running.pop(task.number).number, why))
        return task

    def states(self) -> dict[int, State]:
        return {i.step: s.state_of(self.slots, i) for i in self.slots.images.values() if i.shard is not None}

    def said(self, what: str) -> list[int]:
        return [news.step for news in self.news if news.what == what]


def test_two_memories_serve_any_number_of_saves() -> None:
    life = Life()
    for number in range(1, 50):
        life.save(number)
        if number % 3:
            life.done(Work.SUM)
    assert len(life.slots.memories) == 2
    assert life.states() == {48: State.OBSOLETE, 49: State.CACHED}


def test_states_follow_what_is_done_for_an_image() -> None:
    life = Life()
    life.save(1, peers=("a", "b"), where="disk")
    life.done(Work.SUM)
    life.done(Work.SEND)
    assert life.states() == {1: State.CACHED}
    life.done(Work.SEND)
    assert life.states() == {1: State.BACKED_UP}
    life.done(Work.WRITE)
    assert life.states() == {1: State.PERSISTENT}
    assert [news.what for news in life.news] == ["cached", "backed up", "persistent"]


def test_the_disk_has_a_queue_of_one_and_says_who_is_skipped() -> None:
    life = Life()
    for number in (1, 2, 3):
        life.save(number, where="disk")
    assert [task.image for task in life.running.values() if task.work is Work.WRITE] == [1 + 1]
    assert life.said("skipped") == [2]
    life.done(Work.WRITE)
    life.done(Work.WRITE)
    assert life.said("persistent") == [1, 3]


def test_a_peer_gets_the_newest_and_a_failed_copy_is_tried_again_more_and_more_slowly() -> None:
    life = Life()
    life.save(1, peers=("a",))
    for after_s in (1, 2, 4, 8, 10, 10):
        life.failed(Work.SEND)
        assert s.wake_s(life.slots, life.now) == life.now + after_s
        life.now += after_s
        life.feed(s.Tick())
    life.save(2, peers=("a",))
    assert len(life.said("the copy at a peer failed")) == 6
    life.failed(Work.SEND)
    life.done(Work.SEND)
    assert life.said("backed up") == [2]
    assert not [task for task in life.slots.tasks.values() if task.work is Work.SEND]


def test_a_writer_that_dies_leaves_the_sealed_image_and_none_of_its_memory_is_used_again() -> None:
    life = Life()
    life.save(1)
    image = life.ask()
    memory = life.slots.images[image].memory
    commands = life.feed(s.Closed(1))
    assert s.Discard(memory) in commands
    assert life.states() == {1: State.CACHED}
    assert memory not in life.slots.memories


def test_what_is_read_stays_and_the_refusal_says_the_numbers() -> None:
    life = Life(budget_mb=250)
    first = life.save(1)
    life.feed(s.ReadBegan(9, first))
    life.reading[9, first] += 1
    life.save(2)
    assert life.ask() == 0
    assert life.refused is not None
    assert [n // MB for n in life.refused[2:]] == [100, 50, 250, 200]
    life.reading.clear()
    life.feed(s.Closed(9))
    assert life.ask()
    assert life.states() == {2: State.CACHED}


def test_what_the_machine_cannot_give_is_refused_though_the_budget_would_allow_it() -> None:
    life = Life()
    life.save(1)
    assert life.ask(available_mb=99) == 0
    assert life.refused is not None
    assert life.refused.free_bytes == 99 * MB


def test_a_rollback_makes_the_images_of_the_lost_steps_useless() -> None:
    life = Life()
    life.save(10)
    life.seal(life.ask(), 20)
    life.seal(life.ask(), 12, epoch=2)
    assert life.states()[12] is State.CACHED
    assert 20 not in {i.step for i in s.kept(life.slots, ONE)}


def test_an_image_that_is_sealed_late_takes_nothing_from_the_newer_one() -> None:
    life = Life()
    life.save(1, where="disk")
    late = life.ask()
    life.save(3, where="disk")
    life.seal(late, 2, where="disk")
    assert life.states() == {1: State.OBSOLETE, 2: State.OBSOLETE, 3: State.CACHED}
    life.done(Work.WRITE)
    life.done(Work.WRITE)
    assert (life.said("persistent"), life.said("skipped")) == ([1, 3], [2])


def test_a_damaged_image_is_not_found_and_owes_nothing() -> None:
    life = Life()
    image = life.save(1, where="disk", peers=("a",))
    life.feed(s.Spoiled(image, "chunk 3 changed"))
    assert s.find(life.slots, ONE, 1) is None
    for work in (Work.WRITE, Work.SEND):
        life.failed(work, "")
    assert life.said("broken") == [1]


def test_a_new_layout_takes_the_memory_of_the_old_one_when_it_needs_it() -> None:
    life = Life(budget_mb=300)
    for shard in range(2):
        life.save(1, Shard(shard, 2))
    for number in (2, 3, 4, 5):
        life.save(number)
    assert life.states()[5] is State.CACHED
    assert len(life.slots.memories) == 3


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_lives(data: st.DataObject) -> None:
    life = Life(budget_mb=data.draw(st.integers(50, 1200), "budget"))
    number = 0
    for _ in range(data.draw(st.integers(1, 60), "length")):
        usable = [i.number for i in life.slots.images.values() if i.usable]
        do = data.draw(
            st.sampled_from(["ask", "seal", "drop", "die", "read", "unread", "done", "fail", "spoil", "wait"])
        )
        pick = data.draw(st.integers(0, 1000))
        if do == "ask":
            life.ask(1 + pick % 3, 20 + pick % 150, available_mb=pick % 7 * 100)
        elif do == "seal" and life.writing:
            number += pick % 2
            owed = {"peers": ("a", "b")[: pick % 3], "where": ("", "disk")[pick % 2]}
            life.seal(sorted(life.writing)[pick % len(life.writing)], number, Shard(pick % 2, 2 + pick % 2), **owed)
        elif do == "drop" and life.writing:
            image = sorted(life.writing)[pick % len(life.writing)]
            del life.writing[image]
            life.feed(s.GivenUp(image))
        elif do == "die":
            life.writing = {image: writer for image, writer in life.writing.items() if writer != 1 + pick % 3}
            for reader, image in list(life.reading):
                life.reading.pop((reader, image)) if reader == 1 + pick % 3 else None
            life.feed(s.Closed(1 + pick % 3))
        elif do == "read" and usable:
            image = usable[pick % len(usable)]
            life.reading[1 + pick % 3, image] += 1
            life.feed(s.ReadBegan(1 + pick % 3, image))
        elif do == "unread" and +life.reading:
            reader, image = sorted(+life.reading)[pick % len(+life.reading)]
            life.reading[reader, image] -= 1
            life.feed(s.ReadEnded(reader, image))
        elif do in ("done", "fail") and life.running:
            work = sorted(life.running.values(), key=lambda t: t.number)[pick % len(life.running)].work
            (life.done if do == "done" else life.failed)(work)
        elif do == "spoil" and usable:
            life.feed(s.Spoiled(usable[pick % len(usable)], "it changed"))
        elif do == "wait":
            life.now += pick / 100
            life.feed(s.Tick())
    life.reading.clear()
    for connection in (1, 2, 3):
        life.feed(s.Closed(connection))
    life.writing.clear()
    for _ in range(300):  # everything that is owed is done in the end
        if life.running:
            life.done(next(iter(life.running.values())).work)
        life.now += 1.0
        life.feed(s.Tick())
    assert life.slots.tasks == {}
