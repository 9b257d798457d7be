"""Images: their items are such that stock PyTorch reads them, they hold one moment, and what is not finite is named."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import Any

import images
import layouts
import pytest
import torch
from images import BytesSource
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from everstep.state.capture import Copied, plan
from everstep.state.digest import digest
from everstep.state.flatten import flatten
from everstep.state.image import ALIGN_BYTES, CHUNK_BYTES, decode, encode

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool,
    torch.int8, torch.uint8, torch.int16, torch.uint16, torch.int32, torch.int64, torch.uint64, torch.complex64,
    torch.complex128,
]  # fmt: skip


class Box:
    """A user's object: whatever is put in."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.linear = nn.Linear(6, 6).bfloat16()
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.full((3,), -float("inf")))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.linear(self.embed(tokens).bfloat16()).float()))


def build(seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = Net()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}], lr=0.01 + seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(steps):
        model(torch.arange(10)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "seen": Box(best=[seed, 0.5], by={"x": 1})}


def copy(objects: dict[str, Any]) -> Copied:
    planned = plan(objects)
    return planned.copy(memoryview(bytearray(planned.num_bytes)))


def test_every_dtype_and_shape_is_an_item_of_torch_load() -> None:
    values = {}
    for dtype in DTYPES:
        for shape in ((), (0, 3), (5,), (3, 2, 4)):
            values[f"{dtype}{shape}"] = torch.randint(0, 2, shape).to(dtype)
    values |= {"strided": torch.randn(6, 5)[::2, 1:].t(), "conj": torch.randn(3, dtype=torch.complex64).conj()}
    values |= {"last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), "one": torch.ones(1).expand(7)}
    source = images.take({"box": Box(**values)})
    pieces = {piece.name.removeprefix("box."): piece for piece in source.index.pieces}
    assert list(pieces) == list(values)
    for name, tensor in values.items():
        piece = pieces[name]
        start, length = piece.item
        found = torch.load(io.BytesIO(source.data[start : start + length]), weights_only=True)
        assert found.dtype is tensor.dtype and found.shape == tensor.shape, name
        assert torch.equal(octets(found), octets(tensor)), name
        raw = bytes(source.data[piece.start : piece.start + piece.num_bytes])
        assert raw == octets(tensor).numpy().tobytes() and piece.start % ALIGN_BYTES == 0
    assert decode(encode(source.index)) == source.index


def octets(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().contiguous().view(-1).view(torch.uint8)


def test_stock_dcp_loads_what_get_state_dict_names(tmp_path: Path) -> None:
    mine, theirs = build(0, 3), build(5, 0)
    images.write(tmp_path, [images.take(mine)])
    model, optimizer = get_state_dict(theirs["model"], theirs["optimizer"])
    state = {"model": model, "optimizer": optimizer, "scheduler": theirs["scheduler"].state_dict()}
    state["seen"] = theirs["seen"].state_dict()
    with pytest.warns(UserWarning, match="single process"):
        checkpoint.load(state, checkpoint_id=tmp_path)
    set_state_dict(
        theirs["model"], theirs["optimizer"], model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    theirs["scheduler"].load_state_dict(state["scheduler"])
    assert theirs["seen"].state_dict() == {"best": [0, 0.5], "by": {"x": 1}}
    assert digest(flatten(theirs)) == digest(flatten(mine))


def test_stock_dcp_loads_sharded_parts(tmp_path: Path) -> None:
    sources = []
    for role in range(4):
        with layouts.world(role, 4):
            objects = layouts.build(layouts.LAYOUTS["fsdp 4"], role)
            layouts.fill(objects)
            sources.append(images.take(objects, role, 4))
    images.write(tmp_path, sources)
    with layouts.world(0, 1):
        objects = layouts.build(layouts.LAYOUTS["alone"], 0)
        state = objects["model"].state_dict()
        checkpoint.load({"model": state}, checkpoint_id=tmp_path)
        layouts_equal = [torch.equal(tensor, layouts.mine(name, tensor)) for name, tensor in state.items()]
    assert all(layouts_equal) and len(layouts_equal) > 10


def test_an_image_is_of_the_moment_of_its_plan() -> None:
    """Buffers change in the next forward pass, while a thread copies; parameters change only when it is through."""
    objects = build(1, 2)
    before = digest(flatten(objects))
    planned = plan(objects)
    data = bytearray(planned.num_bytes)
    thread = threading.Thread(target=planned.copy, args=(memoryview(data),))
    thread.start()
    objects["seen"].content["best"][0] = 99
    objects["model"](torch.arange(10)).square().mean().backward()
    thread.join()
    objects["optimizer"].step()
    assert digest(flatten(objects)) != before
    other = build(2, 1)
    images.load(other, BytesSource(planned.index("job", 2, 1, 0.0), data))
    assert digest(flatten(other)) == before


def test_what_nobody_changed_is_not_written_again() -> None:
    model = nn.ModuleDict({name: nn.Linear(1024, 1024, bias=False) for name in "abcd"})  # each as large as a chunk
    first = plan({"model": model})
    data = memoryview(bytearray(first.num_bytes))
    assert first.copy(data).changed == frozenset(range(5))
    with torch.no_grad():
        model["b"].weight.data[-1, -1] += 1  # the counter of its version does not see this
    second = plan({"model": model}, last=first)
    copied = second.copy(data)
    assert second.layout is first.layout
    assert copied.num_bytes == CHUNK_BYTES and copied.changed == {1, 2}
    grown = plan({"model": model, "more": nn.Linear(2, 2)}, last=first)
    assert grown.layout is not first.layout


def test_state_that_is_not_finite_is_named() -> None:
    objects = build(3, 2)  # its mask is full of -inf, which is no fault
    objects["seen"].content["best"] = float("inf")
    with torch.no_grad():
        objects["model"].embed.weight[0] = 3e38  # a sum of these overflows
    assert copy(objects).non_finite is None
    state = objects["optimizer"].state[objects["model"].linear.weight]
    for tensor, bad, name in (
        (state["exp_avg"], float("inf"), "optimizer.state.linear.weight.exp_avg"),
        (objects["model"].norm.running_var, float("nan"), "model.norm.running_var"),
        (objects["model"].head.weight, -float("inf"), "model.embed.weight"),
    ):
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor.view(-1)[1] = bad
            assert copy(objects).non_finite == name
            tensor.copy_(kept)


def test_names_do_not_depend_on_wrappers() -> None:
    with layouts.world(0, 1):
        wrapped = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
        names = [piece.name for piece in plan({"model": nn.Sequential(wrapped)}).layout.pieces]
    assert names == ["model.0.0.weight", "model.0.0.bias"]


def test_an_optimizer_of_several_modules_names_them() -> None:
    one, two, free = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False), nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters(), free], momentum=0.9)
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    names = [piece.name for piece in plan({"one": one, "two": two, "opt": optimizer}).layout.pieces]
    assert names == [
        "one.weight", "two.weight", "opt.state.one.weight.momentum_buffer", "opt.state.two.weight.momentum_buffer",
        "opt.state.param.2.momentum_buffer",
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"two tensors .* have the name box\.a\.b"):
        plan({"box": Box(a={"b": torch.ones(1)}, **{"a.b": torch.zeros(1)})})
