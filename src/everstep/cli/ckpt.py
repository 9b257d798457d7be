"""`everstep ckpt ls | show | verify | diff | export | reshape | prune`: look after the checkpoints of a job.

Only `reshape` imports torch.

WHERE is the folder or URL (fsspec) which a job saves to; TARGET is that, for its newest complete step, or the folder of
one step in it. Exit code: 0 when all is well, FAILED (1) when something is damaged or differs, USAGE (2) when there is
no such checkpoint, UNREACHABLE (6) when the place cannot be read or written. With --json the answer is one JSON value.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from everstep.cli import ckpt_text as text
from everstep.cli.ckpt_open import Target, at, opened
from everstep.core.errors import ExitCode, UsageError

app = App(name="ckpt", help="List, check, compare, export, reshape and prune checkpoints.", version_flags=[])
Json = Annotated[bool, Parameter(name="--json", negative=())]
Flag = Annotated[bool, Parameter(negative=())]


@app.command
def ls(where: str, *, json: Json = False) -> int:
    """List the checkpoints of a place, newest first.

    Args:
        where: the folder or URL that a job saves to.
        json: as JSON.
    """
    with at(where) as checkpoints:
        scan = checkpoints.scan()
        claims = {state: checkpoints.claims(state) for state in ("reading", "writing")}
    rows = [text.row(step, claims["reading"]) for step in scan.complete]
    rows += [{"folder": folder, "state": "damaged", "why": why} for folder, why in scan.damaged]
    states = {folder: "being written" if folder in claims["writing"] else "unfinished" for folder in scan.unfinished}
    rows += [{"folder": folder, "state": state} for folder, state in states.items()]
    rows.sort(key=lambda row: str(row["folder"]), reverse=True)
    if json:
        text.as_json(rows)
    elif rows:
        text.table(("step", "saved", "size", "shards", "tensors", "job", "state"), [text.cells(row) for row in rows])
    else:
        print(f"no checkpoints in {where}")
    return ExitCode.FAILED if scan.damaged else ExitCode.OK


@app.command
def show(target: str, *, json: Json = False) -> int:
    """Show what a checkpoint holds: its save, its files, and each tensor with dtype, shape and parts.

    Args:
        target: a place, for its newest step, or the folder of one step.
        json: as JSON.
    """
    with opened(target) as (checkpoints, step):
        tensors = checkpoints.tensors(step)
    if json:
        parts = {name: {"dtype": t.dtype, "shape": t.shape, "parts": t.num_parts} for name, t in tensors.items()}
        text.as_json({"folder": step.folder, "manifest": step.manifest, "tensors": parts})
        return ExitCode.OK
    manifest = step.manifest
    print(f"step {manifest.step}, epoch {manifest.epoch}, of {manifest.job}")
    print(f"saved {text.when(manifest.written_s)}, {text.size(manifest.num_bytes)} in {manifest.num_shards} shards")
    rows = [(name, t.dtype, " x ".join(map(str, t.shape)) or "scalar", str(t.num_parts)) for name, t in tensors.items()]
    text.table(("tensor", "dtype", "shape", "parts"), rows)
    return ExitCode.OK


@app.command
def prune(where: str, *, keep: int = 2, every: int = 0, dry_run: Flag = False, json: Json = False) -> int:
    """Remove old checkpoints and what interrupted saves left. Steps that are being read stay.

    Args:
        where: the folder or URL that a job saves to.
        keep: so many of the newest complete steps stay; at least one.
        every: so do those whose number this divides; 0: none.
        dry_run: only tell what would go.
        json: as JSON.
    """
    with at(where) as checkpoints:
        done = checkpoints.prune_to(keep, every, dry_run)
    if json:
        text.as_json(done)
    else:
        for folder in done.removed:
            print(f"{'would remove' if dry_run else 'removed'} {folder}")
        for folder in done.leased:
            print(f"left {folder}: it is being read")
        print(f"{len(done.kept)} kept" if not done.busy else f"nothing removed: {done.busy} is deleting here")
    return ExitCode.FAILED if done.busy else ExitCode.OK


@app.command
def verify(target: str, *, all: Flag = False, json: Json = False) -> int:
    """Read every byte of a checkpoint and name what is missing, cut short or damaged, and where.

    Args:
        target: a place, for its newest step, or the folder of one step.
        all: of a place: every step that was completed.
        json: as JSON.
    """
    found = Target.parse(target)
    with at(found.where) as checkpoints:
        folders = checkpoints.marked() if all else [found.folder or _newest(checkpoints, target)]
        faults = {}
        for folder in folders:
            with text.progress(f"{folder}", checkpoints.num_bytes(folder), quiet=json) as advance:
                faults[folder] = checkpoints.verify_folder(folder, advance)
    if json:
        text.as_json(faults)
    else:
        for folder, wrong in faults.items():
            print(f"{folder}: {'whole' if not wrong else f'{len(wrong)} faults'}")
            for fault in wrong:
                print(f"  {fault}")
    return ExitCode.FAILED if any(faults.values()) else ExitCode.OK


def _newest(checkpoints: Any, target: str) -> str:
    """Of those with the marker, whole or not: a damaged one is not passed over in silence."""
    folders = checkpoints.marked()
    if not folders:
        raise UsageError(f"no complete checkpoint in {target}")
    return str(folders[0])


@app.command
def diff(a: str, b: str, *, json: Json = False) -> int:
    """Compare two checkpoints, whatever their layouts: names, shapes, bytes, and how far numbers are apart.

    Args:
        a: a place, for its newest step, or the folder of one step.
        b: the other.
        json: as JSON.
    """
    from everstep.state.compare import differences

    with opened(a) as (first, step_a), opened(b) as (second, step_b):
        bar = text.progress("comparing", step_a.manifest.num_bytes, quiet=json)
        with first.reading(step_a) as left, second.reading(step_b) as right, bar as advance:
            found = list(differences(left, right, advance))
    if json:
        text.as_json(found)
    elif found:
        rows = [(one.name, one.what, "" if one.max_abs is None else f"{one.max_abs:.6g}") for one in found]
        text.table(("tensor", "differs in", "largest difference"), rows)
    else:
        print(f"{step_a.folder} and {step_b.folder} hold the same tensors")
    return ExitCode.FAILED if found else ExitCode.OK


@app.command
def export(target: str, to: Path, *, of: str = "model", json: Json = False) -> int:
    """Write the tensors of one object as a safetensors file, put together from all shards.

    Args:
        target: a place, for its newest step, or the folder of one step.
        to: the file to write.
        of: the name under which the object is protected.
        json: as JSON.
    """
    from everstep.state.export import export as write

    began = time.monotonic()
    bar = text.progress(to.name, None, quiet=json)
    with opened(target) as (checkpoints, step), checkpoints.reading(step) as sources, bar as advance:
        num_tensors = write(sources, to, of, advance)
    if json:
        text.as_json({"file": str(to), "step": step.manifest.step, "tensors": num_tensors})
    else:
        took_s = time.monotonic() - began
        print(f"{to}: {num_tensors} tensors, {text.size(to.stat().st_size)}, step {step.manifest.step}, {took_s:.1f} s")
    return ExitCode.OK


@app.command
def reshape(target: str, to: str, *, shards: int, json: Json = False) -> int:
    """Write a checkpoint as another number of shards, tensors cut along their first dimension as FSDP cuts them.

    A job needs none of this to continue with another number of members: any layout loads into any other.

    Args:
        target: a place, for its newest step, or the folder of one step.
        to: the folder or URL of another place.
        shards: how many.
        json: as JSON.
    """
    from everstep.state.recut import recut

    bar = text.progress(f"{shards} shards", None, quiet=json)
    with opened(target) as (checkpoints, step), at(to) as there:
        if step.manifest.key.step in there.checkpoints.found():
            raise UsageError(f"step {step.manifest.step} is in {to} already: give another place")
        with checkpoints.reading(step) as sources, bar as advance:
            written = recut(sources, there.checkpoints, shards, advance)
    if json:
        text.as_json(written)
    else:
        print(f"step {step.manifest.step} in {to}: {shards} shards, {text.size(sum(w.num_bytes for w in written))}")
    return ExitCode.OK
