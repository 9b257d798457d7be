"""Flat state: every kind of state comes back bit by bit, in place; what cannot travel or does not fit is named."""

from __future__ import annotations

import copy
import hashlib
import random
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import lr_scheduler

from everstep.state.digest import digest
from everstep.state.flatten import Flat, Stateful, apply, empty, flatten, parse

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adam_amsgrad": lambda parameters: torch.optim.Adam(parameters, amsgrad=True),
    "lr_tensor": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "lbfgs": torch.optim.LBFGS,
}
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 1.0, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.1, 1.0, step_size_up=2),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
}


class Box:
    """A user's object: whatever is put in."""

    def __init__(self, **content: Any) -> None:
        self.content = content

    def state_dict(self) -> dict[str, Any]:
        return self.content

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.content = state_dict


class Net(nn.Module):
    """Tied weights, BatchNorm's buffers, a bfloat16 layer, a parameter without dimensions, an empty one."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.norm = nn.BatchNorm1d(width)
        self.low = nn.Linear(width, width, dtype=torch.bfloat16)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.norm(self.embed(tokens))
        hidden = self.low(hidden.bfloat16()).float() * self.scale + self.nothing.sum()
        return torch.as_tensor(self.head(hidden))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, scheduler: Any = None) -> None:
    for _ in range(num_steps):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(torch.arange(12)).square().mean()
            loss.backward()
            return torch.as_tensor(loss.detach())

        optimizer.step(closure)
        if scheduler is not None:
            scheduler.step()


def send(flat: Flat) -> tuple[bytes, list[Tensor]]:
    """What the other side has in hand: other memory, with the same bytes."""
    received = empty(flat.header)
    for target, tensor in zip(received, flat.tensors, strict=True):
        target.copy_(tensor)
    return bytes(flat.header), received


def move(source: dict[str, Stateful], target: dict[str, Stateful]) -> None:
    flat = flatten(source)
    header, tensors = send(flat)
    apply(target, header, tensors)
    for tensor in tensors:  # nothing of what was received may be kept
        tensor.zero_()
    assert digest(flatten(target)) == digest(flat)


def spoil(flat: Flat, **changes: Any) -> bytes:
    """The header with other fields, and a right checksum."""
    header = msgspec.structs.replace(parse(flat.header), **changes)
    body = msgspec.msgpack.encode(header)
    return hashlib.blake2b(body, digest_size=16).digest() + body


@pytest.mark.parametrize("joiner_steps", [0, 2])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_bit_by_bit_elsewhere(name: str, joiner_steps: int) -> None:
    torch.manual_seed(1)
    model, other = Net(), Net()
    optimizer, joiner = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    train(model, optimizer, 3)
    train(other, joiner, joiner_steps)
    places = {key: value.data_ptr() for key, value in other.state_dict().items()}
    identities = [id(parameter) for parameter in other.parameters()]
    states = [value for entry in joiner.state.values() for value in entry.values() if isinstance(value, Tensor)]

    move({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": joiner})

    assert {key: value.data_ptr() for key, value in other.state_dict().items()} == places
    assert [id(parameter) for parameter in other.parameters()] == identities
    now = [value for entry in joiner.state.values() for value in entry.values() if isinstance(value, Tensor)]
    if name != "lbfgs":  # which replaces its own at every step
        assert all(any(old is value for value in now) for old in states)
    train(model, optimizer, 2)
    train(other, joiner, 2)
    assert digest(flatten({"m": model, "o": optimizer})) == digest(flatten({"m": other, "o": joiner}))


def test_a_joiner_whose_optimizer_never_stepped_gets_its_state() -> None:
    model, other = Net(), Net()
    optimizer, joiner = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(other.parameters())
    train(model, optimizer, 3)
    move({"model": model, "optimizer": optimizer}, {"model": other, "optimizer": joiner})
    assert list(joiner.state) == list(other.parameters())
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        assert joiner.state[mine]["step"].item() == 3
        for field in ("exp_avg", "exp_avg_sq"):
            value, source = joiner.state[mine][field], optimizer.state[theirs][field]
            assert torch.equal(value, source)
            assert value.stride() == source.stride()


def test_float32_moments_of_bfloat16_parameters_are_not_rounded() -> None:
    layers = [nn.Linear(4, 4, bias=False, dtype=torch.bfloat16) for _ in range(2)]
    optimizers = [torch.optim.AdamW(layer.parameters()) for layer in layers]
    moment = torch.rand(4, 4)
    optimizers[0].state[layers[0].weight] = {"step": torch.tensor(1.0), "exp_avg": moment}
    move({"o": optimizers[0]}, {"o": optimizers[1]})
    assert torch.equal(optimizers[1].state[layers[1].weight]["exp_avg"], moment)


def test_state_keeps_the_memory_format_of_its_parameter() -> None:
    convs = [nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last) for _ in range(2)]
    optimizers = [torch.optim.AdamW(conv.parameters()) for conv in convs]
    convs[0](torch.rand(1, 4, 5, 5)).sum().backward()
    optimizers[0].step()
    move({"o": optimizers[0]}, {"o": optimizers[1]})
    assert optimizers[1].state[convs[1].weight]["exp_avg"].stride() == convs[1].weight.stride()


def test_options_of_the_groups_follow() -> None:
    layers = [nn.Linear(2, 2) for _ in range(2)]
    first, second = (torch.optim.SGD([{"params": [p]} for p in layer.parameters()], lr=1.0) for layer in layers)
    first.param_groups[1] |= {"lr": 0.25, "initial_lr": 0.5}
    move({"o": first}, {"o": second})
    assert [group["lr"] for group in second.param_groups] == [1.0, 0.25]
    assert second.param_groups[1]["initial_lr"] == 0.5
    assert [group["params"][0] is p for group, p in zip(second.param_groups, layers[1].parameters(), strict=True)]


def test_an_optimizer_with_hooks_or_methods_of_its_own_is_loaded_by_them() -> None:
    layers = [nn.Linear(2, 2) for _ in range(2)]
    first, second = (torch.optim.AdamW(layer.parameters()) for layer in layers)
    train_once(layers[0], first)
    seen = []
    second.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer))
    move({"o": first}, {"o": second})
    assert seen == [second]


def test_state_and_options_which_the_source_lacks_are_forgotten_and_its_order_kept() -> None:
    layers = [nn.Linear(2, 2) for _ in range(2)]
    first, second = (torch.optim.SGD(layer.parameters(), lr=1.0, momentum=0.9) for layer in layers)
    layers[0].weight.requires_grad_(False)
    train_once(layers[0], first)
    train_once(layers[1], second)
    second.param_groups[0]["stale"] = 1
    move({"o": first}, {"o": second})
    assert list(second.state) == [layers[1].bias]
    assert "stale" not in second.param_groups[0]
    layers[0].weight.requires_grad_(True)
    train_once(layers[0], first)
    train_once(layers[1], second)
    first.state[layers[0].weight] = first.state.pop(layers[0].weight)
    second.state[layers[1].bias] = second.state.pop(layers[1].bias)
    move({"o": first}, {"o": second})
    assert list(second.state) == [layers[1].bias, layers[1].weight]


def train_once(layer: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    layer(torch.ones(1, layer.in_features)).sum().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore::UserWarning:torch")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name: str) -> None:
    made = []
    for num_steps in (5, 0):
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)
        made.append((model, optimizer, SCHEDULERS[name](optimizer)))
        train(*made[-1][:2], num_steps, made[-1][2])
    first, second = ({"m": m, "o": o, "s": s} for m, o, s in made)
    move(first, second)
    for _ in range(3):
        for model, optimizer, scheduler in made:
            train(model, optimizer, 1, scheduler)
        assert made[0][1].param_groups[0]["lr"] == made[1][1].param_groups[0]["lr"]
    assert digest(flatten(first)) == digest(flatten(second))


def test_grad_scaler() -> None:
    scaler, other = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    scaler.scale(layer(torch.full((1, 1), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    move({"scaler": scaler}, {"scaler": other})
    assert other.get_scale() == scaler.get_scale() == 4.0


def test_what_a_users_object_may_hold() -> None:
    tensor = torch.rand(3)
    content = {
        "plain": [None, True, -1, 1.5, float("nan"), -0.0, "text", b"bytes", 1j, (), [], {}],
        "large": [2**63, -(2**63), 2**200],
        "nested": {1: (2, [3]), (1, "a"): OrderedDict(z=1, a=2), None: Counter({3: 2})},
        "torch": [torch.float8_e4m3fn, torch.Size([1, 2]), torch.device("cpu"), torch.get_rng_state()],
        "numpy": [np.arange(6.0).reshape(2, 3).T, np.float32(1.5), np.random.RandomState(1).get_state()],
        "python": random.Random(1).getstate(),
        "bits": np.random.default_rng(1).bit_generator.state,
        "tensors": [torch.tensor(True), torch.rand(2, dtype=torch.complex64).conj(), tensor[1:], tensor, tensor.t()],
    }
    box = Box()
    move({"box": Box(**content)}, {"box": box})
    back = box.content
    assert repr(back) == repr({**content, "tensors": back["tensors"]})
    assert types(back) == types(content)
    assert all(torch.equal(a, b) for a, b in zip(back["tensors"], content["tensors"], strict=True))
    assert back["tensors"][3] is back["tensors"][4], "one tensor with two names stays one"
    np.random.RandomState().set_state(back["numpy"][2])
    random.Random().setstate(back["python"])


def types(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), [(types(key), types(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [types(item) for item in value]
    return type(value), getattr(value, "dtype", None)


trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda parts: st.lists(parts) | st.tuples(parts, parts) | st.dictionaries(st.text() | st.integers(), parts),
    max_leaves=20,
)


@settings(deadline=None, max_examples=50)
@given(trees)
def test_any_tree_of_plain_values(tree: Any) -> None:
    box = Box()
    move({"box": Box(tree=tree)}, {"box": box})
    assert box.content == {"tree": tree}
    assert types(box.content["tree"]) == types(tree)


def test_flattening_copies_nothing() -> None:
    model = Net()
    flat = flatten({"model": model})
    assert {t.data_ptr() for t in flat.tensors} == {value.data_ptr() for value in model.state_dict().values()}
    assert len(flat.tensors) == len(model.state_dict()) - 1, "the tied weight travels once"
    assert all(not tensor.requires_grad for tensor in flat.tensors)
    assert flat.num_bytes == len(flat.header) + sum(tensor.nbytes for tensor in flat.tensors)


def test_the_header_says_which_tensors_share_memory() -> None:
    buffer = torch.zeros(10)
    specs = parse(flatten({"box": Box(a=buffer[:5], b=buffer[5:], c=torch.zeros(5))}).header).tensors
    assert [spec.storage for spec in specs] == [0, 0, 1]


class Mystery:
    pass


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Mystery(), r"box\.a\[1\]\.b: an object of type .*Mystery cannot travel: give it as a tensor, number"),
        ({1, 2}, "object of type set cannot travel"),
        (lambda: None, "object of type function cannot travel"),
        (nn.Linear(1, 1), "object of type torch.nn.modules.linear.Linear cannot travel"),
        (torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo cannot travel: give it as a dense"),
        (torch.ones(2, device="meta"), "without memory"),
        (nn.LazyLinear(2).weight, "has no shape yet"),
        (np.array([object()]), "numpy value of dtype object cannot travel"),
        ({Mystery: 1}, "a key of type type cannot travel"),
    ],
)
def test_what_cannot_travel_is_named(value: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text) as caught:
        flatten({"box": Box(a=[0, {"b": value}])})
    assert str(caught.value).startswith("box.a[1].b")


def test_numbered_keys_are_named_as_such() -> None:
    layer = nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(layer.parameters())
    train_once(layer, optimizer)
    optimizer.state[layer.bias]["foo"] = Mystery()
    with pytest.raises(ValueError, match=r"^optimizer\.state\[1\]\.foo: an object of type"):
        flatten({"optimizer": optimizer})


def test_an_object_which_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="contains itself"):
        flatten({"box": Box(loop=loop)})


def untouched(text: str, source: dict[str, Any], target: dict[str, Any]) -> None:
    """The state does not fit, the error says why, and nothing has changed."""
    before = digest(flatten(target))
    with pytest.raises(ValueError, match=text):
        apply(target, *send(flatten(source)))
    assert digest(flatten(target)) == before


def test_other_shapes_are_named() -> None:
    text = r"model\.embed\.weight is float32 of shape \(16, 4\) here, and float32 of shape \(16, 8\) in the state"
    untouched(text, {"first": nn.Linear(1, 1), "model": Net(8)}, {"first": nn.Linear(1, 1), "model": Net(4)})


def test_other_dtypes_are_named() -> None:
    text = r"m\.weight is float64 of shape \(1, 1\) here, and float32 of shape \(1, 1\) in the state"
    untouched(text, {"m": nn.Linear(1, 1)}, {"m": nn.Linear(1, 1).double()})


def test_other_names_are_named() -> None:
    text = r"lacks m\.weight \(1 such\); there is no m\.0\.weight here"
    untouched(text, {"m": nn.Sequential(nn.Linear(1, 1, bias=False))}, {"m": nn.Linear(1, 1, bias=False)})
    untouched(r"is of \['m'\], protected here are \['model'\]", {"m": nn.Linear(1, 1)}, {"model": nn.Linear(1, 1)})


@pytest.mark.parametrize("tied_here", [True, False])
def test_other_ties_are_named(tied_here: bool) -> None:
    tied, free = Net(), Net()
    free.head.weight = nn.Parameter(torch.rand(16, 8))
    source, target = (free, tied) if tied_here else (tied, free)
    place = "here, but not in the state" if tied_here else "in the state, but not here"
    untouched(rf"m\.head\.weight is the same tensor as m\.embed\.weight {place}", {"m": source}, {"m": target})


def test_other_groups_and_other_state_of_an_optimizer_are_named() -> None:
    layer, other = nn.Linear(2, 3), nn.Linear(4, 3)
    first, second = torch.optim.AdamW(layer.parameters()), torch.optim.AdamW(other.parameters())
    train_once(layer, first)
    train_once(other, second)
    untouched(r"o\.state\[0\]\.exp_avg is float32 of shape \(3, 4\) here", {"o": first}, {"o": second})
    fewer = torch.optim.AdamW([other.weight])
    untouched(r"o has groups of \[1\] parameters here, and of \[2\] in the state", {"o": first}, {"o": fewer})
    untouched("the state of o is not that of an optimizer", {"o": Box()}, {"o": fewer})
    named = [torch.optim.SGD([(name, p) for p in layer.parameters()], lr=1.0) for name in ("a", "b")]
    untouched("has other parameters here", {"o": named[0]}, {"o": named[1]})


@pytest.fixture(scope="module")
def flat() -> Flat:
    return flatten({"model": nn.Linear(3, 2), "box": Box(a=[1, "x"])})


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 60, -1])
def test_truncated_headers(flat: Flat, size: int) -> None:
    with pytest.raises(ValueError, match="cut short or damaged"):
        apply({}, flat.header[:size], flat.tensors)


def test_every_flipped_bit_of_a_header_is_seen(flat: Flat) -> None:
    for position in range(len(flat.header) * 8):
        damaged = bytearray(flat.header)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(ValueError, match="cut short or damaged"):
            parse(bytes(damaged))


@pytest.mark.parametrize(
    "tree",
    [
        [], ["?"], ["T"], ["T", 99], ["T", "x"], ["d"], ["d", [[["l", []], 1]]], ["d", [[1]]], ["l", 3], ["c", "x", 1],
        ["D", "rand"], ["D", 3], ["V", "nowhere"], ["Z", ["x"]], ["A", "<f4", [2], b"123"], ["S", "|O", [], b"1234"],
        ["A", "nonsense", [1], b"1"], ["i", "x"], [["d"]],
    ],
)  # fmt: skip
def test_crafted_trees_are_refused(flat: Flat, tree: list[Any]) -> None:
    with pytest.raises(ValueError):
        apply({"box": Box()}, spoil(flat, objects=[("box", tree)]), flat.tensors)


def test_headers_of_another_version_or_other_tensors_are_refused(flat: Flat) -> None:
    with pytest.raises(ValueError, match="of version 7, this is version 1"):
        parse(spoil(flat, version=7))
    bad = [msgspec.structs.replace(parse(flat.header).tensors[0], dtype="float31")]
    with pytest.raises(ValueError, match="unknown dtype 'float31'"):
        parse(spoil(flat, tensors=bad))
    objects: dict[str, Stateful] = {"model": nn.Linear(3, 2), "box": Box()}
    with pytest.raises(ValueError, match="names 2 tensors, 1 were given"):
        apply(objects, flat.header, flat.tensors[:1])
    with pytest.raises(ValueError, match=r"tensor 0 is float32 of shape \(2, 3\) by the header, and float32 of shape"):
        apply(objects, flat.header, flat.tensors[::-1])


def change_one_word(tensor: Tensor) -> None:
    tensor.view(-1)[7].neg_()


def flip_two_signs(tensor: Tensor) -> None:
    tensor.view(-1)[[1, 3]] *= -1


def swap_two(tensor: Tensor) -> None:
    tensor.view(-1)[[0, 8193]] = tensor.view(-1)[[8193, 0]]


def swap_rows(tensor: Tensor) -> None:
    tensor.view(-1)[[0, 8192]] = tensor.view(-1)[[8192, 0]]


def change_the_end(tensor: Tensor) -> None:
    tensor.view(-1)[-1].neg_()


@pytest.mark.parametrize("change", [change_one_word, flip_two_signs, swap_two, swap_rows, change_the_end])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_digest_sees(change: Callable[[Tensor], None], dtype: torch.dtype) -> None:
    tensor = torch.arange(1, 40_001).to(dtype).view(200, 200)
    before = digest(flatten({"box": Box(tensor=tensor)}))
    change(tensor)
    assert digest(flatten({"box": Box(tensor=tensor)})) != before


def test_a_digest_does_not_depend_on_where_the_tensors_lie() -> None:
    tensor = torch.rand(100, 200)
    store = torch.zeros(20_001)
    store[1:] = tensor.view(-1)
    others = [copy.deepcopy(tensor), store[1:].view(100, 200), tensor.t().contiguous().t()]
    assert len({digest(flatten({"box": Box(tensor=other, one=1)})) for other in [tensor, *others]}) == 1
    assert digest(flatten({"box": Box(tensor=tensor, one=1.0)})) != digest(flatten({"box": Box(tensor=tensor, one=1)}))
