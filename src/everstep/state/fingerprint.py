"""Fingerprints of objects, to compare the replicas of one shard after a restore: equal for equal bits.

One for each object, so that a difference has a name. In host memory a hash of all bytes by XXH3 (30 GB/s a core: as
fast as memory is read); on a device the row sums of `state.digest`, so that only those leave it. Against accidents,
not against forgers.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
import xxhash
from torch import Tensor

from everstep.state import naming
from everstep.state.digest import ROW_BYTES, ROW_WORDS, as_bytes, row_sums
from everstep.state.flatten import Stateful
from everstep.state.naming import Kind
from everstep.state.tree import dtype_name


def fingerprints(objects: Mapping[str, Stateful], *, buffers: bool = True) -> dict[str, int]:
    """64 bits for each object; of its values, their order, and of names, dtypes, shapes and bits of its tensors.

    buffers: False leaves out the bits of modules' buffers, which DistributedDataParallel makes equal in each forward.
    Replicas of one shard have equal ones, wherever their tensors lie in memory. Raises ValueError as `plan` does.
    """
    with torch.no_grad():
        named = naming.name(objects)
        sums = [of_tensor(p.tensor) if buffers or p.kind is not Kind.BUFFER else 0 for p in named.parts]
    tensors: dict[str, list[object]] = {key: [] for key in objects}
    for title, number in named.names:
        part = named.parts[number]
        spec = (title, dtype_name(part.tensor.dtype), tuple(part.tensor.shape), part.global_shape, part.offsets)
        tensors[title.partition(".")[0]].append((*spec, sums[number]))
    return {
        key: xxhash.xxh3_64_intdigest(msgspec.msgpack.encode((unnumbered(tree), tensors[key])))
        for key, tree in named.trees
    }


def unnumbered(node: object) -> object:
    """The tree without the numbers of its tensors, which count those of other objects too."""
    if not isinstance(node, list):
        return node
    return ["T"] if node and node[0] == "T" else [unnumbered(part) for part in node]


def of_tensor(tensor: Tensor) -> int:
    if tensor.device.type == "cpu":
        return xxhash.xxh3_64_intdigest(octets(tensor).numpy().data)
    flat = as_bytes(tensor)
    rows = flat[: flat.numel() // ROW_BYTES * ROW_BYTES]
    whole = xxhash.xxh3_64(flat[rows.numel() :].cpu().numpy().data)
    if rows.numel():
        whole.update(row_sums(rows.view(torch.int64).view(-1, ROW_WORDS)).cpu().numpy().data)
    return whole.intdigest()


def octets(tensor: Tensor) -> Tensor:
    return tensor.resolve_neg().resolve_conj().contiguous().view(-1).view(torch.uint8)
