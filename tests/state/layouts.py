"""One small model in many layouts, without processes: each role's part of it is built in a world of its own that only
pretends (torch's "fake" backend; FSDP2 and DTensor are the real ones).

Every value follows from its global name, so what any role must hold is known without another copy of the state.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from everstep.state.local import extent, like, local

NUM_BLOCKS = 4
MOMENTS = ("exp_avg", "exp_avg_sq")


class Layout(NamedTuple):
    stages: int = 1
    replicas: int = 1
    shards: int = 1
    tensor: int = 1

    @property
    def roles(self) -> int:
        return self.stages * self.replicas * self.shards * self.tensor


LAYOUTS = {
    "alone": Layout(),
    "replicas 2": Layout(replicas=2),
    "fsdp 2": Layout(shards=2),
    "fsdp 4": Layout(shards=4),
    "fsdp 3": Layout(shards=3),
    "tp 2": Layout(tensor=2),
    "stages 2": Layout(stages=2),
    "stages 4": Layout(stages=4),
    "hsdp 2x2": Layout(replicas=2, shards=2),
    "fsdp 2, tp 2": Layout(shards=2, tensor=2),
    "stages 2, fsdp 2": Layout(stages=2, shards=2),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 10, bias=False)
        self.down = nn.Linear(10, 6, bias=False, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.empty(3))  # uneven for 2 shards, empty on the last of 4
        self.register_buffer("seen", torch.empty((), dtype=torch.int64))


class Net(nn.Module):
    """A stage of the model; first and last stage have the tied embedding, one stage has it once."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__()
        size = NUM_BLOCKS // stages
        if stage == 0:
            self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleDict({str(n): Block() for n in range(stage * size, (stage + 1) * size)})
        if stage == stages - 1:
            self.head = nn.Linear(6, 11, bias=False)
            if stage == 0:
                self.head.weight = self.embed.weight


def value(name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor of a global name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.replace("head.", "embed.").encode()))
    return torch.randint(-100, 100, shape, generator=generator).to(like.dtype)


@contextlib.contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build(layout: Layout, role: int) -> dict[str, Any]:
    """A role's objects with undefined values. Only inside of its `world`."""
    per_stage = layout.roles // layout.stages
    model = Net(role // per_stage, layout.stages)
    pp, dp, fs, tp = (f"{axis}{role}" for axis in ("pp", "dp", "fs", "tp"))  # torch keeps parts of meshes with one name
    mesh = init_device_mesh("cpu", tuple(layout), mesh_dim_names=(pp, dp, fs, tp))
    if layout.tensor > 1:
        split(model, mesh[tp])
    if layout.shards > 1:
        inner = mesh[dp, fs] if layout.replicas > 1 else mesh[fs]
        for block in model.blocks.values():
            fully_shard(block, mesh=inner)
        fully_shard(model, mesh=inner)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.5)}


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Tensor parallel: the first of two linear layers by rows, the second by columns, all else as a whole."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            place: Any = Replicate()
            if isinstance(module, nn.Linear) and module.weight.shape != (11, 6):
                place = Shard(0 if module.out_features > module.in_features else 1)
            parted = distribute_tensor(parameter.detach(), mesh, [place], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(parted))
    if hasattr(model, "embed") and hasattr(model, "head"):
        model.head.weight = model.embed.weight


def names(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


def fill(objects: dict[str, Any]) -> None:
    """The values that belong to the names, in parameters, buffers and the optimizer's state."""
    model, optimizer = objects["model"], objects["optimizer"]
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            local(tensor).copy_(mine(name, tensor))
        for name, parameter in names(model).items():
            moments = {moment: like(parameter, mine(f"{name}.{moment}", parameter)) for moment in MOMENTS}
            optimizer.state[parameter] = {"step": torch.tensor(7.0), **moments}
    optimizer.param_groups[0]["lr"] = 0.125


def scramble(objects: dict[str, Any], fresh: bool) -> None:
    """Other values everywhere; `fresh`: the optimizer has no state either."""
    optimizer = objects["optimizer"]
    states = [tensor for state in optimizer.state.values() for tensor in state.values()]
    with torch.no_grad():
        for tensor in (*objects["model"].state_dict().values(), *states):
            local(tensor).fill_(111)
    optimizer.param_groups[0]["lr"] = 111.0
    if fresh:
        optimizer.state.clear()


def mine(name: str, tensor: Tensor) -> Tensor:
    """The local part of what a tensor of this name and layout must hold."""
    shape, offsets = extent(tensor)
    part = local(tensor)
    places = tuple(slice(at, at + length) for at, length in zip(offsets, part.shape, strict=True))
    return value(name, part, shape)[places].clone()


def check(objects: dict[str, Any]) -> int:
    """Every bit is what its name says. Returns the number of tensors."""
    model, optimizer = objects["model"], objects["optimizer"]
    found = [(name, tensor, tensor) for name, tensor in model.state_dict().items()]
    for name, parameter in names(model).items():
        state = optimizer.state[parameter]
        assert list(state) == ["step", *MOMENTS]
        assert state["step"].item() == 7
        found += [(f"{name}.{moment}", state[moment], parameter) for moment in MOMENTS]
    for name, tensor, model_of_it in found:
        assert type(tensor) is type(model_of_it.detach()), name
        assert torch.equal(local(tensor), mine(name, model_of_it)), name
    assert optimizer.param_groups[0]["lr"] == 0.125
    return len(found)
