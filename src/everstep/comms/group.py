"""The process group "everstep" of torch.distributed, for tensors on the CPU. Importing this module registers it.

    import everstep.comms.group  # registers the backend
    torch.distributed.init_process_group("everstep")

So any script under any launcher uses it instead of gloo. A session has a default group of its own (`make_group`), which
stays the same object when the members change: size() and rank() are those of the present epoch.

Operations on one group are done in the order in which they were called, those that nobody waits for at once by a thread
of the group. Messages have a thread for each direction and peer, so a batch of them cannot wait for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from everstep.comms import rendezvous
from everstep.comms.fabric import Fabric
from everstep.comms.operations import NAME, Operations
from everstep.comms.work import Lane, Together, Work
from everstep.comms.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.distributed_c10d import _DistributedBackendOptions as Request  # type: ignore[attr-defined]


def make_group(fabric: Fabric) -> dist.ProcessGroup:
    """Make torch's default group of a fabric that is in an epoch. The fabric stays the caller's."""
    table = fabric.table
    # Nothing is met through the store: the links are there. torch wants one all the same.
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(NAME, store=store, rank=table.role, world_size=table.size, pg_options=World(fabric))
    group = dist.group.WORLD
    assert group is not None
    return group


class Group(Operations, dist.ProcessGroup):  # type: ignore[misc] # overloads which torch itself does not use
    """A process group. `ranks` are positions among its members."""

    def __init__(self, world: World, roles: tuple[int, ...] | None, request: Request, owner: bool) -> None:
        rank, size = request.group_rank, request.group_size
        # The constructor with a store, the one the stubs know, is not for subclasses.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = request.store
        self._world, self._owner = world, owner
        self._rank, self._size = rank, size
        self.communicator = world.communicator(roles, request.group_id)
        self._timeout_s = request.timeout.total_seconds()
        self._main = Lane(f"everstep-group-{request.group_id}")
        self._messages: dict[tuple[str, int, int], Lane] = {}  # way, peer, tag
        self._batch: list[Work] | None = None
        self._name, self._desc = request.group_id, ""
        world.add(self, self._timeout_s)

    # Who we are ---------------------------------------------------------------------------------------------

    def rank(self) -> int:
        return self._rank if self._world.fixed else self.communicator.rank

    def size(self) -> int:
        return self._size if self._world.fixed else self.communicator.size

    def name(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:  # type: ignore[override] # a NewType of str
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def get_group_store(self) -> Store:
        return self._store

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    # As the C++ side asks for the same.
    getRank, getSize, getBackendName = rank, size, name
    setGroupName, setGroupDesc = _set_group_name, _set_group_desc

    def getGroupName(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()
        self._world.hurry(self._timeout_s)

    # Several as one -----------------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Together:
        works, self._batch = self._batch or [], None
        return Together(works)

    # The end ------------------------------------------------------------------------------------------------

    def lanes(self) -> list[tuple[Lane, Sequence[int]]]:
        """Where works are done, each with the roles that take part."""
        roles = self.communicator.roles
        messages = [(lane, (roles[peer],)) for (_, peer, _), lane in list(self._messages.items())]
        return [(self._main, roles), *messages]

    def abort(self) -> None:
        """Whatever waits raises, in all groups of this world, and nothing can be begun any more."""
        table = self._world.fabric.table
        self._world.fabric.abort(table.epoch, "the process group was aborted")

    def shutdown(self) -> None:
        """Of the group that made the fabric: end it. What is under way in another group is finished, or broken off."""
        if self._owner:
            self._world.close()
        threads = [lane.close("the process group was destroyed") for lane, _ in self.lanes()]
        if self._owner:
            for thread in threads:
                if thread is not None:
                    thread.join()
        self._world.remove(self)

    # Inside -------------------------------------------------------------------------------------------------

    def begin(
        self,
        name: str,
        call: Callable[[], None],
        tensors: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        lane: Lane | None = None,
    ) -> Work:
        """Begin it in this epoch; when torch waits for it at once, it is over on return."""
        world = self._world
        table = world.fabric.table

        def body() -> None:
            world.pinned.table_of_work = table
            try:
                call()
            finally:
                world.pinned.table_of_work = None

        work = Work(name, body, tensors, self._limit_s(opts, timeout))
        at_once = lane is None and not getattr(opts, "asyncOp", True) and _is_bare()
        lane = lane or self._main
        (lane.call if at_once else lane.post)(work)
        if self._batch is not None:
            self._batch.append(work)
        return work

    def _limit_s(self, opts: Any, timeout: timedelta | None) -> float:
        """The time-out of one operation."""
        given = timeout if timeout is not None else getattr(opts, "timeout", None)
        if given is None or given <= timedelta(0):
            return self._timeout_s
        self._world.hurry(given.total_seconds())
        return given.total_seconds()

    def lane(self, way: str, peer: int, tag: int) -> Lane:
        lane = self._messages.get((way, peer, tag))
        if lane is None:
            lane = self._messages[way, peer, tag] = Lane(f"everstep-{way}-{peer}")
        return lane


def _is_bare() -> bool:
    """Whether this thread is in no mode of torch, which would have an effect on the work's inside."""
    modes = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return not modes and not torch.is_inference_mode_enabled()


def _create(request: Request, options: object) -> Group:
    """As torch makes a group; only its members are asked."""
    roles = tuple(request.global_ranks_in_group) or None
    if isinstance(options, World):
        return Group(options, roles, request, owner=True)
    if options is not None:
        raise ValueError(f"the backend {NAME} has no options")
    default = dist.group.WORLD
    if roles is not None and isinstance(default, Group):
        return Group(default._world, roles, request, owner=False)
    fabric, lives = rendezvous.meet(
        request.store, request.group_rank, request.group_size, request.timeout.total_seconds()
    )
    return Group(World(fabric, lives), None, request, owner=True)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


# All groups of this process, whatever their backends ----------------------------------------------------------


def everyone() -> list[dist.ProcessGroup]:
    """All that there are."""
    return list(c10d._world.pg_names)


def abort_all() -> None:
    """Let whatever waits in a group raise, from any thread. Not gloo's: nothing but the end of its sockets wakes it."""
    for group in reversed(everyone()):  # the newest first
        if group.name() != "gloo":
            group.abort()


def forget_all() -> None:
    """Destroy them, and what an init_process_group left that failed midway: the next one is like the first."""
    if dist.is_initialized():
        dist.destroy_process_group()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined]
    c10d._world.group_count = 0  # members name their groups by it
