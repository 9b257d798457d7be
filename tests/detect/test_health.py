"""Readings to complaints: what is broken by itself, what is slow beside others, and what is neither."""

from __future__ import annotations

import math

import pytest

from everstep.core.checkup import Reading
from everstep.detect import health
from everstep.detect.health import Bars

WELL = [
    Reading("matmul.wrong", 0, "cpu"), Reading("matmul.differs", 0, "cpu"), Reading("matmul.rate", 100e9, "cpu"),
    Reading("memory.free", 8e9), Reading("shm.free", 4e9, "/dev/shm"), Reading("disk.write", 200e6, "/data"),
    Reading("files.limit", 4096), Reading("clock.step", 0.001), Reading("version", 0, "torch", "2.13.0"),
]  # fmt: skip


def but(check: str, value: float, detail: str = "") -> list[Reading]:
    return [Reading(r.check, value, r.on, detail) if r.check == check else r for r in WELL]


def test_a_node_that_is_well() -> None:
    assert health.judge(WELL, Bars(), [WELL, WELL], WELL) == ()
    assert health.verdict("node3", ()) is None


@pytest.mark.parametrize(
    ("check", "value", "why"),
    [
        ("matmul.wrong", 1, "rows of a matrix product with a wrong value (cpu): 1 rows, expected at most 0 rows"),
        ("matmul.differs", 3, "values that differ when it is repeated (cpu): 3 values, expected at most 0 values"),
        ("shm.free", 1000, "shared memory (/dev/shm): 1.0 kB, at least 1.0 MB are needed"),
        ("memory.free", math.nan, "memory available: nan B, at least 67.1 MB are needed"),
        ("files.limit", 32, "descriptors a process may have: 32 files, at least 128 files are needed"),
        ("clock.step", 3600.5, "jump of the wall clock: 3.6e+03 s, expected at most 0.05 s"),
    ],
)
def test_broken_by_itself(check: str, value: float, why: str) -> None:
    (found,) = health.judge(but(check, value), Bars())
    assert (found.check, found.broken, found.why) == (check, True, why)


def test_slow_only_beside_others() -> None:
    slow = but("matmul.rate", 40e9)
    assert health.judge(slow, Bars()) == ()
    (beside,) = health.judge(slow, Bars(), [WELL, WELL])
    assert not beside.broken
    assert beside.why == "matrix product (cpu): 40.0 Gflop/s, the other nodes have 100.0 Gflop/s"
    (since,) = health.judge(slow, Bars(), earlier=WELL)
    assert since.why.endswith("it had 100.0 Gflop/s")
    assert health.judge(slow, Bars(slow=0.3), [WELL, WELL]) == ()


def test_disks_vary_and_are_given_more() -> None:
    assert health.judge(but("disk.write", 30e6), Bars(), [WELL]) == ()
    assert [c.check for c in health.judge(but("disk.write", 20e6), Bars(), [WELL])] == ["disk.write"]


def test_the_odd_version_is_told_to_the_odd_one() -> None:
    odd = but("version", 0, "2.12.1")
    (found,) = health.judge(odd, Bars(), [WELL, WELL])
    assert found.why == "torch 2.12.1, the other nodes have 2.13.0"
    assert health.judge(WELL, Bars(), [odd, WELL]) == ()
    assert len(health.judge(WELL, Bars(), [odd])) == 1  # of two nobody knows which one is right


def test_the_verdict_names_the_node_and_the_worst() -> None:
    found = health.judge(but("matmul.wrong", 2), Bars(), [WELL])
    verdict = health.verdict("node3", found)
    assert verdict is not None
    assert (verdict.kind, verdict.culprits[0].node, verdict.confidence) == ("corrupt", "node3", 1.0)
    slow = health.verdict("node3", health.judge(but("matmul.rate", 1e9), Bars(), [WELL]))
    assert slow is not None and slow.kind == "slow"
