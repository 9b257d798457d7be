"""What traces cost: a span, a step of a session, the agent's copy, and the trace of 1,000 workers as one file.

    python benchmarks/tracing.py [--quick | --full] [--json]

The step is one of a session of one member, with its trace on and off in turns of ten steps in one process. The 1,000
workers' files are made up: 3,000 spans each (--full: 100,000, of which `everstep trace` keeps 2 million in all).
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from harness import Claim, arguments, median, say, show
from torch import nn

import everstep
from everstep.control.journal import Journal
from everstep.control.tracing import Place, PlaceFile, Ring
from everstep.core import events as e
from everstep.core import trace as form
from everstep.core.page import Page
from everstep.core.trace import RECORD, RECORDS, RING_BYTES, Header, Kind
from everstep.core.types import JobSpec
from everstep.probe import boot
from everstep.probe.trace import Recorder

TURN = 10  # steps with a trace, and as many without
WORKERS = 1000
STEP_S = 0.1  # of the made-up workers
SPANS = (Kind.DATA, Kind.FORWARD, Kind.BACKWARD, Kind.SUMS, Kind.AGREE, Kind.UPDATE)
# A process of its own in between: what a child of this one shares with it at first would count.
MEASURED = """
import resource, subprocess, sys
folder = sys.argv[1]
subprocess.run([sys.executable, "-m", "everstep", "trace", folder, "--out", folder + "/trace.json.gz"], check=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(used.ru_utime + used.ru_stime, used.ru_maxrss << 10)
"""


def span() -> Claim:
    """The best of many turns: others use this machine too."""
    page, recorder = Page.create("bench", RING_BYTES), Recorder()
    recorder.begin(page)
    best = min(_turn(recorder, 10_000) for _ in range(50))
    recorder.begin(None)
    page.close()
    return Claim("one span of a trace", best, "s", bar="< 2 microseconds", holds=best < 2e-6)


def _turn(recorder: Recorder, count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        recorder.span(Kind.SUM, 1, 2, 3)
    return (time.perf_counter() - began) / count


def step(turns: int) -> list[Claim]:
    """A model whose step takes about 10 ms."""
    page, silent = Page.create("bench", RING_BYTES), Page.create("silent")
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batches = everstep.Batches((torch.randn(1024, 512),), global_batch=64, micro_batch=32, seed=1)
    times: dict[bool, list[float]] = {False: [], True: []}
    boot.install(page)
    with everstep.session(checkpoints=None) as run:
        run.protect(model=model, optimizer=optimizer)
        for one in run.steps(2 * TURN * turns):
            on = one.index // TURN % 2 == 0
            if one.index % TURN == 0:
                boot.install(page if on else silent)
            began = time.perf_counter()
            with one:
                for (x,) in one.share(batches):
                    model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            if one.index % TURN > 1:
                times[on].append(time.perf_counter() - began)
    with_trace, without = median(times[True]), median(times[False])
    return [
        Claim(
            "step of a session with its trace, 2 M parameters, one member", with_trace, "s", "without", without,
            without / with_trace, "<= 1.005", with_trace <= 1.005 * without,
        )
    ]  # fmt: skip


def copy(folder: Path) -> Claim:
    """Of all that the ring holds, as the agent does it once a second."""
    page, recorder = Page.create("bench", RING_BYTES), Recorder()
    header = Header("node0", 0, "inc", "boot", 0, 0)
    place = Place(PlaceFile(folder / "0.trace", 4 << 20, header))
    recorder.begin(page)
    place.ring = Ring(page.fd)
    times = []
    for _ in range(20):
        for _ in range(RECORDS - 10):
            recorder.span(Kind.SUM, 1, 2, 3)
        began = time.thread_time()
        place.copy()
        times.append((time.thread_time() - began) / RECORDS)
    return Claim("the agent's copy of one span to its file, CPU", median(times), "s")


def job(folder: Path, spans: int) -> list[Claim]:
    """The files of 1,000 workers, and what it takes to make one trace of them."""
    say(f"{WORKERS} workers of {spans} spans each")
    folder.mkdir()
    with Journal.open(folder / "journal.jsonl", "bench") as journal:
        journal.append(e.JobSubmitted(JobSpec("bench")), 0.0, 1.7e9, 1)
        journal.append(e.Ticked(), STEP_S * spans / 7, 1.7e9 + STEP_S * spans / 7, 1)
    for rank in range(WORKERS):
        _worker(folder / f"logs/node{rank // 8}/trace/{rank % 8}.trace", rank, spans)
    command = [sys.executable, "-c", MEASURED, str(folder)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    cpu_s, peak = map(float, done.stdout.split()[-2:])
    name = f"trace of {WORKERS} workers with {spans} spans each"
    return [
        Claim(f"{name}: CPU", cpu_s, "s"),
        Claim(f"{name}: its file", (folder / "trace.json.gz").stat().st_size, "bytes"),
        Claim(f"{name}: memory", peak, "bytes", bar="< 100 MiB", holds=peak < 100 << 20),
    ]


def _worker(path: Path, rank: int, spans: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = Header(path.parent.parent.name, rank % 8, "inc", "boot", int(1.7e18), 0, rank)
    data = [form.pack_header(header), RECORD.pack(0, 0, 1, rank, 1, Kind.BEGAN, 1, 0)]
    part_ns = int(STEP_S * 1e9 / len(SPANS))
    for number, (step, part) in zip(range(spans), itertools.product(range(spans), range(len(SPANS) + 1)), strict=False):
        begin = step * len(SPANS) * part_ns + part * part_ns
        if part == len(SPANS):
            data.append(RECORD.pack(begin - part * part_ns, begin, 0, step, 1, Kind.STEP, 1, number % form.STAMPS))
        else:
            data.append(RECORD.pack(begin, begin + part_ns, 0, step, 1, SPANS[part], 1, number % form.STAMPS))
    path.write_bytes(b"".join(data))


def main() -> None:
    args = arguments(__doc__ or "")
    claims = [span(), *step(200 if args.full else 40)]
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        claims += [copy(Path(folder)), *job(Path(folder, "small"), 3000)]
        claims += job(Path(folder, "large"), 100_000) if args.full else []
    show(claims, args.json)


if __name__ == "__main__":
    main()
