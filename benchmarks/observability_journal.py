"""The journal of a job of weeks: how large it is, how fast it opens, what it costs whoever writes it or begins with it.

    python benchmarks/observability_journal.py [--quick | --full] [--json]

1,000 workers, a save every half an hour, five crashes a day (long_journal.py). --full writes 45 days, more than 10 GB,
and needs as much room in the folder for temporary files; --quick writes one day and multiplies its size by 30.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import long_journal
import session_burst
from harness import Claim, arguments, median, say, show

from everstep.control import replay, tending
from everstep.control.journal import Journal, read
from everstep.control.segments import Files
from everstep.control.tender import Tender
from everstep.core import events as e

DAYS = 30
LONG_DAYS = 45.0  # what makes more than 10 GB
LOOKS = 5
# In a process of its own, as a page begins: seconds and memory. Against a journal of a few lines: what it takes more.
OPENS = """
import json, random, resource, sys, time
from pathlib import Path
from everstep.control.history import History

def seconds(call):
    began = time.perf_counter()
    call()
    return time.perf_counter() - began

past = History(Path(sys.argv[1]))
newest_s = seconds(lambda: past.newest()[0].view)
span_s, chance = past.span_s, random.Random(1)
looks_s = [seconds(lambda: past.at(chance.uniform(0, span_s))) for _ in range(int(sys.argv[2]))]
incident_s = seconds(lambda: past.incident("I002"))
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([newest_s, incident_s, rss / 1000, *looks_s]))
"""


def opens(folder: Path) -> list[float]:
    command = [sys.executable, "-c", OPENS, str(folder), str(LOOKS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: list[float] = json.loads(done.stdout)
    return found


def seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def of_weeks(folder: Path, days: float) -> list[Claim]:
    small, big = folder / "small", folder / "big"
    for each in (small, big):
        each.mkdir()
    long_journal.write(small / "journal.jsonl", 0.001)
    say(f"writing {days:g} days")
    written = long_journal.write(big / "journal.jsonl", days)
    say(f"tending {written / 1e9:.3g} GB")
    tend_s = seconds_of(lambda: tending.tend(big / "journal.jsonl"))
    size = sum(file.stat().st_size for file in big.iterdir())
    plain = sum(file.stat().st_size for file in big.glob("*.jsonl"))  # the last two files are of the same size always
    month = (size - plain) * DAYS / days + plain
    newest_s, incident_s, rss, *looks_s = opens(big)
    _, _, least, *_ = opens(small)
    what = f"a journal of {written / 1e9:.3g} GB"
    full = days >= DAYS
    return [
        Claim(f"{DAYS} days of 1,000 workers, 5 incidents a day: as written", written * DAYS / days / 1e9, "GB"),
        Claim("the same on disk, with all that is kept beside it", month / 1e9, "GB", bar="< 2 GB", holds=month < 2e9),
        Claim(f"{what} opens", newest_s, "s", bar="< 3 s", holds=newest_s < 3 if full else None),
        Claim(f"{what}: any moment of it (median of {LOOKS})", median(looks_s), "s"),
        Claim(f"{what}: one of the first incidents", incident_s, "s"),
        Claim(f"{what}: memory of that, beyond the same for a job of minutes", rss - least, "MB", bar="< 50 MB",
              holds=rss - least < 50),
        Claim("processor time behind a job's back, of what the job takes", tend_s / (days * 86400), ""),
    ]  # fmt: skip


def writing(folder: Path) -> list[Claim]:
    """Appends, and those of them that close a segment."""
    seen = e.StepsSeen(1, 1000, 1000, 1e5, 10.0, 3, 900, 10**10)
    closed: list[bool] = []
    times: list[float] = []
    with Journal.open(folder / "journal.jsonl", "job", 100_000, closed.append) as journal:
        for _ in range(50_000):
            closed.clear()
            took_s = seconds_of(lambda: journal.append(seen, 1e5, 1.7e9, 1))
            times.append(took_s if not any(closed) else -took_s)
    tender = Tender(folder / "journal.jsonl")
    starts = []
    for _ in range(5):
        starts.append(seconds_of(lambda: tender.grown(True)))
        tender.stop()
    closing = [-took_s for took_s in times if took_s < 0]
    return [
        Claim("one event into the journal", 1e6 * median(times), "us"),
        Claim(f"one that closes a segment (median of {len(closing)})", 1e3 * median(closing), "ms"),
        Claim("the same, the longest one", 1e3 * max(closing), "ms"),
        Claim("starting the process that tends it, every 2 MB", 1e3 * median(starts), "ms"),
    ]


def beginning(folder: Path) -> list[Claim]:
    """A new controller, half a segment of reports behind what is kept."""
    files = Files(folder / "journal.jsonl")
    long_journal.write(files.path, 0.025)
    entries = list(read(files.path))
    assert isinstance(entries[0].event, e.JobSubmitted)
    spec, last = entries[0].event.spec, entries[-1].n
    whole_s = seconds_of(lambda: replay.past_of(files.path, spec, last))
    reports = sum(isinstance(entry.event, e.NodeReported) for entry in entries)
    saves = DAYS * 86400 / long_journal.SAVE_S
    nodes = long_journal.NODES
    month = nodes * (saves * 2 + DAYS * long_journal.INCIDENTS_A_DAY * 6)
    num_bytes = sum(file.stat().st_size for file in folder.iterdir())
    tending.tend(files.path, with_past=True)
    kept_s = seconds_of(lambda: replay.past_of(files.path, spec, last))
    say(f"{reports} reports replayed in {whole_s:.3g} s")
    return [
        Claim(f"a new controller replays {DAYS} days (from {reports} reports to {month:.2g})",
              whole_s / reports * month, "s"),
        Claim("a new controller begins with what is kept", kept_s, "s"),
        Claim("a new controller reads what was written since: 2 MB of reports at most",
              whole_s * (2 << 20) / num_bytes, "s"),
    ]  # fmt: skip


def bursts(folder: Path) -> list[Claim]:
    """One save of 1,000 sessions: told by each session on its own, and as agents tell it."""
    runs = [
        session_burst.controller_s(folder / f"{turn}-{merges}", merges) for turn in range(3) for merges in (False, True)
    ]
    (apart, apart_s), (merged, merged_s) = (
        (runs[k][0], median([took_s for _, took_s in runs[k::2]])) for k in range(2)
    )
    return [
        Claim("a save of 1,000 sessions: reports", merged, "", "each by itself", apart, apart / merged),
        Claim("a save of 1,000 sessions: the controller's processor time", merged_s, "s", "each report by itself",
              apart_s, apart_s / merged_s),
    ]  # fmt: skip


def main() -> int:
    options = arguments(__doc__ or "")
    claims = []
    with tempfile.TemporaryDirectory(prefix="everstep-journal-") as name:
        for part in ("writing", "bursts", "beginning", "weeks"):
            (Path(name) / part).mkdir()
        claims += writing(Path(name) / "writing")
        claims += bursts(Path(name) / "bursts")
        claims += beginning(Path(name) / "beginning")
        claims += of_weeks(Path(name) / "weeks", LONG_DAYS if options.full else 1.0)
    show(claims, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
