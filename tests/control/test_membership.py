"""Who is in the next epoch, and with which ranks: golden cases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from everstep.control import membership
from everstep.core.types import Member, NodeReport


def report(name: str, slots: int = 2, life: int = 1, versions: dict[str, str] | None = None) -> NodeReport:
    return NodeReport(name, f"{name}.{life}", 1, 0.0, slots, f"10.0.0.{name[1:]}", 7000 + life, versions=versions or {})


def reports(names: str) -> list[NodeReport]:
    return [report(name) for name in names.split()]


def deal(previous: tuple[Member, ...], names: str, most: int = 4) -> tuple[Member, ...]:
    return membership.deal(2, previous, reports(names), most, 0).members


def seats(members: tuple[Member, ...]) -> str:
    return " ".join(f"{m.node}:{m.first_rank}" for m in members)


def test_a_first_epoch_follows_the_ranks_that_were_asked_for() -> None:
    late = NodeReport("b", "ib", 1, 0.0, 1, "127.0.0.3", 2, node_rank=1)
    plan = membership.deal(1, (), [late, NodeReport("x", "ix", 1, 0.0, 1, "127.0.0.4", 3),
                                   NodeReport("a", "ia", 1, 0.0, 1, "127.0.0.2", 1, node_rank=0)], 3, 0)  # fmt: skip
    assert [m.node for m in plan.members] == ["a", "b", "x"]


def test_first_epoch_is_dealt_in_order_of_arrival() -> None:
    plan = membership.deal(1, (), reports("n3 n1 n2"), 4, 0)
    assert seats(plan.members) == "n3:0 n1:2 n2:4"
    assert (plan.epoch, plan.world_size, plan.restart_count) == (1, 6, 0)
    assert (plan.master_addr, plan.master_port) == ("10.0.0.3", 7001)


def test_replacement_takes_the_leavers_place_and_nobody_moves() -> None:
    old = deal((), "n1 n2 n3")
    assert seats(deal(old, "n1 n3 n9")) == "n1:0 n9:2 n3:4"
    assert seats(deal(old, "n9 n2 n3")) == "n9:0 n2:2 n3:4"


def test_a_new_agent_of_the_same_name_gets_the_place_back() -> None:
    old = deal((), "n1 n2")
    plan = membership.deal(2, old, [report("n1", life=2), report("n2")], 2, 1)
    assert seats(plan.members) == "n1:0 n2:2"
    assert plan.members[0].incarnation == "n1.2" and plan.master_port == 7002


def test_shrinking_fills_the_holes_from_above() -> None:
    old = deal((), "n1 n2 n3 n4")
    assert seats(deal(old, "n1 n3 n4")) == "n1:0 n4:2 n3:4"
    assert seats(deal(old, "n3 n4")) == "n3:0 n4:2"


def test_growing_adds_at_the_end() -> None:
    old = deal((), "n1 n2")
    assert seats(deal(old, "n1 n2 n3")) == "n1:0 n2:2 n3:4"


def test_former_members_come_before_spares_that_were_there_earlier() -> None:
    old = deal((), "n1 n2")
    assert seats(deal(old, "n5 n1 n2", most=2)) == "n1:0 n2:2"
    assert seats(deal(old, "n5 n6 n2", most=2)) == "n5:0 n2:2"


def test_ranks_follow_uneven_slots() -> None:
    members = membership.seat((), [report("n1", 1), report("n2", 3), report("n3", 2)])
    assert [(m.first_rank, m.slots) for m in members] == [(0, 1), (1, 3), (4, 2)]


def test_only_this_very_agent_is_seated() -> None:
    plan = membership.deal(1, (), reports("n1 n2"), 4, 0)
    assert membership.seated(plan, report("n1"))
    assert not membership.seated(plan, report("n1", life=2))
    assert not membership.seated(plan, report("n3"))


def test_odd_versions_are_named_against_the_majority() -> None:
    same = [report(f"n{i}", versions={"torch": "2.13.0"}) for i in (1, 2)]
    odd = report("n3", versions={"torch": "2.12.0"})
    assert membership.mismatched([*same, odd]) == {"n3": "torch 2.12.0, the other nodes have 2.13.0"}
    assert membership.mismatched([*same, report("n4")]) == {}


def test_a_lone_node_is_fenced_earlier() -> None:
    assert membership.fence_after_s(60.0, 1) == 60.0
    assert membership.fence_after_s(60.0, 2) == 60.0 * membership.TOGETHER


NAMES = st.lists(st.sampled_from([f"n{i}" for i in range(8)]), unique=True, min_size=1, max_size=8)


@given(former=NAMES, present=NAMES, most=st.integers(1, 8))
def test_plans_are_sound(former: list[str], present: list[str], most: int) -> None:
    old = membership.deal(1, (), [report(n) for n in former], 8, 0).members
    plan = membership.deal(2, old, [report(n) for n in present], most, 0)
    names = [m.node for m in plan.members]
    assert len(names) == len(set(names)) == min(most, len(present))
    assert [m.group_rank for m in plan.members] == list(range(len(names)))
    assert [m.first_rank for m in plan.members] == [2 * i for i in range(len(names))]
    stayers = set(former) & set(present)
    assert len(stayers & set(names)) == min(len(stayers), most), "a spare was preferred to a member"
    for member in old:
        if member.node in names and member.group_rank < len(names):
            assert names[member.group_rank] == member.node
