"""Vaults as real processes, and real faults: killed writers, peers and vaults, flipped bytes, strangers, no memory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.control import procfs
from everstep.state import talk
from everstep.state.client import NoRoom, NotKept, Persist, Vault, VaultLost
from everstep.state.image import CHUNK_BYTES, VERSION, Damaged, Index
from everstep.state.slots import News, State
from everstep.state.vault_options import FINISH_SIGNAL
from everstep.testing.local import LocalRun

SECRET = b"of this test".ljust(32)
MB = 1 << 20
SIZE = 3 * CHUNK_BYTES + 1000
SCRIPT = Path(__file__).parent / "scripts" / "keeps.py"


class Node:
    """A vault of its own, as a client sees it, and what is done to its process."""

    def __init__(self, **options: Any) -> None:
        self.news: list[News] = []
        self.vault = Vault.alone(options.pop("budget_bytes", 200 * MB), self.news.append, SECRET, **options)
        self.endpoint = self.vault.endpoint

    @property
    def pid(self) -> int:
        assert self.vault._own is not None and self.vault._own._process is not None
        return self.vault._own._process.pid

    @property
    def address(self) -> str:
        return self.vault._address

    def save(self, step: int, data: bytes, **owed: Any) -> None:
        slot = self.vault.slot(len(data))
        slot.view[:] = data
        self.vault.seal(slot, index(step, len(data)), **owed)

    def steps(self) -> dict[int, State]:
        return {kept.step: kept.state for kept in self.vault.kept()}

    def until(self, what: str, step: int) -> News:
        return until(lambda: next((n for n in self.news if n.what == what and n.step == step), None))

    def memories(self) -> list[str]:
        """The files behind its images; a mapping holds one open as well."""
        found = {}
        for path in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if "everstep-image" in os.readlink(path):
                    found[path.stat().st_ino] = str(path)
        return list(found.values())

    def flip(self, offset: int) -> None:
        """One bit in each of its images: what a bad memory cell does."""
        for path in self.memories():
            with open(path, "r+b") as file:
                file.seek(offset)
                (byte,) = file.read(1)
                file.seek(offset)
                file.write(bytes([byte ^ 4]))

    def finish(self) -> int:
        os.kill(self.pid, FINISH_SIGNAL)
        assert self.vault._own is not None and self.vault._own._process is not None
        return self.vault._own._process.wait(20)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self.vault._own is not None and self.vault._own._process is not None
        self.vault._own._process.wait()


@pytest.fixture
def new_node() -> Iterator[Callable[..., Node]]:
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> Node:
            node = Node(**options)
            stack.callback(node.vault.close)
            return node

        yield make


def index(step: int, num_bytes: int, shard: int = 0, num_shards: int = 1) -> Index:
    return Index(VERSION, "job", step, 1, shard, num_shards, 0.0, num_bytes, (), (), ())


def bytes_of(step: int, size: int = SIZE) -> bytes:
    return hashlib.shake_128(str(step).encode()).digest(size)


def read(vault: Vault, step: int) -> bytes:
    with vault.open(step, 0) as image:
        data = bytearray(image.index.num_bytes)
        for chunk in range(image.index.num_chunks):
            image.read(chunk, memoryview(data)[chunk * CHUNK_BYTES :])
        return bytes(data)


def memory_of(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))


def until(what: Callable[[], Any], timeout_s: float = 20.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (value := what()):
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.01)
    return value


WRITER = """
    import sys, time
    from everstep.state.client import Vault
    vault = Vault(sys.argv[1], bytes.fromhex(sys.argv[2]))
    slot = vault.slot(20 << 20)
    print("copying", flush=True)
    while True:
        slot.view[0] = 1
"""

ALONE = """
    from everstep.state.client import Vault
    vault = Vault.alone()
    vault.slot(1 << 20)
    print(vault._own._process.pid, flush=True)
    input()
"""


def test_a_writer_that_is_killed_while_it_copies_leaves_what_was_sealed(new_node: Callable[..., Node]) -> None:
    node = new_node(budget_bytes=70 * MB)
    node.save(1, bytes_of(1))
    for _ in range(3):  # 70 MB are not enough for two that leak
        command = [sys.executable, "-c", textwrap.dedent(WRITER), node.address, SECRET.hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None and writer.stdout.readline() == b"copying\n"
            writer.kill()
        until(lambda: len(node.memories()) == 1)
    assert node.steps() == {1: State.CACHED}
    assert read(node.vault, 1) == bytes_of(1)
    node.save(2, bytes_of(2, 30 * MB))
    with pytest.raises(NoRoom) as refused:
        node.vault.slot(60 * MB)
    assert "62.9 MB does not fit" in str(refused.value) and "73.4 MB which" in str(refused.value)
    assert (refused.value.needed_bytes, refused.value.budget_bytes) == (60 * MB, 70 * MB)


def test_a_peer_gets_each_newest_image_and_only_what_changed(new_node: Callable[..., Node]) -> None:
    one, two, three = new_node(), new_node(), new_node()
    data = bytearray(bytes_of(1))
    one.save(1, data, peers=[two.endpoint])
    one.until("backed up", 1)
    assert one.steps() == {1: State.BACKED_UP} and read(two.vault, 1) == data
    data[CHUNK_BYTES + 5] ^= 1
    two.flip(100)  # of the old copy, from which the first chunk is to be taken
    one.save(2, data, peers=[two.endpoint])
    one.until("backed up", 2)
    assert read(two.vault, 2) == data
    three.vault.pull(two.endpoint, 2, 0)
    assert read(three.vault, 2) == data
    with pytest.raises(NotKept, match=r"no image of step 7.*\[1, 2\]"):
        three.vault.pull(two.endpoint, 7, 0)
    two.flip(CHUNK_BYTES + 9)
    with pytest.raises(Damaged, match="chunk 1 of step 1"):  # it has not got that one
        three.vault.pull(two.endpoint, 1, 0)
    assert 1 not in until(lambda: s if 1 not in (s := two.steps()) else None)
    assert three.steps() == {2: State.CACHED}


def test_a_transfer_that_breaks_off_leaves_nothing(new_node: Callable[..., Node]) -> None:
    slow, peer = new_node(rate_bytes_per_s=4.0 * MB), new_node()
    before = len(peer.memories())
    slow.save(1, bytes_of(1, 40 * MB), peers=[peer.endpoint])
    until(lambda: len(peer.memories()) > before)
    slow.kill()
    peer.save(7, bytes_of(7, 40 * MB))  # into the memory of the copy that broke off
    until(lambda: len(peer.memories()) == 1)
    assert peer.steps() == {7: State.CACHED}

    assert lost(slow)
    slow.save(2, bytes_of(2, 40 * MB), peers=[peer.endpoint])
    until(lambda: len(peer.memories()) > 1)
    peer.kill()
    slow.until("the copy at a peer failed", 2)
    assert lost(peer) and slow.steps() == {2: State.CACHED}
    slow.save(3, bytes_of(3), peers=[peer.vault.endpoint])
    slow.until("backed up", 3)


def lost(node: Node) -> bool:
    """At most one call says that the vault is gone; the next one finds a new one, which keeps nothing."""
    with contextlib.suppress(VaultLost):
        node.vault.kept()
    return node.steps() == {}


def test_a_vault_that_is_killed_is_said_to_be_lost_and_the_next_call_finds_another(
    new_node: Callable[..., Node],
) -> None:
    node = new_node()
    node.save(1, bytes_of(1))
    slot = node.vault.slot(SIZE)
    node.kill()
    slot.view[:] = bytes_of(2)  # a copy that is going on does not fail
    with pytest.raises(VaultLost, match="the vault of this node is gone"):
        node.vault.seal(slot, index(2, SIZE))
    node.save(3, bytes_of(3))
    assert node.steps() == {3: State.CACHED} and read(node.vault, 3) == bytes_of(3)


def test_a_vault_of_a_process_ends_with_it() -> None:
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(ALONE)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert procfs.sample(pid)
        process.kill()
    until(lambda: procfs.sample(pid) is None)


def test_a_flipped_byte_in_a_sealed_image_is_found_and_it_is_offered_no_more(new_node: Callable[..., Node]) -> None:
    node = new_node()
    node.save(1, bytes_of(1))
    node.vault.verify(1, 0)
    node.save(2, bytes_of(2))
    node.vault.verify(2, 0)
    node.flip(CHUNK_BYTES + 3)
    with pytest.raises(Damaged, match="chunk 1 of step 2"):
        read(node.vault, 2)
    with pytest.raises(Damaged, match="chunk 1 of step 1"):
        node.vault.verify(1, 0)
    assert node.steps() == {}
    assert {news.step for news in node.news if news.what == "broken"} == {1, 2}
    with pytest.raises(NotKept):
        node.vault.open(2, 0)


def test_two_hundred_saves_take_no_more_memory_than_twenty(new_node: Callable[..., Node], tmp_path: Path) -> None:
    """The next save never waits for the disk; what is there is one step, whatever was written meanwhile."""
    node = new_node()
    persist = Persist(str(tmp_path), {"newest": 3})
    sizes = {}
    for step in range(1, 201):
        node.save(step, step.to_bytes(2) * (SIZE // 2), persist=persist)
        if step in (20, 200):
            sizes[step] = [memory_of(pid, "VmRSS") for pid in (node.pid, os.getpid())]
    assert len(node.memories()) <= 3
    assert all(late < early + 2 * SIZE for early, late in zip(sizes[20], sizes[200], strict=True))
    node.until("persistent", 200)
    written = {n.step for n in node.news if n.what == "persistent"}
    assert written | {n.step for n in node.news if n.what == "skipped"} == set(range(1, 201))
    for step in sorted(written)[-3:]:
        assert (tmp_path / f"step-{step:010}" / "__0_0.distcp").read_bytes() == step.to_bytes(2) * (SIZE // 2)


def test_a_place_that_cannot_be_written_to_is_said_and_tried_again(
    new_node: Callable[..., Node], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.write_text("a file in the way")
    node = new_node()
    node.save(4, bytes_of(4), persist=Persist(str(place)))
    assert "place" in node.until("the copy on disk failed", 4).why
    place.unlink()
    assert node.until("persistent", 4).complete
    assert node.steps() == {4: State.PERSISTENT}
    assert bytes_of(4) == (place / "step-0000000004" / "__0_0.distcp").read_bytes()


def test_a_vault_that_is_to_end_writes_first_and_tells_when_it_cannot(
    new_node: Callable[..., Node], tmp_path: Path
) -> None:
    for where, status in ((tmp_path / "place", 0), (tmp_path / "file" / "place", 1)):
        (tmp_path / "file").touch()
        node = new_node()
        node.save(5, bytes_of(5, 40 * MB), persist=Persist(str(where)))
        assert node.finish() == status
    assert (tmp_path / "place" / "step-0000000005" / "COMPLETE").exists()


def test_strangers_are_refused_and_disturb_nobody(new_node: Callable[..., Node]) -> None:
    node, other = new_node(), Vault.alone(secret=b"another".ljust(32))
    node.save(1, bytes_of(1))
    with pytest.raises(VaultLost, match="does not know the secret"):
        Vault(node.address, b"wrong").kept()
    try:
        with pytest.raises(NotKept, match="does not know the secret"):
            other.pull(node.endpoint, 1, 0)
    finally:
        other.close()
    host, port = node.endpoint.split(":")
    for said in (b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\x05hello", talk.frame(talk.Fetch(talk.Shard(0, 1), 1))):
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(said)
            sock.settimeout(10)
            answer = b""
            with contextlib.suppress(ConnectionResetError):  # it did not read all of ours
                answer = b"".join(iter(lambda: sock.recv(4096), b""))
            assert bytes_of(1)[:64] not in answer and len(answer) < talk.MAX_GREETING
    assert read(node.vault, 1) == bytes_of(1)


def test_a_cgroup_with_little_memory_is_a_refusal_and_no_kill(
    new_node: Callable[..., Node], small_cgroup: Callable[[int], Path]
) -> None:
    node = new_node(budget_bytes=10_000 * MB)
    (small_cgroup(400 * MB) / "cgroup.procs").write_text(str(node.pid))
    with pytest.raises(NoRoom) as refused:
        node.vault.slot(300 * MB)
    assert refused.value.free_bytes < 200 * MB
    node.save(1, bytes_of(1))
    assert node.steps() == {1: State.CACHED}
    node.kill()  # so that the group can go


def test_vaults_of_a_job_outlive_agents_and_not_the_job(tmp_path: Path) -> None:
    with LocalRun(tmp_path, SCRIPT, "--nnodes", "2", "--local-nodes", "2", args=(str(tmp_path),)) as run:
        run.until(lambda: (tmp_path / "at-0").exists() and (tmp_path / "at-1").exists())
        first = (tmp_path / "at-1").read_text()
        os.kill(vault_pid(run, 1), signal.SIGKILL)
        run.until(lambda: (tmp_path / "at-1").read_text() != first)  # a new one, and kept again
        vaults = [vault_pid(run, node) for node in range(2)]
        run.kill_agent("node0")
        run.until(lambda: (tmp_path / "found-0").exists())
        assert all(procfs.sample(pid) for pid in vaults)
        assert run.wait() == 0, run.text()
    assert (tmp_path / "found-0").read_text() == "1 own, 1 pulled"
    assert "the vault of node1 died (SIGKILL)" in run.text()
    assert not any(procfs.sample(pid) for pid in vaults)


def vault_pid(run: LocalRun, node: int) -> int:
    return int((run.run_dir / f"vault-node{node}.pid").read_text())
