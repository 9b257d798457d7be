"""Is a node fit for work? From readings to complaints.

Absolute floors are for what is broken: a wrong product, a disk that takes nothing, no shared memory. What is merely
slow is told by comparison only, with the other nodes and with what this node once had, because nobody knows every
machine's numbers beforehand.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from everstep.core.checkup import Complaint, Reading
from everstep.core.types import Blame, Verdict

Readings = Sequence[Reading]


class Bars(msgspec.Struct, frozen=True):
    """Below these nothing works. `slow`: the share of what others have under which a node counts as slow."""

    shm_bytes: int = 1 << 20
    disk_bytes: int = 256 << 10
    memory_bytes: int = 64 << 20
    descriptors: int = 128
    slow: float = 0.5


class Rule(NamedTuple):
    """How a reading is judged. `patience`: 0, it is not compared; 1, against `Bars.slow`; 2, against its square, ..."""

    title: str
    unit: str
    floor: str = ""  # the field of Bars below which it is broken
    most: float = math.inf  # above this it is broken
    patience: int = 0


RULES = {
    "matmul.wrong": Rule("rows of a matrix product with a wrong value", "rows", most=0),
    "matmul.differs": Rule("values that differ when it is repeated", "values", most=0),
    "matmul.rate": Rule("matrix product", "flop/s", patience=1),
    "memory.rate": Rule("memory copy", "B/s", patience=1),
    "memory.wrong": Rule("bytes changed in memory", "B", most=0),
    "memory.free": Rule("memory available", "B", floor="memory_bytes"),
    "copy.rate": Rule("copy from device to device", "B/s", patience=1),
    "copy.wrong": Rule("values changed between devices", "values", most=0),
    "device.failed": Rule("device", "failures", most=0),
    "disk.failed": Rule("disk", "failures", most=0),
    "disk.wrong": Rule("bytes read back changed", "B", most=0),
    "disk.free": Rule("room on the disk", "B", floor="disk_bytes"),
    "disk.write": Rule("write and fsync", "B/s", patience=3),  # page caches and neighbours: an honest disk varies
    "disk.read": Rule("read", "B/s", patience=3),
    "shm.free": Rule("shared memory", "B", floor="shm_bytes"),
    "files.limit": Rule("descriptors a process may have", "files", floor="descriptors"),
    "clock.step": Rule("jump of the wall clock", "s", most=0.05),  # slewing by NTP is at most 500 ppm
    "network.failed": Rule("network", "failures", most=0),
    "network.rate": Rule("to itself", "B/s", patience=2),
    "network.wrong": Rule("chunks changed on the way", "chunks", most=0),
    "version": Rule("version", ""),
    "cpus": Rule("processors", "cpus", patience=1),
}


def judge(
    readings: Readings, bars: Bars, peers: Sequence[Readings] = (), earlier: Readings = ()
) -> tuple[Complaint, ...]:
    """Everything wrong with one node. `peers`: readings of the other nodes; `earlier`: of this one when it was well."""
    found = [complaint for reading in readings for complaint in _broken(reading, bars)]
    found += _odd_versions(readings, peers)
    others = [_by_key(one) for one in peers]
    before = _by_key(earlier)
    for reading in readings:
        key = (reading.check, reading.on)
        found += _slow(reading, bars, [one[key].value for one in others if key in one], "the other nodes have")
        found += _slow(reading, bars, [before[key].value] if key in before else [], "it had")
    return tuple(found)


def _median(values: Sequence[float]) -> float:
    """The lower one of two middle values. Not statistics.median: its import costs an agent 10 ms."""
    return sorted(values)[(len(values) - 1) // 2]


def sentence(complaints: Sequence[Complaint]) -> str:
    return "; ".join(complaint.why for complaint in complaints)


def verdict(node: str, complaints: Sequence[Complaint]) -> Verdict | None:
    """As every detector says it; None for a node that is well."""
    if not complaints:
        return None
    wrong = any(c.check.endswith((".wrong", ".differs")) for c in complaints)
    kind = "corrupt" if wrong else "broken" if any(c.broken for c in complaints) else "slow"
    blames = tuple(Blame(-1, node, c.check, c.why) for c in complaints)
    return Verdict(kind, blames, sentence(complaints), 1.0 if all(c.sure for c in complaints) else 0.5)


def _by_key(readings: Readings) -> Mapping[tuple[str, str], Reading]:
    return {(reading.check, reading.on): reading for reading in readings}


def _broken(reading: Reading, bars: Bars) -> list[Complaint]:
    rule = RULES[reading.check]
    floor: float = getattr(bars, rule.floor) if rule.floor else -math.inf
    if reading.value > rule.most:
        why = reading.detail or f"{amount(reading.value, rule.unit)}, expected at most {amount(rule.most, rule.unit)}"
    elif not reading.value >= floor:  # not a number is below everything
        why = f"{amount(reading.value, rule.unit)}, at least {amount(floor, rule.unit)} are needed"
    else:
        return []
    return [Complaint(reading.check, f"{named(reading)}: {why}")]


def _slow(reading: Reading, bars: Bars, known: Sequence[float], words: str) -> list[Complaint]:
    rule = RULES[reading.check]
    if not rule.patience or not known:
        return []
    usual = _median(known)
    if reading.value >= bars.slow**rule.patience * usual:
        return []
    why = f"{named(reading)}: {amount(reading.value, rule.unit)}, {words} {amount(usual, rule.unit)}"
    return [Complaint(reading.check, why, broken=False)]


def _odd_versions(readings: Readings, peers: Sequence[Readings]) -> list[Complaint]:
    """What most nodes have is right; of two nodes that differ neither is."""
    found = []
    for own in (r for r in readings if r.check == "version"):
        all_of_them = [own.detail, *(r.detail for one in peers for r in one if (r.check, r.on) == ("version", own.on))]
        count = Counter(all_of_them)
        if count[own.detail] * 2 <= len(all_of_them) and len(count) > 1:
            others = ", ".join(sorted(set(all_of_them) - {own.detail}))
            found.append(Complaint("version", f"{own.on} {own.detail}, the other nodes have {others}"))
    return found


def named(reading: Reading) -> str:
    title = RULES[reading.check].title
    return f"{title} ({reading.on})" if reading.on else title


def amount(value: float, unit: str) -> str:
    """A number for people: 12.3 GB/s, 64.0 MB, 3 rows."""
    if unit in ("B", "B/s", "flop/s"):
        for prefix, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if abs(value) >= size:
                return f"{value / size:.1f} {prefix}{unit}"
    shown = f"{value:.0f}" if float(value).is_integer() else f"{value:.3g}"
    return f"{shown} {unit}".rstrip()
