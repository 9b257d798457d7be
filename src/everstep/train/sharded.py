"""Gradients of modules that FSDP2 shards. FSDP sums them itself, over the mesh of the session; here each micro-batch
gets its weight, the sums are checked, and what a broken step left inside FSDP is cleared before the step comes again.

What is used of FSDP beside its documented methods is listed in INTERNALS, and looked for at the start.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from everstep.state.local import local
from everstep.train.buckets import sample
from everstep.train.reducer import WORD, Reducer

INTERNALS = {
    "FSDPModule": ("_get_fsdp_state", "reset_iter_state"),
    "FSDPState": ("_fsdp_param_groups", "_is_root", "_state_ctx"),
    "FSDPParamGroup": (
        "_all_gather_result", "_partial_reduce_output", "_reduce_scatter_comm", "fsdp_params", "gradient_divide_factor",
    ),
    "FSDPParam": ("sharded_param", "unsharded_accumulated_grad"),
}  # fmt: skip


class Weight:
    """Of the micro-batch under way. One for all modules."""

    def __init__(self) -> None:
        self.value = 1.0
        self.trace = 0  # of a sample of this member's own gradients in this step; 0: on a device


class Weighed:
    """A module's reduce-scatter which multiplies this member's part by its weight before; FSDP's own would average."""

    def __init__(self, inner: Any, weight: Weight) -> None:
        self.allocate = inner.allocate
        self._inner, self._weight = inner, weight

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        input_tensor.mul_(self._weight.value)
        if input_tensor.device.type == "cpu":
            self._weight.trace = hash((self._weight.trace, sample(input_tensor))) & WORD
        return self._inner(output_tensor, input_tensor, *args, **kwargs)


class Sharded:
    """As `Reducer`, for the parameters of modules under FSDP; `plain` does the others, if there are any.

    Raises ValueError for parameters which FSDP does not manage, and for modules with settings that are used here.
    """

    def __init__(
        self, modules: Sequence[nn.Module], parameters: Sequence[Tensor], shards: int, plain: Reducer | None
    ) -> None:
        self._parameters = list(parameters)
        self._plain = plain
        self._one_shard = shards == 1
        self._weight = Weight()
        found = (part for module in modules for part in module.modules() if isinstance(part, FSDPModule))
        self._modules = list(dict.fromkeys(found))
        self._groups = [group for module in self._modules for group in _groups(module)]
        managed = {id(part.sharded_param) for group in self._groups for part in group.fsdp_params}
        if not all(id(parameter) in managed for parameter in self._parameters):
            raise ValueError(
                "an optimizer has parameters which are sharded, but not by fully_shard() of a protected module: "
                "protect the module, and make the optimizer after fully_shard()"
            )
        for module in self._modules:
            self._take_over(module)

    # A step -----------------------------------------------------------------------------------------------

    def begin(self, weight: float = 1.0) -> None:
        self._weight.trace = 0
        self._weigh(weight)
        if self._plain is not None:
            self._plain.begin(weight)

    def weigh(self, weight: float, last: bool) -> None:
        if weight != self._weight.value and any(_unreduced(group) for group in self._groups):
            raise ValueError(
                "set_requires_gradient_sync(False) needs micro-batches of one size, for their gradients are summed "
                "before they get their weight: choose a global_batch which micro_batch x members divides"
            )
        self._weigh(weight)
        if self._plain is not None:
            self._plain.weigh(weight, last)

    def finish(self) -> bool:
        """Whether this member's part of the sums is finite. Members of one shard come to the same."""
        finite = self._plain.finish() if self._plain is not None else True
        if any(_unreduced(group) or group._partial_reduce_output is not None for group in self._groups):
            raise ValueError(
                "the last micro-batch of a step has to sum the gradients over the members: call "
                "set_requires_gradient_sync(True) and set_requires_all_reduce(True) before its backward"
            )
        gradients = [local(p.grad) for p in self._parameters if p.grad is not None]
        return finite and all(bool(gradient.isfinite().all()) for gradient in gradients)

    def drop(self) -> None:
        """Forget the step. The epoch is aborted before: this waits for what FSDP has under way to end."""
        for group in self._groups:
            _discard(group)
        for module in self._modules:
            if module._get_fsdp_state()._is_root:  # not before the first forward, which looks for the roots
                module.reset_iter_state()
        for parameter in self._parameters:
            parameter.grad = None
        if self._plain is not None:
            self._plain.drop()

    whole: int | None = None  # there are no audits of sharded models

    def audit(self, wanted: bool) -> None: ...

    @property
    def trace(self) -> int:
        """As `Reducer.trace`. With one shard FSDP sums where nobody can look."""
        plain = self._plain.trace if self._plain is not None else 0
        return hash((self._weight.trace, plain)) & WORD if self._weight.trace else plain

    def close(self) -> None:
        self.drop()
        if self._plain is not None:
            self._plain.close()

    # Inside -----------------------------------------------------------------------------------------------

    def _take_over(self, module: FSDPModule) -> None:
        """Have it sum, not average."""
        for group in _groups(module):
            if group.gradient_divide_factor is not None:
                raise ValueError("leave set_gradient_divide_factor() to the session: `share` weighs the gradients")
            if self._one_shard and any(_reduced_in(part) != torch.float32 for part in group.fsdp_params):
                raise ValueError("a mesh of one shard sums gradients in float32 only: use several shards, or no mesh")
            if not self._one_shard:
                module.set_custom_reduce_scatter(Weighed(group._reduce_scatter_comm, self._weight))  # type: ignore[arg-type]
        if not self._one_shard:
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)

    def _weigh(self, weight: float) -> None:
        self._weight.value = weight
        if self._one_shard:  # FSDP has no reduce-scatter then, and divides before it sums over the replicas
            for module in self._modules:
                module.set_gradient_divide_factor(1 / weight)


def _groups(module: FSDPModule) -> Iterator[Any]:
    """The parameters that FSDP moves together. Raises RuntimeError when this version of torch is not as we know it."""
    state: Any = module._get_fsdp_state()
    _look_for("FSDPModule", module)
    _look_for("FSDPState", state)
    for group in state._fsdp_param_groups:
        _look_for("FSDPParamGroup", group)
        for part in group.fsdp_params:
            _look_for("FSDPParam", part)
        yield group


def _look_for(name: str, thing: object) -> None:
    missing = [attribute for attribute in INTERNALS[name] if not hasattr(thing, attribute)]
    if missing:
        raise RuntimeError(f"FSDP of torch {torch.__version__} is not supported: {name} has no {', '.join(missing)}")


def _reduced_in(part: Any) -> torch.dtype:
    dtype: torch.dtype = part.mp_policy.reduce_dtype or part.mp_policy.param_dtype or part.sharded_param.dtype
    return dtype


def _unreduced(group: Any) -> bool:
    """Whether it has gradients of a backward whose sum was put off."""
    whole = (getattr(part, "_unsharded_param", None) for part in group.fsdp_params)
    return any(part.unsharded_accumulated_grad is not None for part in group.fsdp_params) or any(
        parameter is not None and parameter.grad is not None for parameter in whole
    )


def _discard(group: Any) -> None:
    """What `reset_iter_state` leaves: it waits for an all-gather in vain, and keeps gradients that were not summed."""
    result, group._all_gather_result = group._all_gather_result, None
    work = result.all_gather_work if result is not None else None
    if isinstance(work, dist.Work):
        with contextlib.suppress(dist.DistBackendError):  # it ends because its epoch did; that is told elsewhere
            work.wait()
    for part in group.fsdp_params:
        part.unsharded_accumulated_grad = None
        whole = getattr(part, "_unsharded_param", None)  # there after the first all-gather
        if whole is not None:
            whole.grad = None
