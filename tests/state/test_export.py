"""Whole tensors out of parts: runs, safetensors files, differences."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import small_images as images
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file

from everstep.state import assemble, compare, export
from everstep.state.disk import Checkpoints, FileSource
from everstep.state.image import Piece
from everstep.state.layout import TEMPORARY

KINDS = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64"]


def sources(where: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> list[FileSource]:
    for shard in range(num_shards):
        Checkpoints(where).write(*images.image(tensors, 1, shard=shard, num_shards=num_shards))
    return Checkpoints(where).sources(1)


@given(st.data())
def test_runs_are_the_bytes_of_a_box(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 5), max_size=4))
    offsets = [data.draw(st.integers(0, size - 1)) for size in shape]
    sizes = [data.draw(st.integers(1, size - start)) for size, start in zip(shape, offsets, strict=True)]
    whole = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
    box = np.ascontiguousarray(whole[tuple(slice(a, a + n) for a, n in zip(offsets, sizes, strict=True))])
    piece = Piece("x", "int32", (*shape,), (*offsets,), (*sizes,), 0, box.nbytes, (0, 0))
    made, told = bytearray(whole.nbytes), bytearray(whole.nbytes)
    for start, place, length in assemble.runs(piece):
        made[place : place + length] = box.tobytes()[start : start + length]
        told[place : place + length] = b"\xff" * length
    assert sum(length for _, _, length in assemble.runs(piece)) == box.nbytes
    mask = np.frombuffer(told, np.int32).reshape(shape) == -1
    assert np.array_equal(np.frombuffer(made, np.int32).reshape(shape)[mask], whole[mask])
    assert np.array_equal(whole[mask], box.reshape(-1))


def test_safetensors_of_all_kinds_from_shards(tmp_path: Path) -> None:
    values = torch.arange(24).reshape(6, 4) % 7
    tensors = {f"model.{kind}": values.to(getattr(torch, kind)) for kind in KINDS}
    tensors |= {"model.empty": torch.empty(0, 3), "model.one": torch.tensor(2.5), "optimizer.state.x.step": values}
    tensors |= {"model.large": torch.randn(1_500_000, 2)}  # more than one chunk in each shard
    parts = sources(tmp_path, tensors, 2)
    assert parts[0].index.num_chunks > 1
    progress: list[int] = []
    num_tensors = export.export(parts, tmp_path / "out.safetensors", "model", progress.append)
    assert num_tensors == len(KINDS) + 3
    got = load_file(tmp_path / "out.safetensors")
    assert {f"model.{name}" for name in got} == {name for name in tensors if name.startswith("model.")}
    for name, tensor in got.items():
        want = tensors[f"model.{name}"]
        assert tensor.dtype == want.dtype and tensor.shape == want.shape
        assert compare_bytes(tensor) == compare_bytes(want), name
    assert sum(progress) == sum(tensor.nbytes for tensor in got.values())
    with safe_open(tmp_path / "out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "1"}
    with pytest.raises(ValueError, match="no tensor of 'mdoel' in this checkpoint: it holds model, optimizer"):
        export.export(parts, tmp_path / "no", "mdoel")
    assert not [path for path in tmp_path.iterdir() if TEMPORARY in path.name or path.name == "no"]


def compare_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_differences_whatever_the_layout(tmp_path: Path) -> None:
    state = images.state(1)
    a, same = sources(tmp_path / "a", state, 1), sources(tmp_path / "same", state, 3)
    assert list(compare.differences(a, same)) == []
    other = state | {"model.scale": torch.tensor(3.5), "model.new": torch.zeros(2)}
    other["model.blocks.0.bias"] = state["model.blocks.0.bias"].clone()
    other["model.blocks.0.bias"][3] += 2
    other["optimizer.state.blocks.0.weight.exp_avg"] = torch.zeros(5)
    found = {one.name: one for one in compare.differences(a, sources(tmp_path / "b", other, 2))}
    assert found.keys() == {name for name in other if other[name] is not state.get(name)}
    assert found["model.scale"].max_abs == 2.5 and found["model.scale"].what == "1 of 1 elements"
    assert found["model.blocks.0.bias"].what == "1 of 12 elements"
    assert found["model.blocks.0.bias"].max_abs == pytest.approx(2, abs=0.02)
    assert found["model.new"].what == "only in the second"
    assert found["optimizer.state.blocks.0.weight.exp_avg"].what == "float32 [12, 8] and float32 [5]"
