"""An examination of several nodes: one hosts it, all attend, and everybody hears what came out.

Each node examines itself and brings its readings. The host then asks for rings (probe.ring), pairs and rows and columns
of a grid, until it is known who is slow (detect.grouping). Links are those of the control plane: proven with the
token, encrypted where wanted; a node that goes away fails its rings and no others.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence

from everstep.control.link import Link
from everstep.control.transport import Server, backoff, connect
from everstep.core import wire
from everstep.core.checkup import Arrived, Complaint, Examined, GroupSeen, Place, Reading, RingAsked, RingDone
from everstep.core.errors import Unreachable, UsageError
from everstep.detect import grouping, health
from everstep.probe.ring import SETUP_S, STALL_S, Rings

NAME = "doctor"  # in place of a job's
FOLLOWUPS = 2  # rounds of questions after the planned ones
TRIES = 3  # of a ring, before it counts as slow


class Clinic:
    """The host's side."""

    def __init__(self, num_nodes: int, bars: health.Bars, seconds: float) -> None:
        self.num_nodes, self.bars, self.seconds = num_nodes, bars, seconds
        self.present: dict[str, Link] = {}
        self.arrived: dict[str, Arrived] = {}
        self.complete = asyncio.Event()
        self.awaited: dict[tuple[str, int], asyncio.Future[RingDone]] = {}
        self.rings = 0
        self.rates: list[dict[grouping.Group, float]] = []  # of each stage
        self.whys: dict[grouping.Group, str] = {}

    async def host(self, listener: socket.socket, token: bytes, tls: ssl.SSLContext | None, wait_s: float) -> Examined:
        """Serve until all have come and are examined. Raises Unreachable when some do not come in time."""
        server = Server(listener, token, NAME, self._on_link, tls=tls)
        await server.start()
        try:
            try:
                async with asyncio.timeout(wait_s):
                    await self.complete.wait()
            except TimeoutError as error:
                here = ", ".join(sorted(self.arrived)) or "none"
                raise Unreachable(f"of {self.num_nodes} nodes these came within {wait_s:g} s: {here}") from error
            examined = await self._examine()
            for link in self.present.values():
                link.send(examined)
            return examined
        finally:
            await server.close()

    async def _on_link(self, link: Link, hello: wire.Hello) -> None:
        if hello.node in self.present or len(self.present) >= self.num_nodes:
            link.close(f"node {hello.node} is here already, or {self.num_nodes} others are: give each a --name")
            return
        self.present[hello.node] = link
        async for message in link:
            match message:
                case Arrived():
                    self.arrived[hello.node] = message
                    if len(self.arrived) == self.num_nodes:
                        self.complete.set()
                case RingDone(number) if (hello.node, number) in self.awaited:
                    self._answer(hello.node, number, message)
        self._left(hello.node, link.ended)

    def _answer(self, node: str, number: int, done: RingDone) -> None:
        future = self.awaited.pop((node, number))
        if not future.done():
            future.set_result(done)

    def _left(self, node: str, why: str) -> None:
        if not self.complete.is_set():  # another may come in its place
            del self.present[node]
            self.arrived.pop(node, None)
        for name, number in list(self.awaited):
            if name == node:
                self._answer(node, number, RingDone(number, 0.0, why=f"{node} left: {why}"))

    # The examination ------------------------------------------------------------------------------------

    async def _examine(self) -> Examined:
        names = sorted(self.arrived)
        for stage in grouping.stages(names):
            await self._stage(stage)
        for _ in range(FOLLOWUPS):
            tests = self._tests()
            more = grouping.followup(grouping.judge(tests), tests)
            if not more:
                break
            await self._stage(more)
        return self._conclude(names)

    def _tests(self) -> dict[grouping.Group, bool]:
        failed = grouping.failed(self.rates, self.bars.slow)
        return {group: group not in failed for stage in self.rates for group in stage}

    async def _stage(self, stage: grouping.Stage) -> None:
        """Rings of a stage that were not run before. Who fails may try again: a neighbour's burst is no bad link."""
        known = {frozenset(group) for rates in self.rates for group in rates}
        rates: dict[grouping.Group, float] = {}
        self.rates.append(rates)
        wanted = {group for groups in stage for group in groups if frozenset(group) not in known}
        for _ in range(TRIES):
            for groups in stage:
                chosen = [group for group in groups if group in wanted]
                for group, rate in zip(chosen, await asyncio.gather(*map(self._ring, chosen)), strict=True):
                    rates[group] = max(rate, rates.get(group, 0.0))
            wanted &= grouping.failed(self.rates, self.bars.slow)

    async def _ring(self, group: grouping.Group) -> float:
        """Bytes per second of the slowest member; 0 when the ring failed, or anything came changed."""
        self.rings += 1
        number, loop = self.rings, asyncio.get_running_loop()
        places = tuple(self.arrived[name].place for name in group)
        futures = [loop.create_future() for _ in group]
        self.awaited.update({(name, number): future for name, future in zip(group, futures, strict=True)})
        for name in group:
            if not self.present[name].send(RingAsked(number, places, self.seconds)):
                self._left(name, self.present[name].ended)
        done, late = await asyncio.wait(futures, timeout=self.seconds + SETUP_S + STALL_S * len(group))
        for name in group:
            self.awaited.pop((name, number), None)
        answers: list[RingDone] = [future.result() for future in done]
        whys = [a.why or f"{a.wrong} chunks came changed" for a in answers if a.why or a.wrong]
        whys += ["no answer in time"] if late else []
        if whys:
            self.whys[group] = "; ".join(sorted(set(whys)))
            return 0.0
        self.whys.pop(group, None)
        return min(answer.rate for answer in answers)

    def _conclude(self, names: Sequence[str]) -> Examined:
        tests = self._tests()
        judged = grouping.judge(tests)
        readings = {name: self.arrived[name].readings for name in names}
        complaints = {}
        for name in names:
            others = [readings[other] for other in names if other != name]
            found = list(health.judge(readings[name], self.bars, others))
            if name in judged.bad or name in judged.perhaps:
                found.append(self._slow_network(name, tests, sure=name in judged.bad))
            if found:
                complaints[name] = tuple(found)
        groups = tuple(GroupSeen(group, rate, tests[group]) for stage in self.rates for group, rate in stage.items())
        return Examined(readings, complaints, groups, judged.links)

    def _slow_network(self, name: str, tests: dict[grouping.Group, bool], sure: bool) -> Complaint:
        rates = {group: rate for stage in self.rates for group, rate in stage.items()}
        own = [group for group in rates if name in group and not tests[group]]
        best = max(own, key=lambda group: rates[group])
        usual = max(rates.values())
        said = f"at most {health.amount(rates[best], 'B/s')}, the best ring had {health.amount(usual, 'B/s')}"
        said += f" ({self.whys[best]})" if best in self.whys else ""
        prefix = "" if sure else f"{' or '.join(dict.fromkeys(n for group in own for n in group))}: "
        return Complaint("network.rate", f"{prefix}rings to other nodes: {said}", rates[best] <= 0, sure)


class Attendance:
    """A node's side. `address`: where its rings listen; empty: the one that the host sees it by. `advertised`: where
    the others reach that, when it is elsewhere (a port of a container that is mapped)."""

    def __init__(self, node: str, token: bytes, tls: ssl.SSLContext | None, wait_s: float) -> None:
        self.node, self.token, self.tls, self.wait_s = node, token, tls, wait_s

    async def attend(
        self,
        host: str,
        port: int,
        readings: Sequence[Reading],
        address: tuple[str, int] = ("", 0),
        advertised: tuple[str, int] | None = None,
    ) -> Examined:
        """What came out. Raises Unreachable when there is no host in time, or it goes away."""
        link = await self._connect(host, port)
        rings = self._rings(link, address)
        try:
            where = advertised or (address[0] or link.local_host, rings.port)
            link.send(Arrived(Place(self.node, *where), tuple(readings)))
            async for message in link:
                match message:
                    case RingAsked(number, members, seconds):
                        link.send(await asyncio.to_thread(rings.run, number, members, self.node, seconds))
                    case Examined():
                        return message
            raise Unreachable(f"the examination at {host}:{port} ended without a result: {link.ended}")
        finally:
            rings.close()
            link.close()

    def _rings(self, link: Link, address: tuple[str, int]) -> Rings:
        try:
            return Rings(address[0] or link.local_host, self.token, address[1])
        except OSError as error:
            raise UsageError(f"--address {address[0]}:{address[1]}: {error.strerror}") from error

    async def _connect(self, host: str, port: int) -> Link:
        hello = wire.Hello(role="cli", node=self.node, incarnation="", job=NAME)
        waits, deadline = backoff(), asyncio.get_running_loop().time() + self.wait_s
        while True:
            await asyncio.sleep(next(waits))
            try:
                return await connect(host, port, self.token, hello, tls=self.tls)
            except Unreachable as error:
                if error.refused or asyncio.get_running_loop().time() > deadline:
                    raise
