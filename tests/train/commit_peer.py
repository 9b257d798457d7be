"""One worker of `commit_model`: carries out the commands of the protocol on a model of parameters and gradients.

Parameters are their history: the initial state and every commit applied since. A commit is its step, the epoch, the
members whose samples went in, and whether it was skipped.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from everstep.train import commit
from everstep.train import protocol as p
from everstep.train.commit import FINAL, Member, Phase

Entry = tuple[Any, ...]  # (step, epoch, members, skipped), or the initial state: ("init", worker)


class Violation(AssertionError):
    """An invariant does not hold."""


def claim(holds: bool, what: str, *seen: object) -> None:
    if not holds:
        raise Violation(f"{what}: {', '.join(map(repr, seen))}")


class Peer(NamedTuple):
    """A worker with its parameters and gradients. `history` None: overwritten in part."""

    member: Member
    history: tuple[Entry, ...] | None
    grads: Entry | None = None
    opening: int = 0  # epoch whose links are being opened
    alive: bool = True
    restoring: p.Restore | None = None


class Message(NamedTuple):
    kind: str  # "grad", "vote", "stand", "state"
    epoch: int
    step: int  # below 0 for those which do not belong to a step: -1 for the first of an epoch
    sender: str
    payload: Any


def reach(peer: Peer) -> int:
    """Length of the history this worker has, or could have at once."""
    return len(peer.history or ()) + (peer.grads is not None)


def name(index: int) -> str:
    return f"n{index}/0#1"


def moment(member: Member) -> int:
    """Of a step, and of a pass of it."""
    return 8 * max(member.stand.committed, 0) + len(member.passes)


def index_of(worker: str) -> int:
    return int(worker[1 : worker.index("/")])


def carry_out(peer: Peer, event: p.Event) -> tuple[Peer, list[Message], Entry | None]:
    old = peer.member
    member, commands = commit.step(old, event)
    claim(member.epoch >= old.epoch, "a worker goes back to an epoch", old, event)
    committed = None
    if isinstance(event, p.Voted) and member.formation is not None and member.entering is None:
        _check_doubt(old, event, commands)
        if member.phase is Phase.READY and member.stand.committed == old.stand.committed:
            peer = peer._replace(grads=None)  # a pass that nobody commits
    if isinstance(event, p.Applied):
        claim(peer.grads is not None and peer.history is not None, "applied without gradients or state", old)
        claim(old.phase in FINAL or member.stand.commit_epoch == peer.grads[1], "commit of another epoch", member)
        committed, peer = peer.grads, peer._replace(history=(*peer.history, peer.grads), grads=None)
    elif isinstance(event, p.Fetched):
        claim(old.phase is not Phase.FETCHING or peer.history is not None, "fetched nothing", old)
    elif member.stand.committed > old.stand.committed >= 0:
        claim(peer.grads is not None and member.stand.skipped, "a commit out of nothing", old, event)
        committed = (*peer.grads[:3], True)
        peer = peer._replace(history=(*peer.history, committed))
    elif member.stand.committed > old.stand.committed and isinstance(event, p.Stood) and old.round:
        claim(peer.history is not None, "restored nothing", old)
        committed = ("back", member.stand.committed, member.epoch)
    elif member.stand.committed > old.stand.committed:
        claim(peer.history is not None, "a torn initial state founds the job", old)
        committed = peer.history[0]
    sends: list[Message] = []
    for command in commands:
        peer = _command(peer, old, member, command, sends)
    return peer._replace(member=member), sends, committed


def _check_doubt(old: Member, event: p.Voted, commands: tuple[p.Command, ...]) -> None:
    doubts = [command for command in commands if isinstance(command, p.Doubt)]
    marks = [vote.said.mark for vote in event.votes]
    differ = any(len({*marks[shard :: old.shards]} - {0}) > 1 for shard in range(old.shards))
    doubted = any(doubt.found is None for doubt in doubts)
    claim(differ == doubted, "a commit although replicas differ, or none without that", old)
    slips = any(99 in each.traces for each in old.passes) or any(vote.said.whole == 99 for vote in event.votes)
    claim(slips or doubted == bool(doubts), "an audit finds what is not there", old)


def _shard(member: Member) -> int:
    return member.formation.role_of(member.worker) % member.shards


def _command(peer: Peer, old: Member, member: Member, command: p.Command, sends: list[Message]) -> Peer:
    match command:
        case p.Prepare(formation=formation):
            return peer._replace(opening=formation.epoch)
        case p.Switch(formation=formation):
            claim(formation.epoch > old.epoch, "switch to an old epoch", old)
            claim(member.prepared == formation.epoch, "switch to links that are not open", old)
        case p.PublishStand(epoch=epoch, stand=stand, round=round_):
            sends.append(Message("stand", epoch, -1 - round_, member.worker, stand))
        case p.CastVote(epoch=epoch, vote=vote):
            sends.append(Message("vote", epoch, moment(member), member.worker, vote))
        case p.Apply(step=step):
            claim(peer.grads is not None and peer.grads[0] == step, "apply without gradients of the step", old)
        case p.DropGradients():
            return peer._replace(grads=None)
        case p.Fetch(source=source):
            claim(_shard(member) == source % member.shards, "the state of another shard is copied", member, source)
            return peer._replace(history=None, grads=None)
        case p.Restore():
            claim(len(command.places) == member.shards, "restored in another number of shards", command)
            return peer._replace(history=None, grads=None, restoring=command)
        case p.Serve(epoch=epoch, roles=roles):
            theirs = {role % member.shards for role in roles}
            claim(theirs == {_shard(member)}, "another shard is served", member, roles)
            sends.append(Message("state", epoch, -1, member.worker, (roles, peer.history)))
        case p.Ready(step=step):
            claim(peer.history is not None, "ready with a torn state", old)
            steps = [entry[0] for entry in peer.history[1:]]
            claim(steps == list(range(step)), "a step is missing or double", old, peer.history)
    return peer
