"""What a simulated job keeps of its state: a vault on each node, which outlives its workers, and a disk for all.

Its chances are its own, so that schedules without kept state stay as they are.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from everstep.core.saves import Saves, Tier
from everstep.train.kept import DISK, Kept

if TYPE_CHECKING:
    from everstep.testing.cluster import Cluster
    from everstep.testing.sessions import SimSession

SLOTS = 2  # images of one shard in a vault


class Image(NamedTuple):
    shard: int
    num_shards: int
    history: tuple[int, ...]

    @property
    def kept(self) -> Kept:
        return Kept(len(self.history), self.shard, self.num_shards, self.history[-1])


class Vaults:
    """Of one cluster. `keeps`: whether its sessions save anything."""

    def __init__(self, cluster: Cluster, chance: random.Random, keeps: bool) -> None:
        self.cluster = cluster
        self.chance = chance
        self.keeps = keeps
        self.nodes: dict[str, list[Image]] = {}
        self.disk: set[Image] = set()
        self.saves = Saves()

    def wish(self) -> Tier:
        """What one member votes for."""
        if not self.keeps:
            return Tier.NOTHING
        return self.chance.choices((Tier.NOTHING, Tier.MEMORY, Tier.DISK), (6, 3, 1))[0]

    def save(self, session: SimSession) -> None:
        """Its state is copied while it goes on: it may die before the copy is through."""
        member = session.member
        tier, role = member.keep, member.formation.role_of(session.worker.name) if member.formation else None
        image = Image((role or 0) % member.shards, member.shards, session.history)
        if tier is Tier.DISK:
            session.saves = Saves(len(image.history), session.saves.durable, session.saves.failed_step)
        if tier:
            late_s = self.chance.uniform(0.0, 0.1)
            self.cluster.clock.after(late_s, session.thread, self._keep, session, image, tier)

    def _keep(self, session: SimSession, image: Image, tier: Tier) -> None:
        if not self.cluster.agents[session.worker.agent.name].alive:
            return
        vault = self.nodes.setdefault(session.worker.agent.name, [])
        if image in vault:
            vault.remove(image)
        vault.append(image)
        alike = [each for each in vault if each.shard == image.shard]
        if len(alike) > SLOTS:
            vault.remove(alike[0])
        if tier is Tier.DISK:
            self.cluster.clock.after(self.chance.uniform(0.05, 1.0), self._write, session, image)

    def _write(self, session: SimSession, image: Image) -> None:
        step, said = len(image.history), session.saves
        if self.chance.random() < 0.1:
            session.saves = Saves(said.requested, said.durable, step, "disk full")
        else:
            self.disk.add(image)
            if self._complete(image):
                session.saves = Saves(said.requested, max(said.durable, step), said.failed_step, said.failed)
        session.thread(session.tell)

    def _complete(self, image: Image) -> bool:
        return all(image._replace(shard=shard) in self.disk for shard in range(image.num_shards))

    def lose(self, node: str) -> None:
        """Its vault died with it, or not: only the agent did."""
        if self.chance.random() < 0.5:
            self.nodes.pop(node, None)

    def seen_from(self, node: str) -> tuple[Kept, ...]:
        mine = [image.kept for image in self.nodes.get(node, ())]
        durable = [image.kept for image in self.disk if self._complete(image)]
        whole = {Kept(each.step, DISK, each.num_shards, each.epoch) for each in durable}
        return (*mine, *sorted(whole, key=lambda kept: (kept.step, kept.epoch)))

    def read(self, node: str, step: int, epoch: int, shard: int) -> tuple[int, ...] | None:
        """From that node's vault; "": from the disk. None: gone, or damaged."""
        images = self.nodes.get(node, ()) if node else self.disk
        found = [i.history for i in images if (i.kept.step, i.kept.epoch, i.shard) == (step, epoch, shard)]
        return found[0] if found and self.chance.random() > 0.05 else None
