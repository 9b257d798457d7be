"""The dashboard under load: how old is what a page shows, and what does its server cost while few or none look?

    python benchmarks/observability_stream.py [--quick | --full] [--json]

A journal of a job with 1,000 workers gets 1,000 entries a second while 20 pages are open: real connections to
`everstep dashboard`, which has the priority that `everstep run` gives it. The age of an entry is taken when a page has
got the message that tells of it; of the entries in one message the oldest counts.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Claim, arguments, say, show

from everstep.cli import presence
from everstep.cli.showing import NICE
from everstep.control.journal import Journal
from everstep.core import events as e
from everstep.core.types import Blame, EpochPlan, JobSpec, Member

PAGES, RATE, NODES, SLOTS = 20, 1000, 125, 8
BATCH_S = 0.01
STAMP = re.compile(rb'"metrics":\{"loss":[^}]*"stamp":([0-9.]+)')
ADDRESS = re.compile(r"http://([\w.]+):(\d+)/")
TICKS = os.sysconf("SC_CLK_TCK")


class Load:
    """Writes the journal of a large job at a rate, from the begin on."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.step, self.written = journal, 0, 0
        self.begin_s = time.monotonic()
        members = [Member(f"n{k:03}", "i", "10.0.0.1", k, k * SLOTS, SLOTS) for k in range(NODES)]
        self.write(e.JobSubmitted(JobSpec("load")), e.ControllerStarted(1))
        self.write(*(e.NodeJoined(member.node, "i", "10.0.0.1", SLOTS) for member in members))
        self.write(e.EpochFormed(EpochPlan(1, tuple(members), NODES * SLOTS, "10.0.0.1", 1, 0)))

    def write(self, *events: e.AnyEvent) -> None:
        for event in events:
            self.journal.append(event, time.monotonic(), time.time(), 1)
        self.written += len(events)

    def batch(self, count: int) -> None:
        """Steps and metrics by turns; at times an incident."""
        for _ in range(count // 2):
            self.step += 1
            now = time.time()
            self.write(e.StepsSeen(1, self.step, self.step, now - self.begin_s))
            self.write(e.MetricsSeen(self.step, {"loss": 2.0 + self.step % 7, "stamp": now}))
            if self.step % 200 == 0:
                name = f"I{self.step:06}"
                blame = (Blame(self.step % (NODES * SLOTS), "n001", "exit"),)
                self.write(
                    e.IncidentOpened(name, "crash", blame, "rank 9 died"), e.IncidentClosed(name, "recovered", 0.4)
                )

    async def run(self, rate: float, seconds: float) -> None:
        began, done = time.monotonic(), 0
        while (passed := time.monotonic() - began) < seconds:
            due = int(passed * rate) - done
            self.batch(due)
            done += due
            await asyncio.sleep(max(BATCH_S, 2 / rate))


class Server:
    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "everstep", "dashboard", str(run), "--port", "0"]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=lambda: os.nice(NICE))
        assert self.process.stderr is not None
        found = ADDRESS.search(self.process.stderr.readline().decode())
        assert found, "it did not say where it is"
        self.host, self.port = found[1], int(found[2])

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def resident_mb(self) -> float:
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        assert self.process.stderr is not None
        self.process.stderr.close()


async def page(server: Server, ages: list[float], sizes: list[int]) -> None:
    """Reads events until cancelled; age of the oldest entry of each message."""
    reader, writer = await asyncio.open_connection(server.host, server.port, limit=64 << 20)
    writer.write(f"GET /api/stream HTTP/1.1\r\nHost: localhost:{server.port}\r\n\r\n".encode())
    last = 0.0
    try:
        while True:
            message = await reader.readuntil(b"\n\n")
            now = time.time()
            found = STAMP.search(message)
            if found is None:
                continue
            newest = float(found[1])
            if last:
                ages.append(now - last)
                sizes.append(len(message))
            last = newest
    finally:
        writer.close()


async def looked_at(
    server: Server, load: Load, pages: int, rate: float, seconds: float
) -> tuple[list[float], int, float]:
    """Ages of entries when shown; bytes of a second's messages to a page; the server's share of a core."""
    ages: list[float] = []
    sizes: list[int] = []
    tasks = [asyncio.create_task(page(server, ages, sizes)) for _ in range(pages)]
    await load.run(rate, 2.0)  # until all are open
    ages.clear()
    sizes.clear()
    cpu_s, began = server.cpu_s(), time.monotonic()
    await load.run(rate, seconds)
    share = (server.cpu_s() - cpu_s) / (time.monotonic() - began)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return ages, int(sum(sizes) / max(1, pages) / seconds), share


def main() -> None:
    options = arguments(__doc__ or "")
    seconds = 60.0 if options.full else 10.0
    folder = Path(tempfile.mkdtemp(prefix="everstep-stream-"))
    address = presence.Address("127.0.0.1", 1, "load", str(folder / "token"), "")
    with Journal.open(folder / "journal.jsonl", "load") as journal, presence.publish(folder, address):
        load = Load(journal)
        server = Server(folder)
        try:
            rows = asyncio.run(measured(server, load, seconds))
        finally:
            server.close()
    show(rows, options.json)


async def measured(server: Server, load: Load, seconds: float) -> list[Claim]:
    _, _, none = await looked_at(server, load, 0, 10, seconds)
    _, few_bytes, one = await looked_at(server, load, 1, 10, seconds)
    say(f"nobody: {none:.2%} of a core; one page: {one:.2%}, {few_bytes} bytes a second")
    before = load.written
    ages, many_bytes, many = await looked_at(server, load, PAGES, RATE, seconds)
    say(f"{load.written - before} entries, {len(ages)} messages, {many_bytes} bytes a second to each page")
    what = f"{PAGES} pages, {RATE} entries/s of a job with {NODES * SLOTS} workers"
    late = sorted(ages)
    return [
        Claim(f"{what}: oldest entry when shown", late[-1], "s", bar="<= 1", holds=late[-1] <= 1),
        Claim(f"{what}: oldest entry of the median message", late[len(late) // 2], "s"),
        Claim(f"{what}: the server's share of a core", many, ""),
        Claim("one page, 10 entries/s: the server's share of a core", one, "", bar="<= 0.05", holds=one <= 0.05),
        Claim(
            "nobody looks, 10 entries/s: the server's share of a core", none, "", bar="<= 0.005", holds=none <= 0.005
        ),
        Claim("memory of the server", server.resident_mb(), "MB"),
    ]


if __name__ == "__main__":
    main()
