"""What a script without a session logs, read where it tells its tracker: TensorBoard's SummaryWriter, wandb's Run.log,
the Trainer of transformers. Such a script needs no line of ours for its loss to be seen.

Only numbers that lie on the host are read: a tensor on a device would have to be waited for.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

Tell = Callable[[Mapping[str, float]], None]
Read = Callable[..., Mapping[Any, Any]]  # of a method's arguments: what was logged

# Module -> class, method, and what its arguments say.
PLACES: Mapping[str, tuple[str, str, Read]] = {
    "torch.utils.tensorboard.writer": (
        "SummaryWriter",
        "add_scalar",
        lambda self, tag=None, scalar_value=None, *args, **kwargs: {tag: scalar_value},
    ),
    "wandb.sdk.wandb_run": ("Run", "log", lambda self, data=None, *args, **kwargs: data),
    "transformers.trainer": ("Trainer", "log", lambda self, logs=None, *args, **kwargs: logs),
}


def patch(module: str, tell: Tell) -> None:
    """The module is imported. Another version of it that has no such method is left alone."""
    kind_name, name, read = PLACES[module]
    kind: Any = getattr(sys.modules[module], kind_name, None)
    original = getattr(kind, name, None)
    if original is not None:
        setattr(kind, name, _telling(original, read, tell))


def _telling(original: Callable[..., Any], read: Read, tell: Tell) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        said = read(*args, **kwargs)
        values = numbers(said) if isinstance(said, Mapping) else {}
        if values:
            tell(values)
        return result

    return call


def numbers(said: Mapping[Any, Any]) -> dict[str, float]:
    found = {}
    for name, value in said.items():
        number = _number(value)
        if number is not None and isinstance(name, str):
            found[name] = number
    return found


def _number(value: Any) -> float | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    torch: Any = sys.modules.get("torch")
    # The exact type: see progress.total_step.
    if torch is not None and type(value) is torch.Tensor and value.is_cpu and value.numel() == 1:
        return float(value.item())
    return None
