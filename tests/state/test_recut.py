"""Images of real layouts through the disk: read back into other layouts, as they are and cut into other shards."""

from __future__ import annotations

from pathlib import Path

import layouts
import msgspec
import pytest
import torch.distributed.checkpoint as dcp
from images import take

from everstep.state import compare, stock
from everstep.state.disk import Checkpoints
from everstep.state.recut import recut
from everstep.state.restore import load


def save(where: Path, name: str) -> None:
    layout = layouts.LAYOUTS[name]
    for role in range(layout.roles):
        with layouts.world(role, layout.roles):
            objects = layouts.build(layout, role)
            layouts.fill(objects)
            source = take(objects, role, layout.roles)
            written = Checkpoints(where).write(source.index, memoryview(source.data))
    assert written.complete


def check(where: Path, name: str) -> None:
    layout = layouts.LAYOUTS[name]
    for role in range(layout.roles):
        with layouts.world(role, layout.roles):
            objects = layouts.build(layout, role)
            load(objects, Checkpoints(where).sources(7))
            assert layouts.check(objects) > 10, (name, role)


@pytest.mark.parametrize("name", ["stages 2, fsdp 2", "fsdp 2, tp 2"])
def test_other_shards(tmp_path: Path, name: str) -> None:
    save(tmp_path / "a", name)
    sources = Checkpoints(tmp_path / "a").sources(7)
    assert stock.merge_what_fits([source.index for source in sources])[1] == []
    check(tmp_path / "a", "fsdp 2")
    for num_shards in (1, 4):
        there = Checkpoints(tmp_path / str(num_shards))
        assert recut(sources, there, num_shards)[-1].complete
        assert there.verify(7) == [] and len(there.sources(7)) == num_shards
        assert list(compare.differences(sources, there.sources(7))) == []
        check(tmp_path / str(num_shards), "stages 2")
        check(tmp_path / str(num_shards), "fsdp 3")
    with pytest.raises(ValueError, match="at least one shard"):
        recut(sources, Checkpoints(tmp_path / "none"), 0)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_stock_pytorch_reads_what_was_cut(tmp_path: Path) -> None:
    save(tmp_path / "a", "fsdp 2")
    recut(Checkpoints(tmp_path / "a").sources(7), Checkpoints(tmp_path / "b"), 3)
    layout = layouts.LAYOUTS["alone"]
    with layouts.world(0, 1):
        want = layouts.build(layout, 0)
        layouts.fill(want)
        names = {f"model.{name}": tensor for name, tensor in want["model"].state_dict().items()}
    for where in ("a", "b"):
        got = {name: tensor.detach().clone().zero_() for name, tensor in names.items()}
        dcp.load(got, checkpoint_id=tmp_path / where / "step-0000000007", no_dist=True)
        assert all(got[name].equal(names[name]) for name in names), where


def test_blobs_stay_what_they_were(tmp_path: Path) -> None:
    save(tmp_path / "a", "fsdp 2")
    sources = Checkpoints(tmp_path / "a").sources(7)
    recut(sources, Checkpoints(tmp_path / "b"), 1)
    (there,) = Checkpoints(tmp_path / "b").sources(7)
    assert there.index.blobs and [b.name for b in there.index.blobs] == [b.name for b in sources[0].index.blobs]
    data = [bytearray(source.index.num_bytes) for source in (sources[0], there)]
    for source, into in zip((sources[0], there), data, strict=True):
        source.read(0, memoryview(into))
    for one, other in zip(sources[0].index.blobs, there.index.blobs, strict=True):
        assert data[0][one.item[0] : sum(one.item)] == data[1][other.item[0] : sum(other.item)]
    assert msgspec.structs.asdict(there.index)["objects"]
