"""The hooks in PyTorch's functions: what they count, which phase they show, and that they break nothing."""

from __future__ import annotations

import gc
import inspect
import io
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402 - only where torch is installed
import torch.distributed.checkpoint as dcp  # noqa: E402

from everstep.core.page import STOP_NOW, Page, Word  # noqa: E402
from everstep.core.types import Phase  # noqa: E402
from everstep.probe import boot  # noqa: E402


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page.create("hooks")
    boot.install(page)
    yield page
    boot.leave()  # closes the page


def trainer(kind: str = "SGD") -> tuple[Any, Any]:
    model = torch.nn.Linear(4, 4)
    return model, getattr(torch.optim, kind)(model.parameters(), lr=0.1)


def step(model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


class Spy:
    """Saved or loaded, it notes the phase of that moment."""

    page: Page
    seen: list[int]

    def __getstate__(self) -> dict[str, int]:
        Spy.seen.append(Spy.page[Word.PHASE])
        return {}

    def __setstate__(self, state: dict[str, int]) -> None:
        Spy.seen.append(Spy.page[Word.PHASE])


@pytest.fixture
def spy(page: Page) -> Spy:
    Spy.page, Spy.seen = page, []
    return Spy()


def test_steps_are_counted_and_timed(page: Page) -> None:
    model, optimizer = trainer()
    for _ in range(3):
        step(model, optimizer)
    assert (page[Word.STEPS], page[Word.TOTAL_STEP], page[Word.FIRST_TOTAL_STEP]) == (3, 0, 0)
    assert 0 < page[Word.FIRST_STEP_NS] < page[Word.STEP_NS] <= page[Word.LIFE_NS]
    assert page[Word.PHASE] == Phase.TRAIN


def test_the_optimizers_own_count_survives_a_resume(page: Page) -> None:
    model, optimizer = trainer("AdamW")
    step(model, optimizer)
    state = optimizer.state_dict()
    for value in state["state"].values():
        value["step"] = torch.tensor(41.0)
    resumed_model, resumed = trainer("AdamW")
    del optimizer
    gc.collect()
    resumed.load_state_dict(state)
    step(resumed_model, resumed)
    assert (page[Word.STEPS], page[Word.TOTAL_STEP], page[Word.LOADS]) == (2, 43, 1)


def test_two_optimizers_count_once_and_the_second_is_adopted(page: Page) -> None:
    first, second = trainer(), trainer()
    for _ in range(3):
        step(*first)
        step(*second)
    assert page[Word.STEPS] == 3
    for _ in range(10):
        step(*second)
    assert page[Word.STEPS] == 3 + 10 - 3
    del second
    gc.collect()
    step(*first)
    assert page[Word.STEPS] == 11


def test_many_optimizers_per_iteration(page: Page) -> None:
    trainers = [trainer() for _ in range(20)]
    for _ in range(5):
        for one in trainers:
            step(*one)
    assert page[Word.STEPS] == 5


def test_start_lasts_until_the_first_step(page: Page, spy: Spy, tmp_path: Path) -> None:
    model, optimizer = trainer()
    torch.save(spy, tmp_path / "a")
    assert page[Word.PHASE] == Phase.START
    model.eval()
    torch.load(tmp_path / "a", weights_only=False)
    assert page[Word.PHASE] == Phase.START
    assert Spy.seen == [Phase.SAVE, Phase.LOAD]
    step(model, optimizer)
    assert page[Word.PHASE] == Phase.TRAIN


def test_evaluation_ends_with_train_or_a_step(page: Page, spy: Spy, tmp_path: Path) -> None:
    model, optimizer = trainer()
    step(model, optimizer)
    model.eval()
    began = page[Word.PHASE_NS]
    torch.save(spy, tmp_path / "a")
    assert (page[Word.PHASE], Spy.seen) == (Phase.EVAL, [Phase.SAVE])
    model.train()
    assert page[Word.PHASE] == Phase.TRAIN
    assert page[Word.PHASE_NS] > began
    model.eval()
    step(model, optimizer)
    assert page[Word.PHASE] == Phase.TRAIN


def test_saves_count_when_they_are_checkpoints(page: Page, tmp_path: Path) -> None:
    model, optimizer = trainer()
    step(model, optimizer)
    torch.save(model.state_dict(), io.BytesIO())
    assert (page[Word.SAVES], page[Word.SAVED_STEP]) == (0, 0)
    torch.save(model.state_dict(), tmp_path / "a")
    assert (page[Word.SAVES], page[Word.SAVED_STEP]) == (1, 2)
    with pytest.raises(RuntimeError):
        torch.save({}, tmp_path / "no" / "folder")
    assert (page[Word.SAVES], page[Word.PHASE]) == (1, Phase.TRAIN)


def test_a_save_in_the_background_is_counted_but_training_goes_on(page: Page, spy: Spy, tmp_path: Path) -> None:
    model, optimizer = trainer()
    step(model, optimizer)
    thread = threading.Thread(target=torch.save, args=(spy, tmp_path / "a"))
    thread.start()
    thread.join()
    assert (page[Word.SAVES], Spy.seen) == (1, [Phase.TRAIN])


@pytest.mark.filterwarnings("ignore")
def test_distributed_checkpoints_count_once(page: Page, tmp_path: Path) -> None:
    model, _ = trainer()
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    dcp.async_save(state, checkpoint_id=tmp_path / "b", no_dist=True).result()
    assert page[Word.SAVES] == 2
    dcp.load(state, checkpoint_id=tmp_path / "b", no_dist=True)
    assert page[Word.LOADS] == 1


def test_batches_tick_and_loaders_can_be_pickled(page: Page) -> None:
    loader = torch.utils.data.DataLoader(list(range(6)), batch_size=2)
    assert len(list(loader)) == 3
    assert page[Word.BATCHES] == 3
    assert len(list(pickle.loads(pickle.dumps(loader)))) == 3


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_collectives_and_ddp_are_signs_of_life(page: Page) -> None:
    from torch.distributed import all_reduce

    tensor = torch.ones(2)
    all_reduce(tensor)
    dist.broadcast(tensor, 0)
    dist.barrier()
    assert page[Word.COLLECTIVES] == 3
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    page[Word.LIFE_NS] = 0
    model(tensor)
    assert page[Word.LIFE_NS] > 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("group")
def test_compiled_code_sees_no_difference(page: Page) -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def reduce(tensor: Any) -> Any:
        dist.all_reduce(tensor)
        return tensor + 1

    assert reduce(torch.ones(2)).tolist() == [2, 2]

    model, optimizer = trainer("Adam")
    compiled = torch.compile(model, fullgraph=True, backend="eager")

    @torch.compile(backend="eager")
    def update() -> None:
        optimizer.step()

    for _ in range(3):
        compiled(torch.ones(2, 4)).sum().backward()
        update()
    assert page[Word.STEPS] == 3


def test_grad_scaler_skips_are_not_steps(page: Page) -> None:
    model, optimizer = trainer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for loss_scale in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).sum() * loss_scale).backward()
        scaler.step(optimizer)
        scaler.update()
    assert page[Word.STEPS] == 2


def test_functorch_and_subclasses(page: Page) -> None:
    model, _ = trainer()
    parameters = dict(model.named_parameters())

    def loss(parameters: Any) -> Any:
        return torch.func.functional_call(model, parameters, torch.ones(2, 4)).sum()

    assert set(torch.func.grad(loss)(parameters)) == {"weight", "bias"}

    class Frozen(torch.nn.Linear):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    frozen = Frozen(4, 4).train()
    assert not frozen.training
    step(frozen, Mine(frozen.parameters(), lr=0.1))
    assert page[Word.STEPS] >= 1


def test_signatures_stay() -> None:
    assert list(inspect.signature(dist.all_reduce).parameters) == ["tensor", "op", "group", "async_op"]
    assert list(inspect.signature(torch.nn.Module.train).parameters) == ["self", "mode"]
    assert "weights_only" in inspect.signature(torch.load).parameters
    assert torch.save.__module__ == "torch.serialization"


def test_sigterm_is_delivered_at_the_agreed_step(page: Page) -> None:
    calls: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: calls.append(page[Word.STEPS]))
    try:
        model, optimizer = trainer()
        step(model, optimizer)
        signal.raise_signal(signal.SIGTERM)
        noted = page[Word.TERM_NS]
        assert (calls, noted > 0) == ([], True)
        page[Word.STOP_AT_STEP] = 3
        for _ in range(4):
            step(model, optimizer)
        assert (calls, page[Word.TERM_NS]) == ([3], noted)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_session_holds_sigterm_until_the_end_of_a_step(page: Page) -> None:
    """As long as the script has no handler; and who asks the system's default finds it."""
    boot.hold_sigterm()
    try:
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert not boot.stop_due()
        signal.raise_signal(signal.SIGTERM)
        page[Word.STEPS], page[Word.STOP_AT_STEP] = 2, 3
        assert not boot.stop_due()
        page[Word.STEPS] = 3
        assert boot.stop_due()
        called: list[int] = []
        assert signal.signal(signal.SIGTERM, lambda *_: called.append(1)) == signal.SIG_DFL
        signal.raise_signal(signal.SIGTERM)
        assert called and callable(signal.signal(signal.SIGTERM, signal.SIG_DFL))
        signal.raise_signal(signal.SIGTERM)  # still held
    finally:
        assert boot.release_sigterm()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not caught(signal.SIGTERM)


def caught(signum: int) -> bool:
    status = Path("/proc/self/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> (signum - 1) & 1)


@pytest.mark.parametrize("how", ["alone", "now", "a child of the script"])
def test_a_session_lets_sigterm_end_the_process(page: Page, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Between two steps when no stop follows; at once when the job stops now; and what the script forked, as ever."""
    monkeypatch.setattr("everstep.probe.termination.ALONE_S", -1.0)
    if (child := os.fork()) == 0:
        boot.hold_sigterm()
        if how == "now":
            page[Word.STOP_AT_STEP] = STOP_NOW
        elif how != "alone":
            boot.leave()
        signal.raise_signal(signal.SIGTERM)
        if how == "alone":
            boot.stop_due()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM


def test_a_module_imported_later_is_patched_before_names_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_later.py").write_text("def f(): return 'original'\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def patch() -> None:
        sys.modules["imported_later"].f = lambda: "patched"  # type: ignore[attr-defined]

    boot.after_import("imported_later", patch)
    namespace: dict[str, Any] = {}
    exec("from imported_later import f", namespace)
    assert namespace["f"]() == "patched"
    assert type(sys.modules["imported_later"].__loader__).__name__ == "SourceFileLoader"
