"""What a script logged of one step, on its way to the journal: from the worker's page over heartbeats.

The page always holds the newest, also that of a worker which was killed a moment ago: nothing is sent for it, and
nobody waits. It has room for a few dozen values; what is more is left out, from the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

MOST_VALUES = 64
MOST_CHARS = 100  # of a name


class Logged(msgspec.Struct, frozen=True, array_like=True):
    """Values of a committed step, counted from 1, as its member logged them in that epoch; 0: without a session."""

    epoch: int
    step: int
    values: dict[str, float]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Logged)


def finite(values: Mapping[str, float]) -> dict[str, float]:
    """Those that a chart can show. One which is no number is told otherwise: it is an anomaly."""
    return {name[:MOST_CHARS]: value for name, value in values.items() if math.isfinite(value)}


def encode(logged: Logged, most_bytes: int) -> bytes:
    names = list(logged.values)[:MOST_VALUES]
    while True:
        values = {name: logged.values[name] for name in names}
        data = _encoder.encode(Logged(logged.epoch, logged.step, values))
        if len(data) <= most_bytes or not names:
            return data
        names = names[: len(names) // 2]


def decode(data: bytes) -> Logged | None:
    """None: these bytes are none; a script can write anything to its own memory."""
    try:
        logged = _decoder.decode(data)
    except msgspec.DecodeError:
        return None
    return msgspec.structs.replace(logged, values=finite(logged.values))
