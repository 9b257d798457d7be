"""A board costs what is touched, only its owner writes it, and no view outlives its memory."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import resource
from pathlib import Path

import pytest
import torch

from everstep.comms import board
from everstep.comms.board import Board


def peer_of(own: Board) -> Board:
    return Board.attach(os.open(f"/proc/self/fd/{own.fd}", os.O_RDONLY | os.O_CLOEXEC))


def test_a_peer_sees_what_the_owner_writes() -> None:
    own = Board.create("test")
    peer = peer_of(own)
    own.slot(3, 1)[:4] = torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
    own.words[board.state_word(3)] = 1 << 50
    assert peer.slot(3, 1)[:5].tolist() == [1, 2, 3, 4, 0]
    assert peer.slot(3, 0)[:4].tolist() == [0] * 4
    assert peer.words[board.state_word(3)] == 1 << 50
    assert bytes(peer.slot_bytes(3, 1)[:4]) == b"\x01\x02\x03\x04"
    own.close()
    peer.close()


def test_a_peer_cannot_write() -> None:
    own = Board.create("test")
    peer = peer_of(own)
    with pytest.raises(TypeError, match="read-only"):
        peer.words[0] = 1
    if (pid := os.fork()) == 0:
        faulthandler.disable()
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        peer.slot(0, 0)[0] = 1
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -11
    own.close()
    peer.close()


def test_a_forked_child_gives_it_up() -> None:
    """The descriptors too, of which Python's mapping has one; and the child goes on, with other mappings."""
    own = Board.create("forked")
    peer = peer_of(own)
    peer.close()
    if (pid := os.fork()) == 0:
        own.disown()
        peer.disown()
        mmap.mmap(-1, 1 << 22)[-1] = 1  # torch may have threads here, which the child has not
        files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        os._exit(" ".join([*files, Path("/proc/self/maps").read_text()]).count("memfd:everstep-forked"))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert own.words[0] == 0
    own.close()


def test_untouched_parts_cost_nothing() -> None:
    own = Board.create("test")
    assert os.fstat(own.fd).st_blocks == 0
    own.arena[-1] = 1
    assert os.fstat(own.fd).st_blocks * 512 == os.sysconf("SC_PAGE_SIZE")
    own.close()


def test_no_part_lies_in_another() -> None:
    own = Board.create("test")
    spans = [(own.words.nbytes, 0)]
    for tensor in (own.slot(0, 0), own.slot(0, 1), own.slot(board.MAX_COMMUNICATORS - 1, 1)):
        spans.append((tensor.numel(), tensor.data_ptr() - own.address))
    spans += [(r.numel(), r.data_ptr() - own.address) for r in (own.ring(0), own.ring(board.MAX_LOCAL - 1), own.arena)]
    ends = 0
    for length, begin in spans:
        assert begin >= ends and begin % 64 == 0
        ends = begin + length
    assert ends == board.TOTAL_BYTES
    last = board.taken_word(board.MAX_LOCAL - 1)
    words = [board.state_word(i) for i in range(board.MAX_COMMUNICATORS)]
    words += [board.header_word(i, p) for i in range(board.MAX_COMMUNICATORS) for p in (0, 1)]
    words += [board.sent_word(i) for i in range(board.MAX_LOCAL)] + [
        board.taken_word(i) for i in range(board.MAX_LOCAL)
    ]
    assert len({word * 8 // board.LINE_BYTES for word in words}) == len(words)  # a cache line each
    assert last < len(own.words)
    own.close()


def test_a_view_outlives_its_board_and_then_all_is_gone() -> None:
    own = Board.create("a-name-to-look-for")
    view = own.slot(0, 0)[:3]
    own.close()
    del own
    gc.collect()
    view[:] = 7
    assert view.tolist() == [7, 7, 7] and "a-name-to-look-for" in Path("/proc/self/maps").read_text()
    del view
    gc.collect()
    assert "a-name-to-look-for" not in Path("/proc/self/maps").read_text()


def test_a_board_of_another_version_is_refused() -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, 4096)
    with pytest.raises(ValueError, match="a board of 4096 bytes"):
        Board.attach(fd)
    os.close(fd)
