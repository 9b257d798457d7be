"""Readings of this machine: a wrong product is seen whatever bit flipped, and a ring tells who is no member of it."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from everstep.core.checkup import Place, RingDone, decode, encode
from everstep.detect import health
from everstep.probe import device, exam
from everstep.probe.ring import Rings

N = 64
A, B = device.factors(N)
PRODUCT = A @ B
ZERO = divmod(int((PRODUCT == 0).flatten().nonzero()[0]), N)
TOKEN = b"t" * 32


def test_this_machine_is_well(tmp_path: Path) -> None:
    found = exam.take(tmp_path)
    assert health.judge(found, health.Bars()) == ()
    assert {"matmul.wrong", "memory.rate", "disk.write", "shm.free", "network.rate", "clock.step"} <= {
        reading.check for reading in found
    }
    assert decode(encode(found)) == found
    assert decode(encode(found)[:-5]) == []


@settings(max_examples=50)
@given(st.integers(0, N - 1), st.integers(0, N - 1), st.integers(0, 31))
@example(*ZERO, 0)  # too small to show in a sum
@example(*ZERO, 31)
def test_any_flipped_bit_of_a_product_is_seen(row: int, column: int, bit: int) -> None:
    damaged = PRODUCT.clone()
    damaged.view(torch.int32)[row, column] ^= -(2**31) if bit == 31 else 1 << bit
    harmless = bool(PRODUCT[row, column] == 0) and bit == 31  # minus zero
    assert device.wrong_rows(A, B, damaged) == (0 if harmless else 1)


def ring(parts: list[Rings], places: list[Place], seconds: float = 0.1) -> list[RingDone]:
    done: dict[str, RingDone] = {}

    def take_part(rings: Rings, node: str) -> None:
        done[node] = rings.run(7, places, node, seconds)

    threads = [
        threading.Thread(target=take_part, args=(rings, place.node)) for rings, place in zip(parts, places, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [done[place.node] for place in places]


def test_a_ring_goes_round() -> None:
    parts = [Rings("127.0.0.1", TOKEN) for _ in range(3)]
    places = [Place(f"n{k}", "127.0.0.1", rings.port) for k, rings in enumerate(parts)]
    for done in ring(parts, places):
        assert done.rate > 1e6
        assert (done.wrong, done.why) == (0, "")
    for rings in parts:
        rings.close()


def test_who_does_not_hold_the_token_is_no_member() -> None:
    parts = [Rings("127.0.0.1", TOKEN), Rings("127.0.0.1", b"x" * 32)]
    places = [Place(f"n{k}", "127.0.0.1", rings.port) for k, rings in enumerate(parts)]
    for done in ring(parts, places):
        assert done.rate == 0.0
        assert "does not hold the token" in done.why
    for rings in parts:
        rings.close()


def test_a_member_that_is_not_there_fails_the_ring() -> None:
    rings = Rings("127.0.0.1", TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    places = [Place("n0", "127.0.0.1", rings.port), Place("n1", "127.0.0.1", port)]
    done = rings.run(1, places, "n0", 0.1)
    assert done.rate == 0.0 and done.why.startswith("to n1: ")
    rings.close()
