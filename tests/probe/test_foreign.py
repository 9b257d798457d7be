"""What scripts tell other trackers is overheard: numbers of the host, of the step that the script is at."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from everstep.core.logged import Logged, decode  # noqa: E402 - only where torch is installed
from everstep.core.page import Page  # noqa: E402
from everstep.probe import boot, foreign  # noqa: E402

WANDB = """
class Run:
    def log(self, data, step=None, commit=None):
        self.seen = (data, step)
        return "as before"
"""


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create("foreign")
    boot.install(page)
    yield page
    boot.leave()  # closes the page


def values(page: Page) -> tuple[int, dict[str, float]]:
    logged = decode(page.values())
    assert logged is not None and logged.epoch == 0
    return logged.step, logged.values


def test_a_tracker_that_the_script_imports(page: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb/sdk").mkdir(parents=True)
    (tmp_path / "wandb/sdk/wandb_run.py").write_text(WANDB)
    for package in ("wandb", "wandb/sdk"):
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    from wandb.sdk.wandb_run import Run  # type: ignore[import-not-found]

    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        weight.sum().backward()
        optimizer.step()
    run, logged = Run(), {"loss": torch.tensor(2.0), "rate": 0.5, "text": "x", "ok": True, "all": torch.ones(2)}
    assert run.log(logged, step=70) == "as before" and run.seen == (logged, 70)
    assert values(page) == (3, {"loss": 2.0, "rate": 0.5})
    assert run.log(data={"later": 1}) == "as before" and run.log(None) == "as before"
    assert values(page) == (3, {"loss": 2.0, "rate": 0.5, "later": 1.0})
    boot.logged(2, 4, {"loss": 1.0})  # a session's own
    run.log({"loss": 9.0})
    assert decode(page.values()) == Logged(2, 4, {"loss": 1.0})


@pytest.mark.parametrize(
    ("module", "call", "found"),
    [
        ("torch.utils.tensorboard.writer", lambda it: it.add_scalar("loss", 1.5, global_step=3), {"loss": 1.5}),
        ("torch.utils.tensorboard.writer", lambda it: it.add_scalar(tag="a", scalar_value=2), {"a": 2.0}),
        ("transformers.trainer", lambda it: it.log({"loss": 1.5, "epoch": 2}, 0.5), {"loss": 1.5, "epoch": 2.0}),
    ],
)
def test_each_place(monkeypatch: pytest.MonkeyPatch, module: str, call: Any, found: dict[str, float]) -> None:
    kind, method, _ = foreign.PLACES[module]
    made = ModuleType(module)
    setattr(made, kind, type(kind, (), {method: lambda self, *args, **kwargs: None}))
    monkeypatch.setitem(sys.modules, module, made)
    told: list[Any] = []
    foreign.patch(module, told.append)
    call(getattr(made, kind)())
    assert told == [found]
    delattr(made, kind)
    foreign.patch(module, told.append)  # another version of it
