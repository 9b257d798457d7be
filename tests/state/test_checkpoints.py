"""Checkpoints on disk: order, retention, leases, saves that meet, and what is damaged in every way."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import small_images as images

from everstep.state import claims, layout
from everstep.state.disk import Checkpoints, Written
from everstep.state.folder import FolderStore
from everstep.state.image import Damaged
from everstep.state.retention import Pruned, Retention, sweep
from everstep.state.store import open_store


def save(
    where: Path | str, step: int, retention: Retention | None = None, num_shards: int = 1, epoch: int = 1
) -> Written:
    checkpoints = Checkpoints(where, retention)
    for shard in range(num_shards):
        parts = images.image(images.state(step), step, shard=shard, num_shards=num_shards, epoch=epoch)
        written = checkpoints.write(*parts)
    assert written.complete
    return written


def folders(where: Path) -> list[str]:
    return sorted(path.name for path in where.glob("step-*"))


def test_order_is_numeric_and_retention_keeps_the_newest_and_a_series(tmp_path: Path) -> None:
    for step in (9000, 9900, 9950, 10000, 10050):
        save(tmp_path, step, Retention(newest=2, every=3000))
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.found() == [10050, 10000, 9000]
    assert (tmp_path / "latest").read_text() == "step-0000010050\n"
    assert Retention(newest=1).keeps([9900, 10000]) == {10000}
    late = save(tmp_path, 9960)  # a slow save of an older step does not take the name of the newest
    assert late.complete and (tmp_path / "latest").read_text() == "step-0000010050\n"
    back = save(tmp_path, 9970, Retention(newest=1))  # of a job that went back: not removed by its own save
    assert "step-0000009970" not in back.removed and Checkpoints(tmp_path).found() == [10050, 9970]
    (tmp_path / "latest").write_text("step-0000009970\n")
    assert Checkpoints(tmp_path).prune(Retention(newest=1)).removed == ("step-0000009970",)
    assert (tmp_path / "latest").read_text() == "step-0000010050\n"
    with pytest.raises(ValueError, match="at least the newest"):
        Retention(newest=0)


def test_incomplete_steps_are_never_given_out_and_go_with_the_next(tmp_path: Path) -> None:
    """FAULTS F7: a rank leaves inside a joint save."""
    save(tmp_path, 1, num_shards=2)
    checkpoints = Checkpoints(tmp_path)
    half = checkpoints.write(*images.image(images.state(2), 2, shard=0, num_shards=2))
    assert half.wrote and not half.complete and checkpoints.found() == [1]
    with pytest.raises(FileNotFoundError):
        checkpoints.sources(2)
    assert len(folders(tmp_path)) == 2
    assert save(tmp_path, 3, num_shards=2).removed == (half_name(2),)
    assert folders(tmp_path) == ["step-0000000001", "step-0000000003"]


def half_name(step: int) -> str:
    index, _ = images.image(images.state(step), step, num_shards=2)
    return layout.working_folder(layout.Key.of(index))


def test_saves_that_meet_do_not_mix(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)

    def write(epoch: int, shard: int, values: int) -> Written:
        index, data = images.image(images.state(values), 5, shard=shard, num_shards=2, epoch=epoch)
        return checkpoints.write(msgspec.structs.replace(index, written_s=float(epoch)), data)

    assert not write(1, 0, 100).complete
    there = write(1, 0, 100)
    assert there.durable and not there.wrote and not there.complete
    assert not write(2, 0, 200).complete  # after a rollback: the same step with other contents
    assert write(2, 1, 200).complete
    again = write(2, 1, 200)
    assert again.complete and not again.wrote  # a second time: it is there
    assert write(1, 1, 100).complete  # the slow one of before: whole, and not in the way
    assert checkpoints.found() == [5]
    assert len(checkpoints.scan().complete) == 2
    assert {source.index.epoch for source in checkpoints.sources(5)} == {2}
    assert checkpoints.verify(5) == []
    index, data = images.image(images.state(6), 6)
    with claims.claim(checkpoints.store, f"writing.{layout.working_folder(layout.Key.of(index))}.0"):
        busy = checkpoints.write(index, data)  # another process is at this shard
    assert not busy.wrote and not busy.complete and not busy.durable


def test_memory_that_changes_while_it_is_written_is_noticed(tmp_path: Path) -> None:
    index, data = images.image(images.state(1), 1)
    Checkpoints(tmp_path / "a").write(index, data)
    summed = Checkpoints(tmp_path / "a").sources(1)[0].index
    data[100] ^= 1
    with pytest.raises(Damaged, match="the memory of chunk 0 changed"):
        Checkpoints(tmp_path / "b").write(summed, data)
    assert folders(tmp_path / "b") == []


@pytest.mark.parametrize("harm", ["flip", "cut", "gone"])
def test_every_file_damaged_in_turn(tmp_path: Path, harm: str) -> None:
    """FAULTS C16, D1: the damaged step is not given out, the one before is; the file is named, and the offset."""
    for step in (1, 2):
        save(tmp_path, step, num_shards=2)
    folder, chance = tmp_path / "step-0000000002", random.Random(harm)
    files = sorted(path.name for path in folder.iterdir())
    assert len(files) == 7
    for name in files:
        kept = (folder / name).read_bytes()
        at = chance.randrange(len(kept))
        if harm == "gone":
            (folder / name).unlink()
        else:
            flipped = kept[:at] + bytes([kept[at] ^ 1 << chance.randrange(8)]) + kept[at + 1 :]
            (folder / name).write_bytes(flipped if harm == "flip" else kept[:at])
        checkpoints, told = Checkpoints(tmp_path), []
        step = checkpoints.newest(lambda where, faults, told=told: told.append((where, faults)))
        assert step is not None and step.manifest.step == 1
        faults = checkpoints.verify(2)
        blamed = {"COMPLETE": "manifest.json"}.get(name, name) if harm != "gone" else name
        assert blamed in [fault.file for fault in faults], (name, faults)
        if harm == "cut":
            assert at in [fault.offset for fault in faults] or blamed == "manifest.json"
        if (name, harm) != ("COMPLETE", "gone"):  # that is an unfinished one, nothing to report
            assert [where for where, _ in told] == [folder.name]
        if harm != "flip":
            assert checkpoints.found() == [1]
        if name != ".metadata":
            assert_refused(checkpoints)
        (folder / name).write_bytes(kept)
    assert Checkpoints(tmp_path).newest() == Checkpoints(tmp_path).step(2)


def assert_refused(checkpoints: Checkpoints) -> None:
    """Whoever reads step 2 without verifying it first gets no byte of what is damaged."""
    with pytest.raises((Damaged, FileNotFoundError)):
        for source in checkpoints.sources(2):
            for chunk in range(source.index.num_chunks):
                source.read(chunk, memoryview(bytearray(source.index.num_bytes)))


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    """At any address, and past the last whole block."""
    index, data = images.image(images.state(3, num_rows=300_000), 3)
    Checkpoints(tmp_path).write(index, data)
    (source,) = Checkpoints(tmp_path).sources(3)
    assert source.index.num_chunks >= 3 and source.index.num_bytes % 4096
    for shift in (0, 1):
        into = memoryview(bytearray(index.num_bytes + shift))[shift:]
        for chunk in range(index.num_chunks):
            source.read(chunk, into[chunk * (4 << 20) :])
        assert into == data
    assert (tmp_path / "step-0000000003/__0_0.distcp").read_bytes() == data


def test_readers_hold_a_lease(tmp_path: Path) -> None:
    """FAULTS D7."""
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpoints = Checkpoints(tmp_path)
    with checkpoints.reading(1) as sources:
        assert checkpoints.prune(Retention(newest=1)) == Pruned(
            removed=("step-0000000002",), kept=("step-0000000003",), leased=("step-0000000001",)
        )
        sources[0].read(0, memoryview(bytearray(sources[0].index.num_bytes)))
    assert checkpoints.prune(Retention(newest=1)).removed == ("step-0000000001",)
    assert checkpoints.prune(Retention(newest=1)).removed == ()
    assert folders(tmp_path) == ["step-0000000003"]


class Crossed(FolderStore):
    """A reader claims the step just when its marker has gone."""

    def remove(self, path: str) -> None:
        super().remove(path)
        if path.endswith("/COMPLETE"):
            self.lease = claims.Claim(self, f"reading.{path.partition('/')[0]}")


def test_a_lease_that_crosses_the_deletion(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.store = Crossed(tmp_path)
    assert checkpoints.prune(Retention(newest=1)).leased == ("step-0000000001",)
    assert Checkpoints(tmp_path).found() == [2, 1] and checkpoints.verify(1) == []


HOLD = """
import sys
from everstep.state import claims, store
held = [claims.Claim(store.open_store(sys.argv[1]), kind) for kind in sys.argv[2:]]
print("held", flush=True)
sys.stdin.read()
"""


def test_one_deleter_and_the_dead_do_not_count(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    checkpoints = Checkpoints(tmp_path)
    command = [sys.executable, "-c", HOLD, str(tmp_path), "deleting", "reading.step-0000000001"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        assert f"process {holder.pid} on" in checkpoints.prune(Retention(newest=1)).busy
        assert checkpoints.found() == [3, 2, 1]
        holder.kill()
    done = checkpoints.prune(Retention(newest=1))
    assert done.removed == ("step-0000000001", "step-0000000002") and not done.busy
    assert not [*(tmp_path / ".claims").iterdir()]


def test_half_a_claim_goes_when_nobody_else_can_be_at_it(tmp_path: Path) -> None:
    """Its writer was killed before it had its name. That we hold claims ourselves keeps nothing."""
    checkpoints = Checkpoints(tmp_path)
    half = tmp_path / ".claims" / f"writing.step-0000000009{layout.TEMPORARY}0123abcd"
    with claims.claim(checkpoints.store, "reading.step-0000000003") as ours:
        half.write_bytes(b"{")
        elsewhere = msgspec.structs.replace(claims.ourselves(), host="elsewhere", boot="another")
        other = half.with_name("writing.step-0000000009.1")
        other.write_bytes(msgspec.json.encode(elsewhere))
        claims.bury(checkpoints.store)
        assert half.exists() and other.exists()
        other.unlink()
        claims.bury(checkpoints.store)
        assert not half.exists() and (tmp_path / ".claims" / ours.name).exists()


def test_half_a_name_of_the_newest_goes_with_the_next_save(tmp_path: Path) -> None:
    tmp_path.joinpath(f"latest{layout.TEMPORARY}0123abcd").write_text("step-")
    tmp_path.joinpath("of a person.tmp-1").touch()
    save(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["latest", "of a person.tmp-1"]


def test_an_owner_elsewhere_lives_while_it_renews() -> None:
    here = claims.ourselves()
    assert not claims.lives(here, "x") and not claims.lives(msgspec.structs.replace(here, began="1"), "x")
    elsewhere = msgspec.structs.replace(here, boot="another", pid=1)
    assert claims.lives(elsewhere, "x")
    assert not claims.lives(msgspec.structs.replace(elsewhere, renewed_s=here.renewed_s - claims.STALE_S - 1), "x")


def test_deleters_in_a_race_leave_the_newest_whole(tmp_path: Path) -> None:
    for step in range(1, 13):
        save(tmp_path, step)
    start = threading.Barrier(4)

    def delete(_: int) -> list[Pruned]:
        start.wait()
        return [Checkpoints(tmp_path).prune(Retention(newest=2)) for _ in range(5)]

    with ThreadPoolExecutor(4) as pool:
        done = [pruned for several in pool.map(delete, range(4)) for pruned in several]
    done.append(Checkpoints(tmp_path).prune(Retention(newest=2)))
    removed = [folder for pruned in done for folder in pruned.removed]
    assert sorted(removed) == [f"step-{step:010d}" for step in range(1, 11)]  # each by one of them
    assert Checkpoints(tmp_path).found() == [12, 11]
    assert all(Checkpoints(tmp_path).verify(step) == [] for step in (11, 12))


class Meeting(FolderStore):
    """Another process ends a save elsewhere between the bytes of `latest` and their name."""

    @contextmanager
    def _named(self, path: str, durable: bool) -> Iterator[str]:
        with super()._named(path, durable) as temporary:
            yield temporary
            if path == layout.LATEST:
                sweep(FolderStore(self.root), Checkpoints(self.root).scan())


def test_a_save_that_ends_while_a_deleter_names_the_latest(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    deleter = Checkpoints(tmp_path)
    deleter.store = Meeting(tmp_path)
    assert deleter.prune(Retention(newest=1)).removed == ("step-0000000001",)
    assert (tmp_path / "latest").read_text() == "step-0000000002\n"


def test_a_deleter_that_died_halfway(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-0000000001/COMPLETE").unlink()
    assert Checkpoints(tmp_path).found() == [2]
    assert Checkpoints(tmp_path).prune(Retention(newest=2)).removed == ("step-0000000001",)


def test_strange_names_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-12").mkdir()
    (tmp_path / "notes").mkdir()
    shutil.copy(__file__, tmp_path / "step-0000000099")
    save(tmp_path, 1, Retention(newest=1))
    save(tmp_path, 2, Retention(newest=1))
    assert folders(tmp_path) == ["step-0000000002", "step-0000000099", "step-12"]
    assert open_store(f"file://{tmp_path}").name == str(tmp_path)
