"""A worker of benchmarks/downtime.py: a session under `everstep run`, as a member or as a standby."""

from __future__ import annotations

import sys
from pathlib import Path

import downtime_work as work

import everstep


def main(folder: Path) -> None:
    model, optimizer = work.build()
    batches = everstep.Batches(work.samples(), global_batch=work.GLOBAL_BATCH, shuffle=False)
    notes = work.Notes(folder)
    with everstep.session() as run:
        run.protect(model=model, optimizer=optimizer)
        notes.waits()
        for step in run.steps(1_000_000):
            with step:
                rank, members = run.role, run.num_members
                for batch in step.share(batches):
                    work.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
            if step.committed:
                notes.committed(rank, members, step.index + 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
