"""What the dashboard costs a step: a DDP script with a page open and metrics scraped each second, and without.

    python benchmarks/observability_steps.py [--quick | --full] [--json]

One job, blocks by turns: in the others the dashboard's process is stopped (SIGSTOP), which is as if there were none.
"""

from __future__ import annotations

import os
import signal
import socket
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from harness import Claim, arguments, median, say, show
from recovery import WARM_STEPS, Job, everstep

BLOCK_S = 2.0
SCRAPE_S = 1.0
BAR = 1.005


class Watcher:
    """Looks at the dashboard as a page and as Prometheus do, or stops its process."""

    def __init__(self, run: Path, launcher: int) -> None:
        self.address = urlsplit((run / "dashboard.url").read_text()).netloc
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
        (self.pid,) = [int(pid) for pid in children if b"dashboard" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    def look(self, seconds: float) -> None:
        os.kill(self.pid, signal.SIGCONT)
        host, _, port = self.address.rpartition(":")
        with socket.create_connection((host, int(port))) as page:
            page.sendall(f"GET /api/stream HTTP/1.1\r\nHost: {self.address}\r\n\r\n".encode())
            page.settimeout(SCRAPE_S)
            end = time.monotonic() + seconds
            scraped = 0.0
            while time.monotonic() < end:
                page.recv(1 << 20)
                if time.monotonic() > scraped + SCRAPE_S:
                    scraped = time.monotonic()
                    urllib.request.urlopen(f"http://{self.address}/metrics").read()

    def leave(self, seconds: float) -> None:
        os.kill(self.pid, signal.SIGSTOP)
        time.sleep(seconds)


def main() -> None:
    options = arguments(__doc__ or "")
    pairs = 60 if options.full else 8
    with Job(everstep("--run-dir", "runs"), "--no-checkpoint") as job:
        job.until_step(WARM_STEPS)
        run = job.folder / "runs" / "latest"
        watcher = Watcher(run, job.process.pid)
        watcher.look(5.0)  # it is up
        blocks = []
        for number in range(pairs):
            for looked in (number % 2 == 0, number % 2 == 1):
                began = time.monotonic()
                (watcher.look if looked else watcher.leave)(BLOCK_S)
                blocks.append((looked, began, time.monotonic()))
        os.kill(watcher.pid, signal.SIGCONT)
        ends = [row["t"] for row in job.steps(0)]
    times = {looked: steps_of(ends, [(a, b) for was, a, b in blocks if was is looked]) for looked in (True, False)}
    with_s, without_s = median(times[True]), median(times[False])
    mean = sum(times[True]) / len(times[True]) / (sum(times[False]) / len(times[False]))
    say(f"{len(times[True])} steps with, {len(times[False])} without; {with_s * 1e3:.2f}, {without_s * 1e3:.2f} ms")
    ratio = with_s / without_s
    show(
        [
            Claim("median step with a page open and metrics scraped, over without", ratio, "x", bar=f"<= {BAR}",
                  holds=ratio <= BAR),
            Claim("the same of mean steps", mean, "x"),
        ],
        options.json,
    )  # fmt: skip


def steps_of(ends: Sequence[float], spans: Sequence[tuple[float, float]]) -> list[float]:
    """Durations of the steps that lie in these spans."""
    steps = zip(ends, ends[1:], strict=False)
    return [b - a for a, b in steps if any(first <= a and b <= last for first, last in spans)]


if __name__ == "__main__":
    main()
