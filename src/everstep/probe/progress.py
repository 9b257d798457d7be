"""Progress of any PyTorch script, without touching it: optimizer steps, and signs of life between them.

A step is counted by PyTorch's global hook after Optimizer.step. Batches, collectives and DDP's forward say
"alive" while a step is long. Everything ends in a few stores to the page shared with the agent: no lock, no
system call but the clock, and never a wait for a device.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from typing import Any

from everstep.core.page import Page, Word
from everstep.core.trace import collective
from everstep.probe.owntime import OwnTime, waiting
from everstep.probe.phases import Hook, Phases, Words

ADOPT_AFTER = 4  # steps of one other optimizer while the counted one makes none: it has stopped

# isend and irecv are left alone: P2POp compares them by identity.
COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
)


class Progress:
    """Ticks into the words of this process; into a dict nobody reads before `attach` and after `detach`."""

    def __init__(self) -> None:
        self._begin(dict.fromkeys(Word, 0))
        self.own = OwnTime()
        self.phases = Phases(self.words, self.own)
        self.attached = False

    def _begin(self, words: Words) -> None:
        self.words = words
        self.stop_sent = False
        self.session = False  # steps are counted by their commits
        self._leader: weakref.ref[Any] | None = None
        self._other: weakref.ref[Any] | None = None
        self._other_steps = 0
        self._on_first: Callable[[], None] | None = None

    def attach(self, page: Page) -> None:
        """A new attempt begins: this process is the worker of `page`."""
        self._begin(page)
        self.phases.begin(page)
        self.own.begin(page)
        self.own.trace.begin(page)
        self.attached = True

    def again(self, on_first: Callable[[], None]) -> float:
        """The script begins anew in this process: steps count from 0, and the first one is told.

        Returns when the last one was made, seconds of the monotonic clock; 0.0: there was none.
        """
        words = self.words
        last_s = words[Word.STEP_NS] / 1e9
        for word in (Word.STEPS, Word.FIRST_STEP_NS, Word.TOTAL_STEP, Word.FIRST_TOTAL_STEP, Word.SAVED_STEP):
            words[word] = 0
        self._begin(words)
        self.phases.again()
        self.own.begin(self.own.page)
        self.own.trace.again()
        self._on_first = on_first
        return last_s

    def steps(self) -> int:
        """The optimizer's own count where it has one, else that of this attempt."""
        return max(self.words[Word.TOTAL_STEP] - 1, self.words[Word.STEPS])

    def detach(self) -> None:
        """This process is another one than the worker (a fork of it): it has nothing to tell."""
        self.words = self.phases.words = dict.fromkeys(Word, 0)
        self.own.begin(None)
        self.own.trace.begin(None)
        self.attached = False

    def life(self) -> None:
        self.words[Word.LIFE_NS] = time.monotonic_ns()

    def batch(self) -> None:
        words = self.words
        words[Word.BATCHES] += 1
        words[Word.LIFE_NS] = time.monotonic_ns()

    def collective(self) -> None:
        words = self.words
        words[Word.COLLECTIVES] += 1
        words[Word.LIFE_NS] = time.monotonic_ns()

    def step(self, optimizer: Any) -> None:
        """`optimizer` has made a step; it counts as a step of the job when it is the counted one."""
        words, now = self.words, time.monotonic_ns()
        words[Word.LIFE_NS] = now
        self.own.updated()
        if not self.session and self._leads(optimizer):
            self._stepped(words[Word.STEPS] + 1, total_step(optimizer), now)
            if not self.own.trace.commits:
                self.own.trace.stepped(words[Word.STEPS])

    def committed(self, steps: int) -> None:
        """A session committed: the job has made this many steps, whoever made them."""
        self.session = True
        self._stepped(steps, steps, time.monotonic_ns())
        self.own.trace.stepped(steps)

    def restored(self, steps: int) -> None:
        """A session went back, or on, to a kept state: that is where this process is, and no step of its own."""
        self.words[Word.TOTAL_STEP] = steps + 1
        self.own.trace.restored(steps)

    @property
    def save_asked(self) -> int:
        """How often a person wanted the state on disk."""
        return self.words[Word.SAVE_ASKED]

    def _stepped(self, steps: int, total: int, now: int) -> None:
        words = self.words
        words[Word.LIFE_NS] = now
        if total >= 0:
            words[Word.TOTAL_STEP] = total + 1
        if not words[Word.FIRST_STEP_NS]:
            words[Word.FIRST_TOTAL_STEP] = max(total + 1, 0)
            words[Word.FIRST_STEP_NS] = now
        self.own.stepped(steps)
        words[Word.STEP_NS] = now
        words[Word.STEPS] = steps
        self.phases.trained()
        if self._on_first is not None:
            on_first, self._on_first = self._on_first, None
            on_first()
        stop_at = words[Word.STOP_AT_STEP]
        if stop_at and steps >= stop_at and not self.stop_sent:
            self.stop_sent = True
            os.kill(os.getpid(), signal.SIGTERM)

    def _leads(self, optimizer: Any) -> bool:
        """One step of a script may step several optimizers (GANs, one per parameter): only one of them counts."""
        leader = self._leader() if self._leader else None
        if leader is optimizer:
            self._other, self._other_steps = None, 0
            return True
        if leader is not None:
            other = self._other() if self._other else None
            if other is None:
                self._other, self._other_steps = weakref.ref(optimizer), 1
            elif other is optimizer:
                self._other_steps += 1
            if self._other_steps <= ADOPT_AFTER:
                return False
        self._leader, self._other, self._other_steps = weakref.ref(optimizer), None, 0
        return True


def total_step(optimizer: Any) -> int:
    """The optimizer's own count of its steps; -1 when it keeps none that can be read without a device."""
    state = next(iter(optimizer.state.values()), None)
    count: Any = state.get("step") if isinstance(state, dict) else None
    if isinstance(count, int):
        return count
    torch = sys.modules["torch"]
    # The exact type: a subclass may do anything in item(), such as gather from other ranks.
    if type(count) is torch.Tensor and count.is_cpu and count.numel() == 1:
        return int(count.item())
    return -1


def patch_torch(progress: Progress) -> None:
    """Put the hooks into torch. Functions taken from it afterwards, in any way, are the hooked ones."""
    import torch
    from torch.utils.data import dataloader

    _hook_optimizers(progress)
    iterator: Any = dataloader._BaseDataLoaderIter
    iterator.__next__ = _after(iterator.__next__, progress.batch)
    if torch.distributed.is_available():
        ddp: Any = torch.nn.parallel.DistributedDataParallel
        ddp.forward = _before(ddp.forward, progress.life)
        _patch_collectives(progress)


def _hook_optimizers(progress: Progress) -> None:
    torch: Any = sys.modules["torch"]
    from torch.optim.optimizer import register_optimizer_step_post_hook

    # A step inside torch.compile costs one graph break (torch itself has one in there) and counts. Unlike the
    # public torch.compiler.disable, this imports the compiler at the first step only; every optimizer needs it.
    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        progress.step(optimizer)

    register_optimizer_step_post_hook(torch._disable_dynamo(hook))


def _after(original: Hook, tick: Any) -> Hook:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        tick()
        return result

    return call


def _before(original: Hook, tick: Any) -> Hook:
    import torch

    is_compiling = torch.compiler.is_compiling

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            tick()
        return original(*args, **kwargs)

    return call


def _patch_collectives(progress: Progress) -> None:
    import torch.distributed as public
    import torch.distributed.distributed_c10d as c10d

    functional = sys.modules.get("torch.distributed._functional_collectives")
    remaps = getattr(functional, "traceable_collective_remaps", {})  # how the compiler knows collectives
    for name in COLLECTIVES:
        original = getattr(c10d, name, None)
        if original is None:  # not in this version of torch
            continue
        hooked = _before(waiting(progress.own, original, collective(name)), progress.collective)
        if original in remaps:
            remaps[hooked] = remaps[original]
        setattr(c10d, name, hooked)
        setattr(public, name, hooked)
