"""What a member tells of its state: every bit of parameters and moments counts, and nothing that may differ does."""

from __future__ import annotations

import random

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from everstep.core.formation import Seat
from everstep.train.guard import GIVE_UP, Guard
from everstep.train.protocol import Doubt, Said, Vote


class At:
    """The second of two replicas."""

    role, num_members, shards, epoch, committed, checks, turn, audits, unsure = 1, 2, 1, 1, 4, True, 0, False, 0
    seats = tuple(Seat(f"n{i}/0#0", f"n{i}", f"n{i}", "") for i in range(2))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(96, 64), nn.BatchNorm1d(64), nn.Linear(64, 3).double())
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer


def guard(every: int | None = None) -> tuple[Guard, nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained()
    return Guard(every, {"model": model, "optimizer": optimizer}), model, optimizer


def test_any_flipped_bit_changes_the_mark_and_back_again() -> None:
    ours, model, optimizer = guard()
    states = [t for state in optimizer.state.values() for t in state.values()]
    rng, before = random.Random(3), ours.mark()
    assert before == guard()[0].mark()
    for tensor in [*(p.detach() for p in model.parameters()), *states]:
        for _ in range(4):
            octets = tensor.view(-1).view(torch.uint8)
            place, bit = rng.randrange(octets.numel()), 1 << rng.randrange(8)
            octets[place] ^= bit
            assert ours.mark() != before
            octets[place] ^= bit
    assert ours.mark() == before


def test_a_copied_state_has_the_same_mark_and_running_statistics_do_not_count() -> None:
    (ours, model, optimizer), (theirs, copy, its) = guard(), guard()
    with torch.no_grad():
        for parameter in copy.parameters():
            parameter.zero_()
    assert theirs.mark() != ours.mark()
    copy.load_state_dict(model.state_dict())
    saved = optimizer.state_dict()
    saved["state"] = {k: dict(reversed(state.items())) for k, state in saved["state"].items()}
    its.load_state_dict(saved)
    model[1].running_mean.fill_(9.0)  # type: ignore[index,union-attr]
    assert theirs.mark() == ours.mark()
    average = torch.optim.swa_utils.AveragedModel(model)
    assert Guard(None, {"model": model, "optimizer": optimizer, "average": average}).mark() == ours.mark()


def test_a_state_is_read_for_its_mark_once_nobody_reads_it_for_a_save() -> None:
    ours, _, _ = guard()
    did: list[str] = []
    said = ours.says(At(), lambda: did.append("settled"), trace=5)
    assert (did, said) == (["settled"], Said(check=False, mark=ours.mark(), trace=5))
    alone = At()
    alone.num_members = 1
    assert ours.says(alone, lambda: did.append("no")) == Said() == guard(every=0)[0].says(At(), lambda: None)
    with pytest.raises(ValueError, match="check_every = -1"):
        guard(every=-1)


def differing(ours: Guard, step: int, epoch: int) -> Doubt:
    votes = tuple(Vote(True, epoch, said=Said(mark=mark, trace=trace)) for mark, trace in ((1, 10), (2, 20)))
    return Doubt(epoch, step, votes)


def both(payload: bytes) -> list[bytes]:
    """The other one's first tensor differs."""
    return [payload, bytes(8) + payload[8:]]


def test_what_differs_has_a_name_and_who_was_wrong_shows_when_it_is_done_again() -> None:
    ours, _, _ = guard()
    ours.doubts(differing(ours, 4, epoch=1), At(), 2, both)
    assert ours.found is not None and not ours.found.sure
    assert (ours.found.parts, ours.found.workers) == (("model.0.weight",), ("n0/0#0", "n1/0#0"))
    right = tuple(Vote(True, 2, said=Said(mark=1, trace=trace)) for trace in (10, 20))
    assert not ours.heard(2, 3, right, 1)
    assert ours.heard(2, 4, right, 1)
    assert ours.found.sure and ours.found.workers == ("n1/0#0",)
    assert not ours.heard(2, 4, right, 1)


def test_replicas_that_never_agree_are_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """They do not compute the same, which going back does not mend."""
    ours, _, _ = guard()
    for number in range(GIVE_UP):
        assert ours.says(At(), lambda: None).mark
        doubt = differing(ours, 4 + number, epoch=1 + number)
        ours.doubts(doubt, At(), 2, both)
        early = tuple(replace(vote, said=Said(mark=1)) for vote in doubt.votes)
        ours.heard(9, 3, early, 1)  # alike where they had been alike before
    assert not ours.says(At(), lambda: None).mark
    assert "do not compute the same" in capsys.readouterr().err


def test_after_the_last_step_all_compare_or_nobody_does() -> None:
    ours, _, _ = guard()
    ours.goal = 5
    said = ours.says(At(), lambda: None)
    assert said.last
    for votes, epoch, closes in (
        ((Vote(True, 1, said=said),) * 2, 1, True),
        ((Vote(True, 1, said=said), Vote(True, 1)), 1, False),  # a loop of more steps
        ((Vote(True, 1, said=said),) * 2, 2, False),  # somebody came in between, who did not hear of it
    ):
        ours.heard(epoch, 4, votes, 1)
        assert (ours.last(At(), lambda: None) == Said(mark=ours.mark())) == closes
