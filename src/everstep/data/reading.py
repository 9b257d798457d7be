"""Reads micro-batches: in this process, or ahead of the training in processes, which torch's DataLoader runs.

The DataLoader is told what comes next as it goes: behind the micro-batches of a step those of the next steps, as if the
members stayed the same. It gives them in that order. When another one is asked for (the members changed, a step is done
again), what was read ahead is dropped, and the order goes on from there.

What reads draws random numbers (augmentation) which follow from the seed and the micro-batch's place in the stream: not
from the process that reads it, nor from what was read before.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib
import multiprocessing.connection
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from everstep.core.leftovers import unlink_shared
from everstep.data.sampler import Sampler

MOST_DEATHS = 3  # of processes in a row, while one micro-batch is read: it is the micro-batch, or the memory
ENDING_S = 1.0  # for processes to end by themselves
DYING_S = 1.0  # from the end of its connections to the end of the process
PREFETCH_FACTOR = 2  # of a DataLoader

_utils: Any = importlib.import_module("torch._utils")  # none of these is typed
_sharing: Any = torch.multiprocessing
signal_handling: Any = importlib.import_module("torch.utils.data._utils.signal_handling")

Collate = Callable[[list[Any]], Any]


class Source:
    """A data set, how its samples are collated, and their order."""

    def __init__(self, dataset: Any, collate: Collate | None, sampler: Sampler) -> None:
        self.dataset, self.collate, self.sampler = dataset, collate, sampler

    def read(self, positions: range, indices: tuple[int, ...]) -> Any:
        """The batch of these samples. Leaves the global generators as they were. `positions`: in the stream."""
        tensors = tensors_of(self.dataset)
        if tensors is not None and self.collate is None:
            rows = torch.tensor(indices)
            if isinstance(self.dataset, torch.Tensor):
                return self.dataset[rows]
            return tuple(tensor[rows] for tensor in tensors)
        with _randomness_of(self.sampler.seed, positions):
            samples = _samples(self.dataset, tensors, indices)
            return (self.collate or torch.utils.data.default_collate)(samples)


def tensors_of(dataset: Any) -> tuple[torch.Tensor, ...] | None:
    """The tensors to be indexed at once; None: an ordinary data set. Raises ValueError for a tuple of both."""
    if isinstance(dataset, torch.Tensor):
        return (dataset,)
    if not isinstance(dataset, tuple) or not any(isinstance(part, torch.Tensor) for part in dataset):
        return None
    if all(isinstance(part, torch.Tensor) for part in dataset):
        return dataset
    kinds = ", ".join(type(part).__name__ for part in dataset)
    raise ValueError(f"a tuple is a tuple of tensors, or of samples without one, not of both: ({kinds})")


def _samples(dataset: Any, tensors: tuple[torch.Tensor, ...] | None, indices: tuple[int, ...]) -> Any:
    if isinstance(dataset, tuple) and tensors is not None:
        return [tuple(tensor[index] for tensor in tensors) for index in indices]
    if callable(many := getattr(dataset, "__getitems__", None)):
        return many(list(indices))
    return [dataset[index] for index in indices]


@contextlib.contextmanager
def _randomness_of(seed: int, positions: range) -> Iterator[None]:
    """The host's global generators, set for this micro-batch, and put back in the end."""
    digest = hashlib.blake2b(f"everstep read {seed} {positions.start}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1  # torch takes 63 bits
    numpy: Any = sys.modules.get("numpy")
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state() if numpy is not None else None
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        if numpy is not None:
            numpy.random.set_state(before[2])


class _Order(NamedTuple):
    """What the process is told to read; not any more when another turn was taken since."""

    turn: int
    positions: range


class _Read(NamedTuple):
    batch: Any
    error: Any  # an ExceptionWrapper of torch, or None


class _Orders:
    """What the DataLoader takes for its sampler: it gets one whenever it has given a micro-batch."""

    def __init__(self, turn: Any) -> None:
        self.turn = turn  # shared with the processes
        self.given: deque[range] = deque()  # and not read yet
        self._coming: Iterator[range] = iter(())

    def turn_to(self, coming: Iterator[range]) -> None:
        self._coming = coming
        self.turn.value += 1

    def __iter__(self) -> _Orders:
        return self

    def __next__(self) -> _Order:
        positions = next(self._coming)
        self.given.append(positions)
        return _Order(self.turn.value, positions)


class _InProcess:
    """What the DataLoader takes for its data set, in its processes."""

    def __init__(self, source: Source, turn: Any) -> None:
        self._source, self._turn = source, turn

    def __getitem__(self, order: _Order) -> _Read:
        if order.turn != self._turn.value:
            return _Read(None, None)
        indices = self._source.sampler.samples(order.positions)
        try:
            return _Read(self._source.read(order.positions, indices), None)
        except Exception:  # noqa: BLE001 - it is raised where the micro-batch is asked for, if it ever is
            where = f"in a loader worker, at positions {order.positions} of the stream"
            return _Read(None, _utils.ExceptionWrapper(where=where))


def _as_it_is(read: Any) -> Any:
    return read


class WorkerDied(RuntimeError):
    """A loader worker was killed, or exited."""


class Readers:
    """Processes that read ahead. They are started by the first `read`, which belongs into the main thread."""

    def __init__(
        self,
        source: Source,
        num_workers: int,
        prefetch_factor: int,
        worker_init_fn: Callable[[int], None] | None,
        multiprocessing_context: Any,
    ) -> None:
        named = multiprocessing_context is None or isinstance(multiprocessing_context, str)
        context = multiprocessing.get_context(multiprocessing_context) if named else multiprocessing_context
        self._orders = _Orders(context.RawValue(ctypes.c_int64, 0))
        self._loader: DataLoader[Any] = DataLoader(
            _InProcess(source, self._orders.turn),  # type: ignore[arg-type]
            batch_size=None,
            sampler=self._orders,
            collate_fn=_as_it_is,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=torch.Generator(),  # or it would draw from the training's
        )
        self._loading: Any = None

    def read(self, positions: range, coming: Callable[[], Iterator[range]]) -> Any:
        """The batch of these positions. `coming`: what is asked for from here on, these first, without an end.

        A process that dies is replaced, and all is read again. Raises what the data set raises, and WorkerDied when
        one process after the other dies over the same micro-batch.
        """
        for _ in range(MOST_DEATHS - 1):
            try:
                return _batch(self._take(positions, coming))
            except WorkerDied as died:
                print(f"everstep: {died}: it is replaced, and its micro-batches are read again", file=sys.stderr)
        return _batch(self._take(positions, coming))

    def close(self) -> None:
        """End the processes; `read` starts new ones."""
        loading, self._loading = self._loading, None
        if loading is not None:
            if not _dead(loading):
                _ask_to_end(loading)
            _abandon(loading)
        self._orders.given.clear()

    def _take(self, positions: range, coming: Callable[[], Iterator[range]]) -> _Read:
        given = self._orders.given
        try:
            if self._loading is None:
                self._orders.turn_to(coming())
                self._loading = _start(self._loader)
            elif given[0] != positions:
                self._orders.turn_to(coming())
                for _ in range(len(given)):
                    self._next()
            return self._next()
        except BaseException:  # also of a signal's handler, in the midst of anything: what is on its way is unknown
            self.close()
            raise

    def _next(self) -> _Read:
        read: _Read = _get(self._loading)
        self._orders.given.popleft()
        return read


def _start(loader: DataLoader[Any]) -> Any:
    """Its processes. Their deaths are no error in whatever the main thread does just then: see `_get`."""
    loading: Any = iter(loader)
    signal_handling._remove_worker_pids(id(loading))
    signal_handling._set_worker_pids(id(loading), ())  # it takes them back itself in the end
    return loading


def _get(loading: Any) -> Any:
    """The next one. Raises WorkerDied as soon as one of its processes dies: meanwhile torch's handler of SIGCHLD may
    raise, so that not even half a message of the dead is waited for."""
    key = id(loading._workers)
    try:
        try:
            signal_handling._set_worker_pids(key, tuple(worker.pid for worker in loading._workers))
            if not (dead := _dead(loading)):
                return next(loading)
        finally:
            signal_handling._remove_worker_pids(key)
    except Exception as error:
        # Fetching a tensor from a process that is dying fails before the process has ended.
        if dead := _dead(loading, DYING_S if isinstance(error, OSError | EOFError) else 0.0):
            raise WorkerDied(dead) from error
        raise
    raise WorkerDied(dead)


def _batch(read: _Read) -> Any:
    if read.error is not None:
        read.error.reraise()
    return read.batch


def _dead(loading: Any, wait_s: float = 0.0) -> str:
    """Which processes ended, in words; empty: none."""
    if wait_s:
        ending = multiprocessing.connection.wait([worker.sentinel for worker in loading._workers], wait_s)
        for worker in loading._workers:
            if worker.sentinel in ending:
                worker.join(wait_s)
    ended = [f"{worker.pid} (exit code {worker.exitcode})" for worker in loading._workers if not worker.is_alive()]
    return f"loader worker {', '.join(ended)} ended" if ended else ""


def _ask_to_end(loading: Any) -> None:
    """And wait, not for a data set that hangs: a process that is killed while it shares memory leaves a file."""
    loading._workers_done_event.set()
    for queue in loading._index_queues:
        queue.put(None)
    deadline = time.monotonic() + ENDING_S
    for worker in loading._workers:
        worker.join(max(deadline - time.monotonic(), 0.0))


def _abandon(loading: Any) -> None:
    """End what is left of a DataLoader without asking it to: nobody knows which locks a dead process held."""
    loading._shutdown = True
    signal_handling._remove_worker_pids(id(loading))
    for worker in loading._workers:
        worker.kill()
    for worker in loading._workers:
        worker.join(DYING_S)
        if _sharing.get_sharing_strategy() == "file_descriptor":  # with the other one the files are in use
            unlink_shared(worker.pid)
    for queue in loading._index_queues:
        queue.cancel_join_thread()
        queue.close()
