"""What members tell of a step that is audited, when one is due, and what is said of it."""

from __future__ import annotations

import traceback

import pytest
import torch

from everstep.detect.audit import Finding, Outcome
from everstep.plan.checking import AUDIT_STEPS
from everstep.train.audit import GIVE_UP, Audit, explain, kind
from everstep.train.protocol import Audited, Said

from .reducer_world import reducers, together


class At:
    """The first of two replicas, in a step that nobody audits."""

    role, num_members, shards, committed, turn, audits, unsure = 0, 2, 1, 4, 0, False, 0


def at(**fields: object) -> At:
    made = At()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def model() -> torch.nn.Linear:
    torch.manual_seed(1)
    return torch.nn.Linear(300, 300)


def flipped_in(gradient: torch.Tensor, bit: int) -> torch.Tensor:
    wrong = gradient.clone()
    wrong.view(-1).view(torch.int32)[-1] ^= bit
    return wrong


def test_a_hash_is_that_of_a_share_whoever_computes_it_and_of_every_bit() -> None:
    models = [model(), model()]
    with reducers(2, models) as made:

        def computed(role: int, share: int, bit: int) -> tuple[int, int | None]:
            made[role].begin(0.5)
            made[role].audit(True)
            hook = models[role].weight.register_hook(lambda gradient: flipped_in(gradient, bit))
            models[role](torch.full((4, 300), 1.0 + share)).square().mean().backward()
            made[role].finish()
            models[role].zero_grad()
            hook.remove()
            return made[role].trace, made[role].whole

        straight, turned = (together(computed, range(2), shares, (0, 0)) for shares in ((0, 1), (1, 0)))
        assert straight == turned[::-1] and straight[0] != straight[1]
        flipped = together(computed, range(2), (0, 1), (0, 1))
        assert flipped[0] == straight[0] and flipped[1][1] != straight[1][1]
        assert flipped[1][0] == straight[1][0], "a sample does not see it"
        made[0].audit(False)


def test_an_audit_is_due_when_the_first_member_says_so_and_only_where_there_is_somebody_to_compare() -> None:
    due = at(committed=9)
    assert Audit(10).adds(Said(), due, 0) == Said(audit=True)
    others = at(committed=9, role=1), at(committed=9, num_members=1), at(committed=9, shards=2), at(committed=8)
    assert all(Audit(10).adds(Said(), each, 0) == Said() for each in others)
    assert Audit(10).adds(Said(), due, None) == Said(), "nobody can look at a sharded model's own gradients"
    assert Audit(0).adds(Said(), due, 0) == Said()
    with pytest.raises(ValueError, match="audit_every = -3"):
        Audit(-3)


def test_by_default_it_comes_late_in_a_young_job_and_soon_in_an_old_one() -> None:
    def first(begin: int) -> int:
        ours = Audit(None)
        return next(s for s in range(begin, begin + 5000) if ours.adds(Said(), at(committed=s - 1), 0).audit)

    assert first(1) == AUDIT_STEPS and first(90_000) < 90_010


def test_all_tell_their_hash_and_hardware_in_an_audited_step() -> None:
    said = Audit(10).adds(Said(mark=3), at(audits=True, turn=1, role=1), 5)
    assert said == Said(mark=3, turn=1, whole=5, kind=kind())


def test_it_gives_up_where_it_tells_nothing_and_one_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    ours = Audit(10)
    ours.told(Audited(9, 0, Finding(Outcome.WRONG, (0, 1))))
    ours.told(Audited(9, 0, Finding(Outcome.ALIKE)))
    assert ours.adds(Said(), at(committed=9, unsure=GIVE_UP - 1), 0).audit and not capsys.readouterr().err
    for _ in range(2):
        assert not ours.adds(Said(), at(committed=9, unsure=GIVE_UP), 0).audit
    assert capsys.readouterr().err.count("There are no more audits") == 1
    ours, other = Audit(10), Audit(10)
    ours.told(Audited(9, 0, Finding(Outcome.UNFIT)))
    other.told(Audited(9, 1, Finding(Outcome.UNFIT)))
    assert not ours.adds(Said(), at(committed=9), 0).audit
    assert capsys.readouterr().err.count("There are no more audits") == 1


def test_what_a_script_raises_where_it_has_another_role_says_so() -> None:
    error = AttributeError("'NoneType' object has no attribute 'update'")  # a bar that only role 0 has
    explain(error, turn=0)
    assert not hasattr(error, "__notes__")
    explain(error, turn=1)
    assert "audit_every=0" in "".join(traceback.format_exception(error))


def test_a_slip_is_told_and_audits_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    ours = Audit(10)
    ours.told(Audited(9, 0, Finding(Outcome.ALIKE, (1, 2))))
    assert "one of roles [1, 2] made a slip" in capsys.readouterr().err
    assert ours.adds(Said(), at(committed=9), 0).audit
