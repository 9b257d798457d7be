"""The tensors of one protected object as a safetensors file, out of all shards, without holding them in memory.

The format (huggingface/safetensors): 8 bytes with the length of the header, the header as JSON, the tensors row-major.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from everstep.state import assemble
from everstep.state.folder import sync
from everstep.state.image import Source
from everstep.state.layout import TEMPORARY
from everstep.state.stock import Parts, merge

NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip


def export(
    sources: Sequence[Source], to: Path, owner: str, progress: Callable[[int], None] = lambda num_bytes: None
) -> int:
    """Write the tensors whose names begin with `owner` and a point, without both. The number of tensors.

    Raises ValueError when there are none, or one is of a dtype which the format has not; Damaged, OSError.
    """
    found = merge([source.index for source in sources])
    tensors = {name: parts for name, parts in found.items() if name.startswith(owner + ".")}
    if not tensors:
        there = sorted({name for source in sources for name, _ in source.index.objects})
        raise ValueError(f"no tensor of {owner!r} in this checkpoint: it holds {', '.join(there)}")
    for name, parts in tensors.items():
        if parts.first.dtype not in NAMES:
            raise ValueError(f"{name} is of dtype {parts.first.dtype}, which safetensors has not")
    step = sources[0].index.step
    begins, head = _head({name[len(owner) + 1 :]: parts for name, parts in tensors.items()}, step)
    temporary = to.with_name(to.name + TEMPORARY + str(os.getpid()))
    try:
        with temporary.open("xb") as file:
            file.write(head)
            file.flush()

            def put(name: str, place: int, part: memoryview) -> None:
                start = begins[name[len(owner) + 1 :]] + place
                done = 0
                while done < len(part):
                    done += os.pwrite(file.fileno(), part[done:], start + done)
                progress(len(part))

            assemble.spread(assemble.windows(sources), tensors, put)
            os.fsync(file.fileno())
        temporary.replace(to)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync(to.parent)
    return len(tensors)


def _head(tensors: dict[str, Parts], step: int) -> tuple[dict[str, int], bytes]:
    """(the first byte of each tensor in the file, what comes before the tensors)."""
    header: dict[str, object] = {"__metadata__": {"format": "pt", "step": str(step)}}
    at, begins = 0, {}
    for name in sorted(tensors, key=lambda name: (-_item_bytes(tensors[name]), name)):  # so all are aligned
        parts, size = tensors[name].first, assemble.num_bytes(tensors[name])
        header[name] = {"dtype": NAMES[parts.dtype], "shape": parts.global_shape, "data_offsets": [at, at + size]}
        begins[name] = at
        at += size
    text = msgspec.json.encode(header)
    text += b" " * (-len(text) % 8)
    return {name: 8 + len(text) + start for name, start in begins.items()}, struct.pack("<Q", len(text)) + text


def _item_bytes(parts: Parts) -> int:
    kind = NAMES[parts.first.dtype]
    bits = "".join(letter for letter in kind.partition("_")[0] if letter.isdigit())
    return int(bits or 8) // 8
