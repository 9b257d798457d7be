"""What is kept in a world of `commit_model`: vaults of nodes, which outlive their workers, and a disk for all.

Worker i runs on node i modulo the number of members at the start, so a standby finds the vault of the one it follows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import astuple

from everstep.core.formation import Rollback
from everstep.core.saves import Tier
from everstep.train.commit import Member, audits
from everstep.train.kept import DISK, Kept
from everstep.train.protocol import Said
from everstep.train.resolve import Stand

from .commit_peer import Entry, claim

if TYPE_CHECKING:
    from .commit_model import Scenario

SLOTS = 2  # images that a vault keeps of one shard


class Saved(NamedTuple):
    step: int
    epoch: int
    shard: int
    history: tuple[Entry, ...]


class Keep(NamedTuple):
    """Of a whole world. `vaults`: by node, in the order of saving."""

    vaults: tuple[tuple[Saved, ...], ...]
    disk: frozenset[Saved] = frozenset()

    def saved(self, node: int, image: Saved, tier: Tier) -> Keep:
        others = [each for each in self.vaults[node] if each.shard != image.shard]
        alike = [each for each in self.vaults[node] if each.shard == image.shard and each != image]
        vault = (*others, *alike, image)
        vault = (*others, *vault[len(others) :][-SLOTS:])
        vaults = tuple(vault if i == node else old for i, old in enumerate(self.vaults))
        return Keep(vaults, self.disk | {image} if tier is Tier.DISK else self.disk)

    def without(self, node: int) -> Keep:
        return self._replace(vaults=tuple(() if i == node else old for i, old in enumerate(self.vaults)))

    def seen_from(self, node: int, shards: int) -> tuple[Kept, ...]:
        mine = {Kept(each.step, each.shard, shards, each.epoch) for each in self.vaults[node]}
        durable: dict[tuple[int, int], set[int]] = {}
        for each in self.disk:
            durable.setdefault((each.step, each.epoch), set()).add(each.shard)
        whole = {Kept(step, DISK, shards, epoch) for (step, epoch), parts in durable.items() if len(parts) == shards}
        return tuple(sorted(mine | whole, key=astuple))

    def read(self, node: int, goal: Stand, shard: int) -> tuple[Entry, ...] | None:
        """Node DISK: from there. None: it is not there any more."""
        where: Collection[Saved] = self.disk if node == DISK else self.vaults[node]
        wanted = goal.committed, goal.commit_epoch, shard
        return next((each.history for each in where if (each.step, each.epoch, each.shard) == wanted), None)


def wish(scenario: Scenario, member: Member) -> Tier:
    """What one of all wants to be saved of the next commit: that counts for all, unless the first one is busy."""
    assert member.formation is not None
    following = member.stand.committed + 1
    if following in scenario.busy and member.formation.seats[0].worker == member.worker:
        return Tier.BUSY
    if member.formation.seats[-1].worker != member.worker:
        return Tier.NOTHING
    return Tier.DISK if following in scenario.to_disk else Tier(following in scenario.to_memory)


def says(scenario: Scenario, member: Member, mark: int = 1, whole: int = 0) -> Said:
    """What it tells with its vote; a flipped bit is a mark of 2. `whole`: of its gradients, if they are wrong."""
    assert member.formation is not None
    if audits(member):
        share = (member.formation.role_of(member.worker) or 0) + member.turn
        whole = whole or 1 + share % len(member.formation.seats)
    following = member.stand.committed + 1
    check, audit = following in scenario.checks, following in scenario.audits
    if member.turn:
        return Said(turn=member.turn, whole=whole)
    return Said(check, mark if member.check else 0, whole=whole, audit=audit)


def check_restore(member: Member, stands: Sequence[Stand], commits: tuple[Entry, ...]) -> None:
    """Rightly decided: not all shards are held by live members, and of what is whole this is the newest."""
    goal = member.goal
    assert goal is not None
    held = {role % member.shards for role, stand in enumerate(stands) if stand.committed >= 0}
    doubted = any(stand.doubted for stand in stands)
    claim(doubted or len(held) < member.shards, "live state is given up", member, stands)
    failed = {commit for stand in stands for commit in stand.failed}
    there = whole_ones(stands, member.shards) - failed
    if doubted:
        trusted = max(stand.verified for stand in stands if stand.doubted)
        claim(goal.committed <= trusted or not held, "a state that may be wrong is restored", member, stands)
        there = {whole for whole in there if whole[0] <= trusted or goal.committed > trusted}
    for whole in there:
        dead_end = whole[0] >= len(commits) or commits[whole[0]][1:2] != whole[1:]
        claim(dead_end or whole[0] <= goal.committed, "a newer kept state is passed over", whole, goal)


def check_nothing_kept(member: Member, stands: Sequence[Stand], rollbacks: Sequence[Rollback]) -> None:
    kept = whole_ones(stands, member.shards) - {commit for stand in stands for commit in stand.failed}
    kept = {(step, epoch) for step, epoch in kept if not any(epoch < r.epoch and step > r.step for r in rollbacks)}
    claim(not kept, "lost although it is kept", member, kept)


def whole_ones(stands: Sequence[Stand], shards: int) -> set[tuple[int, int]]:
    """(step, epoch) of what these members' nodes could give back together."""
    found: dict[tuple[int, int], set[int]] = {}
    for stand in stands:
        for each in stand.kept:
            shards_of = set(range(shards)) if each.shard == DISK else {each.shard}
            found.setdefault((each.step, each.epoch), set()).update(shards_of)
    return {commit for commit, parts in found.items() if len(parts) == shards}
