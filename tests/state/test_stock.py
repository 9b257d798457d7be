"""Stock PyTorch reads what was written, in a process that knows nothing of Everstep."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_images as images
import torch

from everstep.state import stock
from everstep.state.disk import Checkpoints
from everstep.state.image import Damaged

READ = """
import sys, torch, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
folder, out = sys.argv[1:]
got = {
    "model": {"blocks.0.weight": torch.zeros(12, 8), "blocks.0.bias": torch.zeros(12, dtype=torch.bfloat16),
              "scale": torch.tensor(0.0)},
    "optimizer": {"state.blocks.0.weight.exp_avg": torch.zeros(12, 8), "param_groups": None},
}
dcp.load(got, checkpoint_id=folder)
dcp_to_torch_save(folder, out + ".whole")
torch.save(got, out)
assert not [name for name in sys.modules if name.startswith("everstep")]
"""


def test_stock_load(tmp_path: Path) -> None:
    state, groups = images.state(7), [{"lr": 1e-3, "betas": (0.9, 0.95)}]
    for shard in (1, 0):
        parts = images.image(state, 7, shard=shard, num_shards=2, blobs={"optimizer.param_groups": groups})
        Checkpoints(tmp_path).write(*parts)
    command = [sys.executable, "-W", "ignore", "-c", READ, str(tmp_path / "step-0000000007"), str(tmp_path / "out")]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": ""}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    got = torch.load(tmp_path / "out")
    assert got["optimizer"].pop("param_groups") == groups
    assert_same(got, {name: tensor for name, tensor in state.items() if not name.endswith(".step")})
    whole = torch.load(tmp_path / "out.whole")  # without a template: names as the objects have them
    assert whole["optimizer"].pop("param_groups") == groups
    assert_same(whole, state)


def assert_same(got: dict[str, dict[str, torch.Tensor]], want: dict[str, torch.Tensor]) -> None:
    flat = {f"{owner}.{name}": tensor for owner, part in got.items() for name, tensor in part.items()}
    assert flat.keys() == want.keys()
    assert all(torch.equal(flat[name], want[name]) and flat[name].dtype == want[name].dtype for name in want)


def test_shards_that_do_not_fit() -> None:
    """The save is not refused: it can be restored from, but stock PyTorch does not see these names."""
    first, _ = images.image(images.state(1), 1, shard=0, num_shards=2)
    other, _ = images.image(images.state(1, num_rows=14), 1, shard=1, num_shards=2)
    with pytest.raises(Damaged, match=r"model.blocks.0.weight: the shards do not agree"):
        stock.merge([first, other])
    with pytest.raises(Damaged, match=r"do not make a whole tensor of shape \(12, 8\)"):
        stock.merge([first])
    assert b"model.scale" in stock.metadata([first, other]) and b"model.blocks" not in stock.metadata([first, other])
