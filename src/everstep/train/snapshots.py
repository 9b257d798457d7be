"""Saves of a session: when the state is due, its copy into the vault's memory beside training, and the way back.

The first member decides by its own step times; the vote tells all, so everybody saves the same step. State lies still
from the end of one step to the next optimizer step, so it is copied by a thread while the forward and backward pass
runs; `settle` waits for the rest of it, and that wait is what a save costs. Everything after the copy (checksums,
copies at peers, disk) is the vault's.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from everstep.core.formation import Seat
from everstep.core.saves import Saves, Tier
from everstep.plan.interval import Tuner
from everstep.plan.placement import Part, parts
from everstep.probe import boot
from everstep.state import capture, restore
from everstep.state.client import News, Persist, Slot, Vault, VaultError
from everstep.state.disk import Checkpoints
from everstep.state.flatten import Stateful
from everstep.state.image import Damaged, Source
from everstep.state.slots import COMPLETE, SKIPPED, State, Work
from everstep.train.kept import DISK, Kept
from everstep.train.saving import Saving

SENDING_S = 30.0  # after which an image that is not at its peers holds up no other
LOOK_S = 0.5  # between two looks whether the vault lives, while its last write is waited for
IN_MEMORY = 64  # of the newest images of a node are offered: a few of each of its shards
ON_DISK = 3  # of the newest complete steps are offered: the others are there for when these are damaged


class _Copy:
    """One state on its way into the vault's memory."""

    def __init__(self, tier: Tier, step: int, work: Callable[[], None]) -> None:
        self.tier, self.step = tier, step
        self.began_s = time.monotonic()
        self.error: Exception | None = None
        self._work = work
        self._begun = False
        self._over = threading.Event()

    def start(self) -> None:
        """Interrupted or not, `wait` waits for all that was begun. Where no thread can be had it is done here."""
        self._begun = True
        try:
            threading.Thread(target=self._run, name="everstep-snapshot", daemon=True).start()
        except RuntimeError:
            self._run()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:  # noqa: BLE001 - told by whoever waits
            self.error = error
        finally:
            self._over.set()

    def wait(self) -> None:
        if self._begun:
            self._over.wait()


class Snapshots:
    """`objects`: what is protected. `tell`: hears of saves to disk, from any thread. For the main thread, but news."""

    def __init__(
        self,
        saving: Saving,
        job: str,
        make_vault: Callable[[Callable[[News], None]], Vault],
        objects: Mapping[str, Stateful],
        tell: Callable[[Saves], None],
    ) -> None:
        self._saving, self._job, self._objects, self._tell = saving, job, objects, tell
        where = saving.where
        self._where = str(Path(where).absolute()) if where is not None and "://" not in str(where) else where
        self._tuners = {Tier.MEMORY: Tuner(saving.overhead), Tier.DISK: Tuner(saving.overhead)}
        self._wish = Tier.NOTHING
        self._again = -1  # step that was saved to disk before all went back behind it
        self._epoch = 0  # of the newest commit
        self._wrong = (0, 0)  # epoch, step: saves after this step, of epochs up to this one, hold what was made again
        self._due: tuple[Tier, int, int] | None = None  # decided, and not begun: tier, step, epoch
        self._copy: _Copy | None = None
        self._plan: capture.Plan | None = None
        self._part, self._shards, self._role = Part(writes=False), 1, 0
        self._seats: tuple[Seat, ...] = ()
        self._bad: set[tuple[int, int, int]] = set()  # step, shard, epoch of images which could not be restored
        self._on_disk_step = -1  # that this session came from
        self._news = threading.Condition()  # guards what the vault's news change
        self._saves = Saves()
        self._writing: dict[int, float] = {}  # step whose write to disk is under way -> since when
        self._sending: tuple[int, float] | None = None  # step whose image goes to peers, and since when
        self._ended: list[tuple[Tier, float]] = []  # for the tuners, which belong to the main thread
        self._said: set[str] = set()
        self._vault = make_vault(self.on_news)

    def connect(self) -> None:
        """In a thread beside the script's start: the vault may have to be started, which takes a moment."""
        try:
            _ = self._vault.endpoint
        except VaultError as error:
            self._say(f"nothing is kept in memory for now: {error}")

    # When -----------------------------------------------------------------------------------------------

    def ask(self, tier: Tier) -> None:
        """Somebody wants the state after the next commit to be saved."""
        self._wish = max(self._wish, tier)

    def wish(self, role: int, following: int) -> Tier:
        """For the vote that makes `following` committed steps."""
        wish = self._wished(role, following)
        return Tier.BUSY if wish is not Tier.DISK and self._is_busy() else wish

    def _is_busy(self) -> bool:
        """Peers do not have our last image yet, and may get it: not when that failed, or takes suspiciously long."""
        with self._news:
            return self._sending is not None and time.monotonic() - self._sending[1] < SENDING_S

    def _wished(self, role: int, following: int) -> Tier:
        """Only the first member's clock says what is due."""
        if following == self._again:
            return Tier.DISK
        if role or self._wish is Tier.DISK:
            return self._wish
        if self._where is not None and self._is_due(Tier.DISK, self._saving.every, following):
            return Tier.DISK
        return Tier.MEMORY if self._is_due(Tier.MEMORY, self._saving.memory_every, following) else self._wish

    def _is_due(self, tier: Tier, every: int | None, following: int) -> bool:
        if every is not None:
            return every > 0 and following % every == 0
        return self._tuners[tier].due

    def committed(self, tier: Tier, step: int, epoch: int, seconds: float) -> None:
        """`step` steps are committed, the last in `seconds`; its state is to be saved that far, once it lies still."""
        self.settle()  # after a step without an update nobody had to wait for the copy
        self._epoch = epoch
        with self._news:
            ended, self._ended = self._ended, []
        for tuner in self._tuners.values():
            tuner.stepped(seconds)
        for which, took_s in ended:
            self._tuners[which].ended(took_s)
        if tier:
            self._wish = Tier.NOTHING
            self._due = tier, step, epoch
            self._tuners[Tier.MEMORY].began()
            if tier is Tier.DISK:
                self._tuners[Tier.DISK].began()

    # The copy -------------------------------------------------------------------------------------------

    def seat(self, seats: tuple[Seat, ...], role: int, shards: int) -> None:
        """The members of an epoch: it follows who writes what, and to whom it goes."""
        self._seats, self._role, self._shards = seats, role, shards
        self._part = parts([seat.node for seat in seats], shards, self._saving.copies)[role]
        if not self._part.writes:
            boot.kept(-1)  # another one does from here on

    def take(self) -> None:
        """Nothing changes the state until the next optimizer step: begin the copy that is due."""
        if self._due is None:
            return
        (tier, step, epoch), self._due = self._due, None
        if tier is Tier.DISK and self._where is None:
            self._note(step, failed=(step, "the session was not told where: everstep.session(checkpoints=FOLDER)"))
            tier = Tier.MEMORY
        if tier is Tier.DISK:
            self._note(requested=step)
        if not self._part.writes:
            self._tuners[Tier.MEMORY].ended(0.0)
            if tier is Tier.DISK:
                self._tuners[Tier.DISK].ended(0.0)
            return
        try:
            self._begin(tier, step, epoch)
        except VaultError as error:
            self._failed(tier, step, error)

    def _begin(self, tier: Tier, step: int, epoch: int) -> None:
        shard = self._role % self._shards
        self._plan = plan = capture.plan(self._objects, shard=shard, num_shards=self._shards, last=self._plan)
        slot = self._vault.slot(plan.num_bytes)
        persist = self._persist() if tier is Tier.DISK and self._part.persists else None
        peers = [seat.vault for seat in self._seats if seat.node in self._part.peers and seat.vault]
        peers = list(dict.fromkeys(peers))
        with self._news:
            self._sending = (step, time.monotonic()) if peers else None
            if persist is not None:
                self._writing[step] = time.monotonic()
        self._copy = _Copy(tier, step, lambda: self._copy_into(slot, plan, step, epoch, peers, persist))
        self._copy.start()

    def _copy_into(
        self, slot: Slot, plan: capture.Plan, step: int, epoch: int, peers: Sequence[str], persist: Persist | None
    ) -> None:
        try:
            copied = plan.copy(slot.view)
        except BaseException:
            self._vault.give_up(slot)
            raise
        if copied.non_finite is not None:
            self._vault.give_up(slot)
            raise NotFinite(f"{copied.non_finite} is not finite after step {step}: this state is not kept")
        self._vault.seal(slot, plan.index(self._job, step, epoch, time.time()), peers, persist)
        boot.kept(step)

    def _persist(self) -> Persist:
        return Persist(str(self._where), {"newest": self._saving.keep, "every": self._saving.series})

    def settle(self) -> None:
        """The state is about to change: wait for the copy under way, drop one not begun."""
        self._due = None
        copy = self._copy
        if copy is None:
            return
        copy.wait()  # a restartable function can be interrupted here: the copy stays ours until it is through
        self._copy = None
        if copy.error is None:
            with self._news:
                self._ended.append((Tier.MEMORY, time.monotonic() - copy.began_s))
                if copy.tier is Tier.DISK and not self._part.persists:
                    self._ended.append((Tier.DISK, time.monotonic() - copy.began_s))
        elif isinstance(copy.error, (VaultError, NotFinite)):
            self._failed(copy.tier, copy.step, copy.error)
        else:
            raise copy.error

    def _failed(self, tier: Tier, step: int, error: Exception) -> None:
        """Training goes on; what should have been durable and is not is told."""
        with self._news:
            self._writing.pop(step, None)
            self._sending = None
            self._ended += [(Tier.MEMORY, 0.0), (Tier.DISK, 0.0)]
        if tier is Tier.DISK:
            self._note(failed=(step, str(error)))
        self._say(f"step {step} is not kept in memory: {error}" if tier is Tier.MEMORY else f"save failed: {error}")

    # News -----------------------------------------------------------------------------------------------

    def on_news(self, news: News) -> None:
        """Of the vault, in a thread of its client. What is known is told first: who waits for the write may end."""
        if news.what in (State.BACKED_UP, f"{Work.SEND.value} failed"):
            self._sent(news)
        if news.what == COMPLETE:
            self._note(durable=news.step)
        elif news.what == State.PERSISTENT:
            if news.complete:
                self._note(durable=news.step)
            self._writes_no_more(news.step)
        elif news.what == SKIPPED:  # the newer one is on its way
            self._writes_no_more(news.step)
        elif news.target and news.target == self._where:
            self._note(failed=(news.step, news.why))
            self._say(f"save of step {news.step} to {news.target} failed: {news.why}")
            self._writes_no_more(news.step)
        elif news.why:
            self._say(f"step {news.step}: {news.what}: {news.why}")

    def _sent(self, news: News) -> None:
        with self._news:
            mine = news.shard.number == self._role % self._shards
            if mine and self._sending is not None and self._sending[0] <= news.step:
                self._sending = None

    def _writes_no_more(self, step: int) -> None:
        with self._news:
            began_s = self._writing.pop(step, None)
            if began_s is not None:
                self._ended.append((Tier.DISK, time.monotonic() - began_s))
            self._news.notify_all()

    def _note(self, requested: int = -1, durable: int = -1, failed: tuple[int, str] = (-1, "")) -> None:
        with self._news:
            old = self._saves
            if failed[0] < old.failed_step:
                failed = old.failed_step, old.failed
            self._saves = saves = Saves(max(old.requested, requested), max(old.durable, durable), *failed)
            self._news.notify_all()
        self._tell(saves)

    @property
    def saves(self) -> Saves:
        with self._news:
            return self._saves

    def finish(self, step: int, epoch: int) -> bool:
        """Save this state to disk, unless it was, and wait until this member's part is there; False when it is not."""
        if self._where is not None and max(self.saves.requested, self._on_disk_step) < step:
            self._due = Tier.DISK, step, epoch
            self.take()
        self.settle()
        self._until_written(step)
        self._retract()  # once more: it may have been under way
        return self.saves.failed_step < step

    def _retract(self) -> None:
        """Checkpoints that may hold a flipped bit are no checkpoints. One member's business."""
        epoch, step = self._wrong
        if self._where is None or self._role or not epoch:
            return
        bad = {(bad, of) for bad, _, of in self._bad}  # damaged, which is left for a person to look at
        try:
            Checkpoints(self._where).retract(
                lambda m: m.job == self._job and m.step > step and m.epoch <= epoch and (m.step, m.epoch) not in bad
            )
        except OSError as error:
            self._say(f"checkpoints after step {step} may be wrong, and cannot be marked so: {error}")

    def _until_written(self, step: int) -> None:
        """A vault that dies meanwhile tells nothing: it is asked now and then."""
        while True:
            with self._news:
                if self._news.wait_for(lambda: not self._writing, LOOK_S):
                    return
            try:
                self._vault.kept()
            except VaultError as error:
                with self._news:
                    self._writing.clear()
                self._note(failed=(step, str(error)))

    def _say(self, text: str) -> None:
        """Once each: a full disk would be told with every save."""
        if text not in self._said:
            self._said.add(text)
            print(f"everstep: {text}", file=sys.stderr)

    # The way back ---------------------------------------------------------------------------------------

    def kept(self) -> tuple[Kept, ...]:
        """What this node can give back, and what is complete on disk."""
        found: list[Kept] = []
        try:
            images = [each for each in self._vault.kept() if each.state is not State.BROKEN][-IN_MEMORY:]
            found += [Kept(each.step, each.shard, each.num_shards, each.epoch) for each in images]
        except VaultError as error:
            self._say(str(error))
        found += self._on_disk()
        return tuple(each for each in found if (each.step, each.shard, each.epoch) not in self._bad)

    def _on_disk(self) -> list[Kept]:
        if self._where is None:
            return []
        try:
            scan = Checkpoints(self._where).scan()
        except OSError as error:
            self._say(f"{self._where} cannot be read: {error}")
            return []
        for folder, why in scan.damaged:
            self._say(f"checkpoint {folder} is left out: {why}")
        steps = [step.manifest for step in scan.complete[:ON_DISK]]
        return [Kept(m.step, DISK, m.num_shards, m.epoch if m.job == self._job else 0) for m in steps]

    def restore(self, step: int, places: tuple[int, ...], epoch: int) -> bool:
        """Put the kept state into the objects. False, and it is left out from now on, when some of it is damaged."""
        mine = self._role % self._shards
        same = len(places) == self._shards
        try:
            with ExitStack() as stack:
                sources = (
                    self._from_disk(stack, step) if DISK in places else self._from_memory(stack, step, epoch, places)
                )
                sources = [source for source in sources if not same or source.index.shard == mine]
                self._plan = None
                restore.load(self._objects, sources)
        except (Damaged, OSError) as error:
            self._bad |= {(step, shard, epoch) for shard in ([DISK] if DISK in places else range(len(places)))}
            self._say(f"the kept state of step {step} cannot be used: {error}")
            return False
        except VaultError as error:  # it, or another node's, is gone: what it kept is not offered any more
            self._say(f"the kept state of step {step} cannot be fetched: {error}")
            return False
        if DISK in places:
            self._on_disk_step = step
        if self._epoch and self.saves.requested > step:  # replicas differed: it is written anew when it is made again
            self._again, self._wrong = self.saves.requested, (self._epoch, step)
            self._retract()
        self._tell(self.saves)
        return True

    def _from_disk(self, stack: ExitStack, step: int) -> list[Source]:
        assert self._where is not None
        return list(stack.enter_context(Checkpoints(self._where).reading(step)))

    def _from_memory(self, stack: ExitStack, step: int, epoch: int, places: Sequence[int]) -> list[Source]:
        sources: list[Source] = []
        for shard, role in enumerate(places):
            if len(places) == self._shards and shard != self._role % self._shards:
                continue
            if self._seats[role].node != self._seats[self._role].node:
                self._vault.pull(self._seats[role].vault, step, shard, len(places))
            source = stack.enter_context(self._vault.open(step, shard, len(places)))
            if source.index.epoch != epoch:
                raise Damaged(f"shard {shard} of step {step} is of epoch {source.index.epoch}, not {epoch}")
            sources.append(source)
        return sources

    def interrupt(self) -> None:
        """From any thread: what waits for the vault raises; it is asked anew next time."""
        self._vault.close()

    def close(self) -> None:
        self._vault.close()


class NotFinite(Exception):
    """State with a NaN or an infinity is never kept: it would push out the good one."""
