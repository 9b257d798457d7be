"""The parts of the process group, several members in one process."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from everstep.comms import rendezvous
from everstep.comms.board import left_word
from everstep.comms.fabric import Fabric
from everstep.comms.group import Group
from everstep.comms.rendezvous import Life, Place, born
from everstep.comms.watch import Watch
from everstep.comms.work import Lane, Work
from everstep.comms.world import DEFAULT_INDEX, World
from everstep.core.errors import EpochBroken

if TYPE_CHECKING:
    from tests.comms.conftest import Crew

LIFE = Life(os.getpid(), born(os.getpid()), 0)


def work(body: Any = lambda: None, name: str = "test") -> Work:
    return Work(name, body, [torch.ones(1)], 10.0)


def group_of(fabric: Fabric) -> Group:
    table = fabric.table
    request: Any = SimpleNamespace(
        store=None, group_rank=table.role, group_size=table.size, group_id="0", timeout=timedelta(seconds=10)
    )
    return Group(World(fabric), None, request, owner=True)


# Works ----------------------------------------------------------------------------------------------------------


def test_lane_keeps_the_order_whoever_does_the_work() -> None:
    lane, done, go = Lane("test"), [], threading.Event()
    lane.post(work(lambda: (go.wait(5), done.append(0))))
    for i in range(1, 20):
        lane.post(work(lambda i=i: done.append(i)))
    threading.Timer(0.05, go.set).start()
    lane.call(work(lambda: done.append(threading.current_thread())))
    assert done == [*range(20), threading.current_thread()]
    lane.close("over")


def test_closed_lane_begins_nothing() -> None:
    lane, go = Lane("test"), threading.Event()
    first, second = work(lambda: go.wait(5)), work()
    lane.post(first)
    while lane.current is None:
        time.sleep(0.001)
    lane.post(second)
    thread = lane.close("it is over")
    with pytest.raises(dist.DistBackendError, match="it is over"):
        second.wait()
    with pytest.raises(dist.DistBackendError, match="it is over"):
        lane.post(work())
    with pytest.raises(dist.DistBackendError, match="it is over"):
        go.set()
        lane.call(work())
    assert thread is not None
    thread.join(5)
    assert first.is_success() and not thread.is_alive()


def test_idle_thread_ends_and_another_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("everstep.comms.work.IDLE_S", 0.01)
    lane = Lane("test-idle")
    for _ in range(2):
        one = work()
        lane.post(one)
        one.wait()
        deadline = time.monotonic() + 5
        while any(thread.name == "test-idle" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.001)
    lane.close("over")


def failing() -> Work:
    def body() -> None:
        raise EpochBroken(7, "a member died")

    return work(body, "all_reduce")


def test_error_surfaces_in_wait_with_its_cause() -> None:
    broken = failing()
    broken.run()
    for _ in range(2):
        with pytest.raises(dist.DistBackendError, match="all_reduce failed: epoch 7") as caught:
            broken.wait()
        assert isinstance(caught.value.__cause__, EpochBroken) and caught.value.__cause__.epoch == 7
    assert broken.is_completed() and not broken.is_success() and broken.exception() is caught.value


@pytest.mark.parametrize("early", [True, False])
def test_error_surfaces_in_the_future(early: bool) -> None:
    broken = failing()
    future = broken.get_future() if early else None
    broken.run()
    with pytest.raises(RuntimeError, match="a member died"):
        (future or broken.get_future()).wait()


def test_wait_has_a_limit_of_its_own() -> None:
    one = work()
    with pytest.raises(dist.DistBackendError, match=r"within 0\.01 s"):
        one.wait(timedelta(seconds=0.01))
    one.run()
    assert one.wait(timedelta(seconds=0.01)) and one.wait()


# Groups ---------------------------------------------------------------------------------------------------------


def test_works_of_an_epoch_that_is_over_are_not_done_in_the_next(crew: Crew) -> None:
    a, b = crew.make("a"), crew.make("b")
    crew.enter(1, [a, b])
    first, second = group_of(a), group_of(b)
    lost = [first.allreduce([torch.ones(3)]) for _ in range(3)]
    crew.enter(2, [a, b])
    x, y = torch.tensor([1.0]), torch.tensor([2.0])
    works = [first.allreduce([x]), second.allreduce([y])]
    for one in lost:
        with pytest.raises(dist.DistBackendError) as caught:
            one.wait()
        assert isinstance(caught.value.__cause__, EpochBroken) and caught.value.__cause__.epoch == 1
    for one in works:
        one.wait()
    assert x == y == 3


def test_the_same_group_has_another_size_later(crew: Crew) -> None:
    a, b, c = (crew.make(name) for name in "abc")
    crew.enter(1, [a, b, c])
    group = group_of(b)
    assert (group.rank(), group.size()) == (1, 3)
    crew.enter(2, [b, c])
    assert (group.rank(), group.size()) == (0, 2)


def test_members_agree_on_an_index_that_none_of_them_uses(crew: Crew) -> None:
    fabrics = [crew.make(name) for name in "abcd"]
    crew.enter(1, fabrics)
    worlds = [World(fabric, [None] * len(fabrics)) for fabric in fabrics]

    def made(roles: tuple[int, ...]) -> int:
        found = crew.pool.map(lambda role: worlds[role].communicator(roles, "").index, roles)
        (index,) = set(found)
        return index

    used: dict[int, set[int]] = {role: set(range(DEFAULT_INDEX + 1)) for role in range(4)}
    for roles in ((0, 1), (2, 3), (0, 3), (1, 2, 3), (3,), (0, 1, 2, 3)):
        index = made(roles)
        assert all(index not in used[role] for role in roles)
        for role in roles:
            used[role].add(index)
    assert made((0,)) < 10  # disjoint groups share


def test_a_newcomer_numbers_its_groups_without_asking(crew: Crew) -> None:
    """A session's: torch names them by how many there were, and rows that share no member share a number."""
    a, b = crew.make("a"), crew.make("b")
    crew.enter(1, [a, b])
    first, second = World(a), World(b)
    assert first.communicator((0,), "1").index == second.communicator((1,), "1").index == DEFAULT_INDEX + 1
    assert first.communicator((0, 1), "2").index == DEFAULT_INDEX + 2
    with pytest.raises(ValueError, match="use_local_synchronization=False"):
        first.communicator((0, 1), "3c4f")
    with pytest.raises(ValueError, match="253 others"):
        first.communicator((0, 1), "253")


def test_too_many_groups(crew: Crew) -> None:
    a, b = crew.make("a"), crew.make("b")
    crew.enter(1, [a, b])
    worlds = World(a, [None, None]), World(b, [None, None])
    worlds[1]._used |= set(range(256))
    futures = [crew.pool.submit(world.communicator, (0, 1), "") for world in worlds]
    for future in futures:
        with pytest.raises(ValueError, match="253 others"):
            future.result(10)


def test_operators_which_are_not_there(crew: Crew) -> None:
    a = crew.make("a")
    crew.enter(1, [a])
    group = group_of(a)
    with pytest.raises(NotImplementedError, match=r"no ReduceOp\.PREMUL_SUM"):
        group.allreduce([torch.ones(1)], dist.ReduceOp.PREMUL_SUM)
    group.allreduce([torch.ones(1)], dist.ReduceOp.MAX).wait()
    group.barrier().wait()
    group.shutdown()
    with pytest.raises(dist.DistBackendError, match="destroyed"):
        group.barrier()


# Plain scripts --------------------------------------------------------------------------------------------------


def watch(crew: Crew, lives: list[Life | None]) -> tuple[Watch, Fabric, Fabric]:
    a, b = crew.make("a"), crew.make("b")
    table, _ = crew.enter(1, [a, b])
    return Watch(table, lives, lambda: ()), a, b


def until_broken(fabric: Fabric) -> str:
    deadline = time.monotonic() + 5
    while fabric.table.broken is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return fabric.table.broken


def test_a_process_with_the_number_of_a_dead_one_is_another(crew: Crew) -> None:
    life = Life(LIFE.pid, LIFE.born + 1, 0)
    watching, a, _ = watch(crew, [None, life])
    assert until_broken(a) == "b died"
    watching.close()


def test_the_living_and_the_unknown_are_left_alone(crew: Crew) -> None:
    watching, a, _ = watch(crew, [None, LIFE])
    watching.close()
    other = Watch(a.table, [None, None], lambda: ())
    other.close()
    assert a.table.broken is None


def test_who_said_that_it_leaves_may_end(crew: Crew) -> None:
    a, b = crew.make("a"), crew.make("b")
    table, _ = crew.enter(1, [a, b])
    b.board.words[left_word()] = 1
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    looked = threading.Event()  # after it has heard of the end
    watching = Watch(table, [None, Life(child, born(child), 0)], lambda: looked.set() or ())
    assert looked.wait(5)
    watching.close()
    os.waitpid(child, 0)
    assert table.broken is None


def place(network: str, address: str) -> Place:
    return Place(network, network, address, LIFE)


def test_addresses_for_others() -> None:
    here, near, far = place("h", "127.0.0.1"), place("h", "127.0.1.1"), place("i", "10.0.0.7")
    assert rendezvous._address(here, [here, near]) == "127.0.0.1"
    assert rendezvous._address(far, [here, far]) == "10.0.0.7"
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        rendezvous._address(here, [here, place("i", "127.0.0.1")])
