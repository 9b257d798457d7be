"""Where copies go: against the numbers of GEMINI's paper, and against trying every set of lost nodes."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.plan.placement import parts, peers, recovery_probability


@pytest.mark.parametrize(
    ("num_nodes", "copies", "num_lost", "expected"),
    [(16, 2, 2, 0.9333), (16, 2, 3, 0.8), (128, 2, 2, 0.99213), (1024, 2, 2, 0.99902)],
)
def test_numbers_of_the_paper(num_nodes: int, copies: int, num_lost: int, expected: float) -> None:
    assert recovery_probability(num_nodes, copies, num_lost) == pytest.approx(expected, abs=5e-5)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(0, 9))
def test_the_probability_is_that_of_the_placement(num_nodes: int, copies: int, num_lost: int) -> None:
    num_lost = min(num_lost, num_nodes)
    around = peers({f"n{i}": f"n{i}" for i in range(num_nodes)}, copies)
    sets = [set(lost) for lost in itertools.combinations(around, num_lost)]
    kept = sum(all({node, *others} - lost for node, others in around.items()) for lost in sets)
    assert recovery_probability(num_nodes, copies, num_lost) == pytest.approx(kept / len(sets))


@given(st.integers(2, 6), st.integers(2, 8), st.integers(2, 3))
def test_copies_are_in_domains_of_their_own(num_domains: int, size: int, copies: int) -> None:
    copies = min(copies, num_domains)
    domains = {f"n{domain}-{i}": f"d{domain}" for domain in range(num_domains) for i in range(size)}
    for node, others in peers(domains, copies).items():
        assert len({node, *others}) == copies
        if num_domains * size % copies == 0:
            assert len({domains[each] for each in (node, *others)}) == copies


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_each_shard_is_on_as_many_nodes_as_there_may_be(
    num_nodes: int, workers: int, copies: int, replicas: int
) -> None:
    nodes = [f"n{role // workers}" for role in range(num_nodes * workers)]
    shards = max(1, len(nodes) // replicas)
    plan = parts(nodes, shards, copies)
    assert len(plan) == len(nodes)
    for shard in range(shards):
        roles = [role for role in range(shard, len(nodes), shards) if plan[role].writes]
        places = [nodes[role] for role in roles] + [peer for role in roles for peer in plan[role].peers]
        assert len(places) == len(set(places)) == min(copies, num_nodes)
        assert sum(plan[role].persists for role in roles) == 1


def test_replicas_elsewhere_need_no_network() -> None:
    plan = parts(["a", "a", "b", "b"], 1, 2)
    assert [part.writes for part in plan] == [True, False, True, False]
    assert not any(part.peers for part in plan)
    assert parts(["a", "b"], 2, 2)[0].peers == ("b",)
