"""A map-style data set in global batches: the samples of this member's share of a step, collated.

Nothing here moves: the position is a function of the step, so a step can be asked for again, in any order and with any
members. The order of samples is sampler.py's; so is what it says about passes, uneven shares and ramp-ups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from everstep.core.dealing import Stream
from everstep.data.reading import PREFETCH_FACTOR, Readers, Source, tensors_of
from everstep.data.sampler import MicroBatch, Sampler, whole


class Batches:
    """A data set dealt in steps of `global_batch` samples, kept for every number of members.

    dataset: has `__len__` and `__getitem__` (and `__getitems__`, which is used): a torch Dataset, a list, an array;
    or a tensor, or a tuple of tensors of one length, which are indexed once for a whole micro-batch.
    micro_batch: the most samples in one forward, at most `global_batch`; None: a member's share in one.
    shuffle: each pass in an order of its own, a function of `seed`. drop_last: see Sampler.
    collate: list of samples -> batch; None: torch's default_collate, and for tensors what indexing gives.

    num_workers: processes which read ahead, prefetch_factor (2) micro-batches each; 0: this process reads when asked.
    They hold the data set as it was at the first `share`. worker_init_fn, multiprocessing_context: as of a DataLoader.

    The global generators of torch, random and numpy are set for each micro-batch that is read, and put back: what a
    data set draws follows from `seed` and the micro-batch, whoever reads it, and with as many processes as you like.

    Raises ValueError for what cannot be dealt: no samples, no length, a stream of samples, a batch below one.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int | None = None,
        seed: int = 0,
        shuffle: bool = True,
        collate: Callable[[list[Any]], Any] | None = None,
        drop_last: bool = False,
        num_workers: int = 0,
        prefetch_factor: int | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
    ) -> None:
        self.dataset = dataset
        num_samples = _length(dataset)
        if not num_samples:
            raise ValueError(f"the dataset ({type(dataset).__name__}) is empty")
        self.sampler = Sampler(
            num_samples, global_batch, micro_batch=micro_batch, seed=seed, shuffle=shuffle, drop_last=drop_last
        )
        self._stream = self.sampler.stream
        self._source = Source(dataset, collate, self.sampler)
        self._readers: Readers | None = None
        options = (prefetch_factor, worker_init_fn, multiprocessing_context)
        if whole("num_workers", num_workers, 0):
            ahead = PREFETCH_FACTOR if prefetch_factor is None else whole("prefetch_factor", prefetch_factor, 1)
            self._readers = Readers(self._source, num_workers, ahead, worker_init_fn, multiprocessing_context)
        elif any(option is not None for option in options):
            raise ValueError("prefetch_factor, worker_init_fn and multiprocessing_context are for num_workers > 0")

    @property
    def stream(self) -> Stream:
        """What the order of samples follows from."""
        return self._stream

    def share(self, step: int, num_members: int, role: int) -> Iterator[tuple[MicroBatch, Any]]:
        """This member's micro-batches of the step, each with its samples; none for a member without a sample.

        Multiply each mean loss (or its gradient) by the micro-batch's weight, then sum over micro-batches and members.
        Raises ValueError, at once, when the data set's length is no longer what it was.
        """
        num_samples = _length(self.dataset)
        if num_samples != self.sampler.num_samples:
            raise ValueError(
                f"the dataset had {self.sampler.num_samples} samples and has {num_samples} at step {step}: the order "
                "of samples follows from their number, so it must not change in a run"
            )
        readers, source, share = self._readers, self._source, self.sampler.deal(step, num_members, role)
        if readers is None:
            return ((micro, source.read(micro.positions, micro.indices)) for micro in share)
        return (
            (micro, readers.read(micro.positions, partial(self._coming, step, num_members, role, number)))
            for number, micro in enumerate(share)
        )

    def close(self) -> None:
        """End the loader workers. They end with this process too; a later `share` starts new ones."""
        if self._readers is not None:
            self._readers.close()

    def _coming(self, step: int, num_members: int, role: int, number: int) -> Iterator[range]:
        """This member's micro-batches from this one on, if the members stay the same."""
        for later in itertools.count(step):
            yield from self.sampler.cut(later, num_members, role)[number:]
            number = 0

    def state_dict(self) -> dict[str, Any]:
        """What the order of samples follows from. The position is not here: the job's step tells it."""
        names = ("num_samples", "global_batch", "seed", "shuffle", "drop_last")
        return {name: getattr(self.sampler, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Check that the run which saved this had the same order of samples; there is nothing to load.

        Raises ValueError when it had another. With strict=False the order of this object counts, whatever was saved.
        """
        if not strict:
            return
        mine = self.state_dict()
        changed = [
            f"{name} was {state[name]!r}, is {value!r}" if name in state else f"{name} is not in the state"
            for name, value in mine.items()
            if name not in state or state[name] != value
        ]
        if changed:
            raise ValueError(
                f"cannot resume with another order of samples: {'; '.join(changed)}. From here on some samples would "
                "come twice in a pass and others not at all. If that is meant, do not protect the batches, or call "
                "load_state_dict(state, strict=False)"
            )


def _length(dataset: Any) -> int:
    """Number of samples. Raises ValueError for what is not a map-style data set."""
    kind = type(dataset).__name__
    if isinstance(dataset, torch.utils.data.IterableDataset):
        raise ValueError(
            f"IterableDataset is not supported here: {kind} gives samples in its own order, and after a fault the step "
            "needs the same ones again; use a dataset with __len__ and __getitem__"
        )
    if isinstance(dataset, Mapping):
        raise ValueError(f"a {kind} is looked up by keys, not by 0, 1, 2, ...: give a tuple of tensors, or a list")
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise ValueError(f"the dataset ({kind}) needs __len__ and __getitem__; a generator or a loader is not enough")
    tensors = tensors_of(dataset)
    lengths = [_len(dataset)] if tensors is None else [_len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(f"a tuple of tensors needs one length for all, not {lengths}")
    return lengths[0]


def _len(dataset: Any) -> int:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise ValueError(f"the dataset ({type(dataset).__name__}) has no length: {error}") from error
