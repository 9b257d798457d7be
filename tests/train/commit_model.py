"""A model of a whole job around the commit protocol: workers, their messages, deaths, a controller; explored in full.

A world is one global state. `Model.actions` lists everything that can happen next: a formation reaches a worker, in any
order; a round completes at one member, which others may never see; an optimizer finishes; a worker dies, between any
two of these; the controller notices. `commit_search` goes through these worlds.

`commit_peer` is one worker. Local states and messages are interned, so a world is a tuple of numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

from msgspec.structs import replace

from everstep.core.formation import Formation, Rollback, Seat
from everstep.core.saves import Tier
from everstep.train import protocol as p
from everstep.train.commit import FINAL, Member, Phase, audits
from everstep.train.resolve import Stand

from .commit_peer import Entry, Message, Peer, carry_out, claim, index_of, moment, name, reach
from .commit_vaults import Keep, Saved, check_nothing_kept, check_restore, says, wish


class Scenario(NamedTuple):
    """What may happen. `plans`: kinds of planned changes, in this order: "join", "leave", "swap"."""

    members: int
    standbys: int = 0
    steps: int = 2
    deaths: int = 0
    fences: int = 0  # live workers taken for dead
    returns: bool = False  # and seated again, against the rules, if no fence reached them
    blips: int = 0  # aborts with the same members: a link broke
    plans: tuple[str, ...] = ()
    nonfinite: str = "never"  # "always", or "mixed": each member's flag is free
    eager: bool = True  # what a worker does alone, without effect on others until a round completes, happens at once
    started: bool = True
    stray_floor: bool = False  # the controller may know less than what was committed
    to_memory: tuple[int, ...] = ()  # steps which are kept in the vaults of nodes
    to_disk: tuple[int, ...] = ()
    busy: tuple[int, ...] = ()  # steps at whose end the first member's last image is still on its way to other nodes
    node_deaths: bool = False  # a death may take the node's vault along
    damages: int = 0  # kept states that cannot be restored
    deaf: bool = False  # the controller never hears of a rollback
    checks: tuple[int, ...] = ()  # steps after which states are compared, beside those that are kept
    flips: int = 0  # times that a member's state is another one than its replicas'
    audits: tuple[int, ...] = ()  # steps which are computed twice
    slips: int = 0  # times that a member has wrong gradients in one pass of such a step
    shards: int = 1  # then a dead one's role waits for a spare, and there are no plans


class World(NamedTuple):
    peers: tuple[int, ...]
    sent: frozenset[int]
    formations: tuple[int, ...]
    commits: tuple[Entry, ...]  # the job's history: what was ever committed, by whomever
    fenced: frozenset[int] = frozenset()
    deaths: int = 0
    fences: int = 0
    blips: int = 0
    plans: int = 0
    damages: int = 0
    flips: int = 0
    slips: int = 0
    keep: Keep = Keep(())
    rollbacks: tuple[Rollback, ...] = ()
    most: int = 0  # steps that were ever committed


class Table:
    """Numbers for values."""

    def __init__(self) -> None:
        self.ids: dict[Hashable, int] = {}
        self.items: list[Any] = []

    def __call__(self, item: Hashable) -> int:
        number = self.ids.setdefault(item, len(self.items))
        if number == len(self.items):
            self.items.append(item)
        return number


class Model:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.size = scenario.members + scenario.standbys
        self.peers, self.messages, self.formations, self.histories = Table(), Table(), Table(), Table()
        self.memo: dict[tuple[Any, ...], tuple[int, tuple[int, ...], Entry | None]] = {}

    def initial(self) -> World:
        s = self.scenario
        peers = tuple(self.peers(self._fresh(i)) for i in range(self.size))
        world = World(peers, frozenset(), (), (), deaths=s.deaths, fences=s.fences, blips=s.blips)
        world = world._replace(damages=s.damages, flips=s.flips, slips=s.slips, keep=Keep(((),) * s.members))
        world = self.issue(world, tuple(range(s.members)), abort=False)
        while s.started and any(
            self.peers.items[world.peers[i]].member.phase not in (Phase.READY, Phase.COMPUTING)
            for i in range(s.members)
        ):
            world = next(w for _, reliable, w in self.actions(world) if reliable)
        return world

    def _fresh(self, index: int) -> Peer:
        """The parts of a sharded initial state belong together: they follow from the script alone."""
        shards = self.scenario.shards
        return Peer(Member(name(index), shards=shards), (("init", name(index) if shards == 1 else "the script"),))

    def issue(self, world: World, seats: tuple[int, ...], abort: bool, **changes: Any) -> World:
        floor = 0 if self.scenario.stray_floor else max(len(world.commits) - 1, 0)
        known = () if self.scenario.deaf else world.rollbacks
        floor = world.most if self.scenario.deaf else floor
        seated = tuple(Seat(name(i), f"n{i}", f"n{i}", f"n{i}:1") for i in seats)
        formation = Formation(len(world.formations) + 1, seated, abort, floor, rollbacks=known)
        return world._replace(formations=(*world.formations, self.formations((formation, seats))), **changes)

    # One worker ------------------------------------------------------------------------------------------

    def feed(self, number: int, key: tuple[Any, ...], event: p.Event) -> tuple[int, tuple[int, ...], Entry | None]:
        """The worker after the event, the messages it sends, and what it committed."""
        known = self.memo.get((number, *key))
        if known is None:
            peer, sends, committed = carry_out(self.peers.items[number], event)
            known = self.peers(peer), tuple(map(self.messages, sends)), committed
            self.memo[(number, *key)] = known
        return known

    # The world -------------------------------------------------------------------------------------------

    def become(self, world: World, index: int, key: tuple[Any, ...], event: p.Event) -> World:
        """The world once this worker took the event, and did what follows at once."""
        number, sends, committed = self.feed(world.peers[index], key, event)
        peers = list(world.peers)
        peers[index] = number
        world = world._replace(peers=tuple(peers))
        peer = self.peers.items[number]
        if committed and committed[0] == "back":
            world = self._rolled_back(world, peer, committed[1], committed[2])
        elif committed:
            world = world._replace(commits=self._committed(world, index, committed))
            world = self._save(world, index)._replace(most=max(world.most, len(world.commits) - 1))
        world = world._replace(sent=world.sent.union(self._with_kept(world, index, each) for each in sends))
        if peer.member.phase is Phase.LOST:
            self._check_loss(world, peer.member, event)
        if peer.member.phase is Phase.RESTORING and isinstance(event, p.Stood):
            check_restore(peer.member, event.stands, world.commits)
        if self.scenario.eager:
            for step in self._alone(world, index):
                return self.become(world, index, *step)
        if isinstance(event, p.Began):
            grad = Message("grad", peer.member.epoch, moment(peer.member), peer.member.worker, peer.history)
            world = world._replace(sent=world.sent | {self.messages(grad)})
        return world

    def _committed(self, world: World, index: int, entry: Entry) -> tuple[Entry, ...]:
        peer: Peer = self.peers.items[world.peers[index]]
        if entry[0] == "init":
            claim(peer.member.formation.floor == 0, "from scratch though steps are known to be committed", peer)
            return (entry,)
        history = peer.history
        place = entry[0] + 1
        if history[0] != world.commits[0] or self.scenario.returns:
            claim(index in world.fenced or self.scenario.returns, "commit of a job that is no more", history)
            return world.commits
        if self.scenario.nonfinite == "mixed":  # whom nobody outlived may have skipped what survivors apply
            entry = entry[:3]
        claim(world.commits[place : place + 1] in ((), (entry,)), "a step committed twice", entry, world.commits)
        if place < len(world.commits):
            return world.commits
        _, seats = self.formations.items[world.formations[entry[1] - 1]]
        others = [self.peers.items[world.peers[i]] for i in seats if i in self.able(world)]
        claim(all(reach(peer) > place for peer in others), "committed before all could", entry, others)
        return (*world.commits, entry)

    def _rolled_back(self, world: World, peer: Peer, step: int, epoch: int) -> World:
        """All went back, as the first one that knows it tells."""
        if world.rollbacks and world.rollbacks[-1].epoch == epoch:
            claim(world.rollbacks[-1].step == step, "restored different steps", world.rollbacks, step)
            return world
        forgotten = self.scenario.deaf and len(world.rollbacks) > 0  # by whoever knew of an earlier one
        claim(forgotten or peer.history == world.commits[: step + 1], "restored what is no more", peer, world.commits)
        return world._replace(commits=peer.history, rollbacks=(*world.rollbacks, Rollback(epoch, step)))

    def _save(self, world: World, index: int) -> World:
        peer: Peer = self.peers.items[world.peers[index]]
        member = peer.member
        if not member.keep or member.stand.committed < 1 or index in world.fenced:
            return world
        role = member.formation.role_of(member.worker) or 0
        hurried = member.keep is Tier.MEMORY and member.stand.committed in self.scenario.busy
        claim(not hurried, "kept while the last image is on its way", member)
        image = Saved(member.stand.committed, member.stand.commit_epoch, role % member.shards, peer.history)
        return world._replace(keep=world.keep.saved(self.node(index), image, member.keep))

    def node(self, index: int) -> int:
        return index % self.scenario.members

    def _with_kept(self, world: World, index: int, number: int) -> int:
        message: Message = self.messages.items[number]
        if message.kind != "stand" or not (self.scenario.to_memory or self.scenario.to_disk):
            return number
        kept = world.keep.seen_from(self.node(index), self.scenario.shards)
        return self.messages(message._replace(payload=replace(message.payload, kept=kept)))

    def _check_loss(self, world: World, member: Member, event: p.Event) -> None:
        """Rightly called lost: nobody who has a seat holds what is known to be committed, or can get there."""
        assert isinstance(event, p.Stood)
        check_nothing_kept(member, event.stands, world.rollbacks)
        floor = member.formation.floor
        seated = [self.peers.items[world.peers[index_of(seat.worker)]] for seat in member.formation.seats]
        held = {role % member.shards for role, peer in enumerate(seated) if peer.member.stand.committed >= 0}
        if len(held) < member.shards and member.shards > 1:
            return
        for peer in seated:
            claim(not peer.alive or reach(peer) <= floor or self.scenario.returns, "not lost", peer, member)

    def round(self, world: World, kind: str, epoch: int, step: int, formation: Formation) -> list[Message]:
        """Messages of one round by role, fewer than seats while it is not complete."""
        found = {}
        for number in world.sent:
            message = self.messages.items[number]
            if message.kind == kind and message.epoch == epoch and message.step == step:
                found[message.sender] = message
        return [found[seat.worker] for seat in formation.seats if seat.worker in found]

    def _alone(self, world: World, index: int) -> Iterator[tuple[tuple[Any, ...], p.Event]]:
        """Events this worker brings about without any other."""
        peer: Peer = self.peers.items[world.peers[index]]
        member = peer.member
        if not peer.alive or member.phase in FINAL:
            return
        if member.phase is Phase.READY and member.stand.committed < self.scenario.steps:
            yield ("began",), p.Began(member.epoch)
        coming = member.entering or member.planned
        if coming and peer.opening == coming.epoch != member.prepared:
            yield ("prepared", coming.epoch), p.Prepared(coming.epoch)

    def _together(self, world: World, index: int) -> Iterator[tuple[bool, tuple[Any, ...], p.Event]]:
        """Events that need messages of others. True: their senders live, so they cannot have been lost."""
        member: Member = self.peers.items[world.peers[index]].member
        if member.phase is Phase.APPLYING:
            yield True, ("applied",), p.Applied()
        kind = {Phase.COMPUTING: "grad", Phase.VOTING: "vote", Phase.RESOLVING: "stand"}.get(member.phase)
        if member.formation is None or member.entering is not None:
            return
        living = {
            seat.worker: self.peers.items[world.peers[index_of(seat.worker)]].alive for seat in member.formation.seats
        }
        if member.phase is Phase.FETCHING:
            role = member.formation.role_of(member.worker)
            for number in world.sent:
                message = self.messages.items[number]
                if message.kind == "state" and message.epoch == member.epoch and role in message.payload[0]:
                    yield living[message.sender], ("fetched", number), p.Fetched(member.epoch)
        elif member.phase is Phase.RESTORING:
            yield from self._restores(world, index)
        elif kind:
            step = -1 - member.round if kind == "stand" else moment(member)
            messages = self.round(world, kind, member.epoch, step, member.formation)
            if len(messages) == len(living):
                for event in self._completions(member, messages, world):
                    yield all(living.values()), (kind, event), event

    def _restores(self, world: World, index: int) -> Iterator[tuple[bool, tuple[Any, ...], p.Event]]:
        """What is still there is read; it may be damaged. Of other shards that are saved a member needs nothing."""
        peer: Peer = self.peers.items[world.peers[index]]
        member, wanted = peer.member, peer.restoring
        shard = member.formation.role_of(member.worker) % member.shards
        place = wanted.places[shard]
        node = place if place < 0 else self.node(index_of(member.formation.seats[place].worker))
        history = world.keep.read(node, wanted.goal, shard)
        if history is not None:
            number = self.histories(history)
            yield True, ("restored", number), p.Restored(member.epoch, True, number)
        else:
            yield True, ("gone",), p.Restored(member.epoch, False)
        if history is not None and world.damages:
            yield False, ("damaged",), p.Restored(member.epoch, False)

    def _completions(self, member: Member, messages: list[Message], world: World) -> Iterator[p.Event]:
        payloads = tuple(message.payload for message in messages)
        if messages[0].kind == "vote":
            yield p.Voted(member.epoch, payloads)
        elif messages[0].kind == "stand":
            yield p.Stood(member.epoch, payloads)
        else:
            claim(len(set(payloads)) == 1, "gradients of different parameters are summed", payloads)
            if self.scenario.nonfinite != "always":
                yield p.Reduced(member.epoch, True, wish(self.scenario, member), says(self.scenario, member))
            if self.scenario.nonfinite != "never":
                yield p.Reduced(member.epoch, False, wish(self.scenario, member))
            if world.flips and member.check and not member.turn:
                yield p.Reduced(member.epoch, True, wish(self.scenario, member), says(self.scenario, member, mark=2))
            if world.slips and audits(member):
                yield p.Reduced(member.epoch, True, wish(self.scenario, member), says(self.scenario, member, whole=99))

    def actions(self, world: World) -> Iterator[tuple[str, bool, World]]:
        """Everything that can happen: what, whether it is bound to happen if nothing else does, the world after it."""
        for index, number in enumerate(world.peers):
            peer: Peer = self.peers.items[number]
            if not peer.alive or peer.member.phase in FINAL:
                continue
            for formation_id in world.formations:
                formation = self.formations.items[formation_id][0]
                key, event = ("formation", formation_id), p.FormationReceived(formation)
                if self.feed(number, key, event)[0] != number:
                    yield f"{index} told of {formation.epoch}", True, self.become(world, index, key, event)
            if not self.scenario.eager:
                for key, event in self._alone(world, index):
                    yield f"{index} {key}", True, self.become(world, index, key, event)
            for reliable, key, event in self._together(world, index):
                before = self._receive(world, index, key, event, peer)
                yield f"{index} {key[0]}", reliable, self._tidy(self.become(before, index, key, event))
        yield from self._deaths(world)
        yield from self._controller(world)

    def _receive(self, world: World, index: int, key: tuple[Any, ...], event: p.Event, peer: Peer) -> World:
        """The world in which the data of the event lie in this worker's memory."""
        member = peer.member
        if isinstance(event, p.Reduced):
            workers = tuple(seat.worker for seat in member.formation.seats)
            if not member.turn:
                peer = peer._replace(grads=(member.stand.committed, member.epoch, workers, False))
            world = world._replace(
                flips=world.flips - (event.said.mark == 2), slips=world.slips - (event.said.whole == 99)
            )
        elif isinstance(event, p.Fetched):
            peer = peer._replace(history=self.messages.items[key[1]].payload[1])
        elif key[0] == "restored":
            peer = peer._replace(history=self.histories.items[key[1]])
        elif key[0] == "damaged":
            return world._replace(damages=world.damages - 1)
        else:
            return world
        peers = list(world.peers)
        peers[index] = self.peers(peer)
        return world._replace(peers=tuple(peers))

    def _tidy(self, world: World) -> World:
        """Without the messages nobody can read any more."""
        readers = [
            peer.member
            for peer in map(self.peers.items.__getitem__, world.peers)
            if peer.alive and peer.member.phase not in FINAL
        ]
        oldest = min((m.epoch for m in readers if m.formation), default=0)
        done = {}
        for m in readers:
            done[m.epoch] = min(done.get(m.epoch, 999), moment(m))
        newest = max(done, default=0)
        kept = [
            n
            for n in world.sent
            if (m := self.messages.items[n]).epoch >= oldest
            and (m.step < 0 or m.epoch > newest or (m.epoch in done and m.step >= done[m.epoch]))
        ]
        return world if len(kept) == len(world.sent) else world._replace(sent=frozenset(kept))

    def living(self, world: World) -> list[int]:
        """Workers that have a seat, or had one, and can act."""
        seated = {i for number in world.formations for i in self.formations.items[number][1]}
        return [i for i in self.able(world) if i in seated]

    def able(self, world: World) -> list[int]:
        peers = [self.peers.items[number] for number in world.peers]
        return [
            i
            for i, peer in enumerate(peers)
            if peer.alive and peer.member.phase not in FINAL and (self.scenario.returns or i not in world.fenced)
        ]

    def _deaths(self, world: World) -> Iterator[tuple[str, bool, World]]:
        if world.deaths:
            for index in self.living(world):
                peers = list(world.peers)
                peer = self.peers.items[peers[index]]
                peers[index] = self.peers(Peer(Member(peer.member.worker), None, alive=False))
                dead = world._replace(peers=tuple(peers), deaths=world.deaths - 1)
                yield f"{index} dies", False, self._tidy(dead)
                if self.scenario.node_deaths:
                    gone = dead._replace(keep=dead.keep.without(self.node(index)))
                    yield f"{index} dies with its node", False, self._tidy(gone)

    def _controller(self, world: World) -> Iterator[tuple[str, bool, World]]:
        _, seats = self.formations.items[world.formations[-1]]
        living = self.living(world)
        spares = [i for i in self.able(world) if i not in living]
        if not living and not spares:
            return
        missing = sum(i not in living for i in seats)
        if self.scenario.shards > 1 and missing > len(spares):
            return
        if missing or self._leaver_died(world):
            yield "reform", True, self._reform(world, seats, living, spares)
        if self._doubting(world):
            yield "all back", True, self._reform(world, seats, living, spares)
        if world.blips:
            yield "blip", False, self._reform(world, seats, living, spares, blips=world.blips - 1)
        if world.fences:
            for index in (i for i in seats if i in living and len(living) > 1):
                others = [i for i in living if i != index]
                changes = {"fences": world.fences - 1, "fenced": world.fenced | {index}}
                yield f"fence {index}", False, self._reform(world, seats, others, spares, **changes)
        if self.scenario.returns and world.fenced:
            back = [i for i in living if i in world.fenced and i not in seats]
            if back:
                changes = {"fenced": frozenset()}
                yield f"back {back}", False, self._reform(world, seats, living, spares, **changes)
        if world.plans < len(self.scenario.plans) and self._settled(world):
            kind = self.scenario.plans[world.plans]
            for new in _changes(kind, seats, spares):
                yield f"{kind} {new}", False, self.issue(world, new, abort=False, plans=world.plans + 1)

    def _reform(
        self, world: World, seats: tuple[int, ...], living: list[int], spares: list[int], **changes: Any
    ) -> World:
        """An abort formation: spares take the places of the dead, leavers and joiners under way are seated."""
        waiting = iter(spares)
        new = [i if i in living else next(waiting, None) for i in seats]
        new = [i for i in new if i is not None] + [i for i in living if i not in seats]
        return self.issue(world, tuple(new), abort=True, **changes)

    def _leaver_died(self, world: World) -> bool:
        """Before all others were through with the change: they may wait for it in the epoch before."""
        if self.formations.items[world.formations[-1]][0].abort or len(world.formations) < 2 or self._settled(world):
            return False
        _, before = self.formations.items[world.formations[-2]]
        return any(not self.peers.items[world.peers[i]].alive for i in before)

    def _doubting(self, world: World) -> bool:
        """Members wait for a formation in which all go back."""
        formation, seats = self.formations.items[world.formations[-1]]
        members = [self.peers.items[world.peers[i]].member for i in seats]
        waiting = [m for m in members if m.phase is Phase.DOUBTING and m.entering is None]
        return any(m.epoch == formation.epoch or not formation.abort for m in waiting)

    def _settled(self, world: World) -> bool:
        """Every seat of the newest formation reported to be in it."""
        formation, seats = self.formations.items[world.formations[-1]]
        members = [self.peers.items[world.peers[i]].member for i in seats]
        return all(m.epoch == formation.epoch and m.entering is None and m.phase not in FINAL for m in members)

    # What must hold --------------------------------------------------------------------------------------

    def check(self, world: World) -> None:
        """Whoever can act holds a prefix of the same history, as long as its stand says."""
        longest: tuple[Entry, ...] = ()
        for index, number in enumerate(world.peers):
            peer: Peer = self.peers.items[number]
            stand: Stand = peer.member.stand
            if index in world.fenced or not peer.alive or peer.member.phase in FINAL or stand.committed < 0:
                continue
            history = peer.history or ()
            claim(len(history) == stand.committed + 1, "a stand that is not what the worker has", peer)
            valid = not world.rollbacks or history == world.commits[: len(history)]
            claim(valid, "state of a job that was rolled back", peer, world.commits)
            short, long = sorted((history, longest), key=len)
            if not (self.scenario.returns and peer.member.epoch < max(self._epochs(world))):
                claim(long[: len(short)] == short, "two histories", history, longest)
                longest = long

    def _epochs(self, world: World) -> list[int]:
        return [self.peers.items[n].member.epoch for n in world.peers if self.peers.items[n].alive]

    def finished(self, world: World) -> bool:
        """Nothing is left to do: all steps are committed, or the state is lost, or nobody is left."""
        formation, seats = self.formations.items[world.formations[-1]]
        peers = [self.peers.items[number] for number in world.peers]
        if any(peer.member.phase is Phase.LOST for peer in peers if peer.alive) or not self.living(world):
            return True
        if not all(peers[i].alive for i in seats):
            return self.scenario.shards > 1 and not any(label == "reform" for label, *_ in self._controller(world))
        committed = [self._at_end(peers[i].member, formation) for i in self.living(world)]
        return all(committed)

    def _at_end(self, member: Member, formation: Formation) -> bool:
        """Through with all steps, in the newest epoch; or a change to it was planned when no step was left to make."""
        if not formation.abort and member.formation and member.phase is Phase.RESOLVING:
            return member.stand.committed < 0
        planned = member.planned is not None and member.planned.epoch == formation.epoch
        through = member.phase is Phase.READY and member.stand.committed == self.scenario.steps
        return through and (member.epoch == formation.epoch or planned)


def _changes(kind: str, seats: tuple[int, ...], spares: list[int]) -> Iterator[tuple[int, ...]]:
    if kind == "join" and spares:
        yield (*seats, spares[0])
    elif kind == "leave" and len(seats) > 1:
        yield from (tuple(i for i in seats if i != leaver) for leaver in seats)
    elif kind == "swap" and spares:
        yield from (tuple(spares[0] if i == leaver else i for i in seats) for leaver in seats)
