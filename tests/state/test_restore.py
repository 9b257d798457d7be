"""Images back into objects: every bit, in place, and nothing touched when it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import images
import layouts
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from everstep.state.digest import digest
from everstep.state.flatten import flatten
from everstep.state.image import CHUNK_BYTES, Damaged
from everstep.state.local import local
from everstep.state.restore import load

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd without state": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "lr_tensor": lambda parameters: torch.optim.Adam(parameters, lr=torch.tensor(0.01), amsgrad=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "lbfgs": torch.optim.LBFGS,
}


class Extra(nn.Module):
    """A module with state beside its tensors, and a buffer which its state dict gives as a copy."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = calls
        self.register_buffer("packed", torch.full((4,), float(calls)))
        self.register_state_dict_post_hook(copy_packed)

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "seen": torch.full((2,), self.calls)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["seen"], torch.full((2,), state["calls"]))
        self.calls = state["calls"]


def copy_packed(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    state[f"{prefix}packed"] = state[f"{prefix}packed"].clone()


def build(make: Callable[[Any], torch.optim.Optimizer], seed: int, steps: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 4), Extra(seed), nn.Linear(4, 1).bfloat16())
    optimizer = make(model.parameters())

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = model[2](model[1].linear(model[0](torch.ones(2, 4))).bfloat16()).square().sum()
        value.backward()
        return value

    for _ in range(steps):
        optimizer.step(loss)
    optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_comes_back_with_and_without_state(name: str) -> None:
    saved = build(OPTIMIZERS[name], 1, 3)
    expected = digest(flatten(saved))
    for steps in (0, 2):
        objects = build(OPTIMIZERS[name], 2, steps)
        addresses = [parameter.data_ptr() for parameter in objects["model"].parameters()]
        load(objects, [images.take(saved)])
        assert digest(flatten(objects)) == expected
        assert [parameter.data_ptr() for parameter in objects["model"].parameters()] == addresses
        assert objects["model"][1].calls == 1 and objects["model"][1].packed[0] == 1
    before = build(OPTIMIZERS[name], 3, 0)
    load(objects, [images.take(before)])  # of a time when there was no state: it goes again
    assert digest(flatten(objects)) == digest(flatten(before))


def test_groups_are_found_by_the_names_of_their_parameters() -> None:
    def build(order: tuple[str, ...]) -> dict[str, Any]:
        model = nn.ModuleDict({name: nn.Linear(2, 2) for name in "abc"})
        groups = [{"params": list(model[name].parameters()), "lr": ord(name) / 1000} for name in order]
        return {"model": model, "optimizer": torch.optim.AdamW(groups)}

    saved, other = build(("a", "b", "c")), build(("c", "a", "b"))
    for group in saved["optimizer"].param_groups:
        group["lr"] *= 10
    load(other, [images.take(saved)])
    assert [group["lr"] for group in other["optimizer"].param_groups] == [ord(name) / 100 for name in "cab"]


def test_what_does_not_fit_is_named_before_anything_changes() -> None:
    saved = images.take({"model": nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "gone": nn.Linear(1, 1)})
    wide = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3), nn.Linear(3, 3, bias=False))
    kept = [parameter.detach().clone() for parameter in wide.parameters()]
    with pytest.raises(ValueError, match=r"model\.1\.weight is float32 of shape \(3, 2\) here, and .* \(2, 2\) was s"):
        load({"model": wide}, [saved])
    with pytest.raises(ValueError, match=r"model\.2\.weight was not saved"):
        load({"model": nn.Sequential(*wide[:1], nn.Linear(2, 2), wide[2])}, [saved])
    with pytest.raises(ValueError, match="float64 of shape"):
        load({"model": wide.double()}, [saved])
    with pytest.raises(ValueError, match="other was not saved"):
        load({"model": wide.float()[:1], "other": nn.Linear(1, 1)}, [saved])
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match=r"optimizer had no parameter 0\.weight"):
        objects = {"model": wide[:2], "optimizer": torch.optim.SGD(wide.parameters())}
        load(objects, [images.take({"model": wide[:2], "optimizer": optimizer})])
    assert all(torch.equal(*pair) for pair in zip(kept, wide.parameters(), strict=True))


def test_a_missing_shard_is_told_and_a_damaged_one_is_not_used() -> None:
    layout, sources = layouts.LAYOUTS["fsdp 4"], []
    for role in range(4):
        with layouts.world(role, 4):
            objects = layouts.build(layout, role)
            layouts.fill(objects)
            sources.append(images.take(objects, role, 4))
    with layouts.world(0, 1):
        objects = layouts.build(layouts.LAYOUTS["alone"], 0)
        layouts.scramble(objects, fresh=True)
        with pytest.raises(ValueError, match=r"model\.embed\.weight: 18 elements are in no saved shard given; .* more"):
            load(objects, sources[:2] + sources[3:])
        assert not objects["optimizer"].state and objects["model"].embed.weight.eq(111).all()
        piece = sources[2].index.pieces[0]
        sources[2].data[piece.start] ^= 1
        with pytest.raises(Damaged):
            load(objects, sources)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("num_threads", [1, 3])
def test_parts_of_many_chunks(axis: int, num_threads: int) -> None:
    """Three chunks, whose borders lie in the middle of rows; by rows and by columns, out of one and into one."""
    whole = torch.arange(1501 * 2003, dtype=torch.float32).view(1501, 2003)
    assert 2 < whole.nbytes / CHUNK_BYTES < 3
    sources = []
    for role in range(2):
        with layouts.world(role, 2):
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(f"{axis}{num_threads}{role}",))
            part = whole.chunk(2, axis)[role].contiguous()
            shaped = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
            tensor = DTensor.from_local(torch.zeros_like(part), mesh, [Shard(axis)], **shaped)
            module = nn.ParameterDict({"x": nn.Parameter(tensor)})
            load({"model": module}, [images.take({"model": nn.ParameterDict({"x": whole})})], num_threads=num_threads)
            assert torch.equal(local(module["x"]), part)
            sources.append(images.take({"model": module}, role, 2))
    alone = nn.ParameterDict({"x": torch.zeros_like(whole)})
    load({"model": alone}, sources, num_threads=num_threads)
    assert torch.equal(alone["x"], whole)
    assert sorted(sources[0].reads) == [*range(sources[0].index.num_chunks)]


def test_copies_of_a_tied_weight_that_drifted_apart_are_not_made_one() -> None:
    sources = []
    for role in range(2):
        with layouts.world(role, 2):
            objects = layouts.build(layouts.LAYOUTS["stages 2"], role)
            layouts.fill(objects)
            if role == 1:
                with torch.no_grad():
                    objects["model"].head.weight[3, 3] += 1
            sources.append(images.take(objects, role, 2))
    with layouts.world(0, 1):
        objects = layouts.build(layouts.LAYOUTS["alone"], 0)
        with pytest.raises(ValueError, match=r"model\.head\.weight was saved with other values"):
            load(objects, sources)
