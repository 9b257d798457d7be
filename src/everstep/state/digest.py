"""A fingerprint of state, to compare replicas bit by bit.

Equal values, types and order of entries give equal fingerprints, wherever the tensors lie. Each 32 KB row of a tensor
becomes one 64-bit number, sum(key[i] * (word[i] + (word[i] >> 32))) modulo 2 ** 64 with fixed random odd keys, computed
where the tensor is; the numbers, the rest of each tensor and the header then go through BLAKE2b. One changed word in a
row always shows; others are missed with odds of about 2 ** -32 (the shift is there for the high bits: without it an
even number of flipped signs would cancel). Against accidents, not against forgers.

About four times as fast as BLAKE2b over all bytes (0.95 GB/s a core; SHA-256 1.8). torch.hash_tensor is faster (7 to
23 GB/s) but an exclusive or of all elements: it does not see two elements swapped, nor another constant in a constant
tensor.
"""

from __future__ import annotations

import functools
import hashlib

import msgspec
import torch
from torch import Tensor

from everstep.state.flatten import DIGEST_BYTES, Flat, parse

WORD_BYTES = 8
ROW_WORDS = 4096
ROW_BYTES = ROW_WORDS * WORD_BYTES
PIECE_ROWS = 16  # 512 KB: what is computed from it stays in the cache


def digest(flat: Flat) -> bytes:
    """16 bytes which are equal for equal state."""
    header = parse(flat.header)
    kinds = [(spec.dtype, spec.shape) for spec in header.tensors]
    whole = hashlib.blake2b(msgspec.msgpack.encode((kinds, header.objects)), digest_size=DIGEST_BYTES)
    with torch.no_grad():
        for tensor in flat.tensors:
            octets = as_bytes(tensor)
            rows = octets[: octets.numel() // ROW_BYTES * ROW_BYTES]
            if rows.numel():
                whole.update(as_bytes(row_sums(rows.view(torch.int64).view(-1, ROW_WORDS))).cpu().numpy().data)
            whole.update(octets[rows.numel() :].cpu().numpy().data)
    return whole.digest()


def as_bytes(tensor: Tensor) -> Tensor:
    """The elements in order as one row of uint8; a copy only when they do not lie so."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    octets = tensor.resolve_neg().contiguous().view(-1).view(torch.uint8)
    return octets if octets.storage_offset() % WORD_BYTES == 0 else octets.clone()


def row_sums(words: Tensor) -> Tensor:
    """One 64-bit number for each row of words."""
    keys = row_keys(words.device)
    scratch = torch.empty(PIECE_ROWS, ROW_WORDS, dtype=torch.int64, device=words.device)
    sums = torch.empty(len(words), dtype=torch.int64, device=words.device)
    for piece, out in zip(torch.split(words, PIECE_ROWS), torch.split(sums, PIECE_ROWS), strict=True):
        mixed = torch.bitwise_right_shift(piece, 32, out=scratch[: len(piece)])
        torch.sum(mixed.add_(piece).mul_(keys), 1, out=out)
    return sums


@functools.cache
def row_keys(device: torch.device) -> Tensor:
    """Random odd numbers, the same everywhere and always."""
    stream = hashlib.shake_128(b"everstep digest").digest(ROW_BYTES)
    return (torch.frombuffer(bytearray(stream), dtype=torch.int64) | 1).to(device)
