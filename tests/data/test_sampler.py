"""The order of samples is a permutation for each pass, and every deal hands out every position exactly once."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.data.sampler import SMALL_SIZE, MicroBatch, Permutation, Sampler

unhurried = settings(deadline=None)  # a busy machine is no fault


def order(size: int, seed: int = 0, number: int = 0) -> list[int]:
    permutation = Permutation(size, seed, number)
    return [permutation[index] for index in range(size)]


def excess(counts: Counter[tuple[int, ...]], num_kinds: int) -> float:
    """How far these counts are from all kinds being equally likely, in standard deviations of chi-square."""
    expected = counts.total() / num_kinds
    chi_square = sum((count - expected) ** 2 for count in counts.values()) / expected
    chi_square += (num_kinds - len(counts)) * expected
    return (chi_square - (num_kinds - 1)) / math.sqrt(2 * (num_kinds - 1))


@pytest.mark.parametrize("sizes", [range(1, 300), range(300, 2001, 29)], ids=["small", "larger"])
def test_every_size_has_a_permutation(sizes: range) -> None:
    for size in sizes:
        assert sorted(order(size, seed=size, number=3)) == list(range(size)), size


@unhurried
@given(st.integers(1, 2000), st.integers(), st.integers(0, 10**6))
def test_every_seed_and_pass_has_a_permutation(size: int, seed: int, number: int) -> None:
    assert sorted(order(size, seed, number)) == list(range(size))


@pytest.mark.parametrize("size", [2**20, 10**9 + 7, 2**63 - 1, 2**64, 2**128])
def test_big_sizes(size: int) -> None:
    permutation = Permutation(size, 5, 0)
    ends = [*range(3000), *range(size - 3000, size)]
    images = {permutation[index] for index in ends}
    assert len(images) == len(ends)
    assert all(0 <= image < size for image in images)
    assert Counter(image * 10 // size for image in images).most_common(1)[0][1] < 720  # of 6000 in ten tenths


@unhurried
@given(st.integers(15, 1000), st.integers(0, 100), st.integers(0, 100))
def test_seeds_and_passes_differ(size: int, seed: int, number: int) -> None:
    orders = {tuple(order(size, *key)) for key in [(seed, number), (seed + 1, number), (seed, number + 1)]}
    assert len(orders) == 3


def test_seed_and_pass_are_told_apart() -> None:
    assert order(100, seed=1, number=11) != order(100, seed=11, number=1)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_all_orders_of_a_small_set_are_as_likely(size: int) -> None:
    counts = Counter(tuple(order(size, 7, number)) for number in range(5000))
    assert abs(excess(counts, math.factorial(size))) < 4


@pytest.mark.parametrize("size", [11, SMALL_SIZE])
def test_pairs_of_places_are_as_likely(size: int) -> None:
    """Over the passes: where neighbours at both ends of the data set go, and the two ends."""
    passes = [Permutation(size, 7, number) for number in range(6000)]
    images = [(one[0], one[1], one[size - 2], one[size - 1]) for one in passes]
    for place, other in ((0, 1), (2, 3), (0, 3)):
        counts = Counter((image[place], image[other]) for image in images)
        assert abs(excess(counts, size * (size - 1))) < 4, (place, other)


def test_places_do_not_follow_each_other() -> None:
    """Correlations of a place with its image, and of neighbours' images, are noise: below 4 / sqrt(size)."""
    size = 5000
    images = order(size, seed=3)
    mean, variance = (size - 1) / 2, (size**2 - 1) / 12
    for one, other in ((range(size), images), (images[:-1], images[1:])):
        correlation = sum((a - mean) * (b - mean) for a, b in zip(one, other, strict=True)) / size / variance
        assert abs(correlation) < 4 / math.sqrt(size)


def test_the_order_of_a_seed_is_fixed_for_ever() -> None:
    """A run resumed with a newer Everstep must see the same order."""
    assert Sampler(10, 4, seed=1).samples(range(20)) == (3, 6, 7, 0, 1, 9, 8, 2, 4, 5, 2, 9, 7, 1, 6, 4, 3, 5, 0, 8)
    assert Permutation(10**12, 0, 0)[0] == 932177859841


@st.composite
def samplers(draw: st.DrawFn) -> Sampler:
    batch = draw(st.integers(1, 60))
    micro = draw(st.none() | st.integers(1, batch))
    drop_last = draw(st.booleans())
    num_samples = draw(st.integers(batch if drop_last else 1, 150))
    seed, shuffle = draw(st.integers()), draw(st.booleans())
    return Sampler(num_samples, batch, micro_batch=micro, seed=seed, shuffle=shuffle, drop_last=drop_last)


def deal(sampler: Sampler, step: int, num_members: int) -> list[tuple[MicroBatch, ...]]:
    return [sampler.deal(step, num_members, role) for role in range(num_members)]


@unhurried
@given(samplers(), st.integers(0, 10**9), st.integers(1, 70))
def test_every_position_is_dealt_once_and_evenly(sampler: Sampler, step: int, num_members: int) -> None:
    members = deal(sampler, step, num_members)
    dealt = [micro for member in members for micro in member]
    positions = [position for micro in dealt for position in micro.positions]
    batch = sampler.global_batch
    assert positions == list(range(step * batch, (step + 1) * batch)), "blocks in order of roles"
    assert sum(micro.weight for micro in dealt) == pytest.approx(1.0, abs=1e-12)
    assert all(micro.weight * batch == pytest.approx(len(micro.positions)) for micro in dealt)
    assert all(micro.indices == sampler.samples(micro.positions) for micro in dealt)
    assert all(1 <= len(micro.indices) <= sampler.micro_batch for micro in dealt)
    shares = [sum(len(micro.positions) for micro in member) for member in members]
    assert max(shares) - min(shares) <= 1
    for member in members:
        sizes = [len(micro.positions) for micro in member] or [0]
        assert max(sizes) - min(sizes) <= 1
    assert deal(sampler, step, num_members) == members


@unhurried
@given(samplers(), st.integers(1, 70))
def test_members_make_as_many_micro_batches(sampler: Sampler, num_members: int) -> None:
    """As few as `micro_batch` allows; fewer only for a member with fewer samples than that."""
    counts = [len(member) for member in deal(sampler, 0, num_members)]
    most = math.ceil(math.ceil(sampler.global_batch / num_members) / sampler.micro_batch)
    shares = [len(sampler.share(0, num_members, role)) for role in range(num_members)]
    assert counts == [min(most, share) for share in shares]
    assert sampler.even(num_members) == (len(set(counts)) == 1)


@unhurried
@given(samplers(), st.integers(0, 10**6), st.integers(1, 9), st.integers(1, 9))
def test_the_samples_of_a_step_do_not_depend_on_members(sampler: Sampler, step: int, one: int, other: int) -> None:
    few, many = (
        [index for member in deal(sampler, step, num) for micro in member for index in micro.indices]
        for num in (one, other)
    )
    assert few == many


@unhurried
@given(samplers(), st.lists(st.integers(1, 9), min_size=1))
def test_every_sample_once_a_pass_whatever_the_members(sampler: Sampler, sizes: list[int]) -> None:
    """FAULTS E1: over a pass the union of the samples is the data set (or whole steps of it), each once."""
    stream: list[int] = []
    members = itertools.cycle(sizes)
    for step in range(math.ceil(2 * sampler.pass_length / sampler.global_batch)):
        for member in deal(sampler, step, next(members)):
            stream += [index for micro in member for index in micro.indices]
    for number in range(2):
        seen = stream[number * sampler.pass_length : (number + 1) * sampler.pass_length]
        assert len(set(seen)) == len(seen) == sampler.pass_length
        assert set(seen) <= set(range(sampler.num_samples))
    if sampler.drop_last:
        assert sampler.num_samples - sampler.global_batch < sampler.pass_length <= sampler.num_samples
        assert sampler.pass_length % sampler.global_batch == 0
    else:
        assert sampler.pass_length == sampler.num_samples


def test_without_shuffle_it_is_the_data_set_in_order() -> None:
    assert Sampler(5, 2, shuffle=False).samples(range(3, 12)) == (3, 4, 0, 1, 2, 3, 4, 0, 1)
    assert Sampler(5, 2, shuffle=False, drop_last=True).samples(range(3, 10)) == (3, 0, 1, 2, 3, 0, 1)


def test_a_step_may_hold_several_passes() -> None:
    indices = [index for micro in Sampler(3, 8, seed=1).deal(0, 1, 0) for index in micro.indices]
    assert [sorted(indices[:3]), sorted(indices[3:6])] == [[0, 1, 2], [0, 1, 2]]
    assert len(indices) == 8


def test_what_is_dropped_differs_from_pass_to_pass() -> None:
    sampler = Sampler(11, 4, seed=0, drop_last=True)
    dropped = {frozenset(range(11)) - set(sampler.samples(range(8 * n, 8 * n + 8))) for n in range(10)}
    assert len(dropped) > 5


def test_more_members_than_samples() -> None:
    members = deal(Sampler(100, 3), 5, 5)
    assert [len(member) for member in members] == [1, 1, 1, 0, 0]


def test_uneven_shares_with_numbers() -> None:
    """FAULTS E8: 25 samples for 4 members, at most 6 in one forward. One has 7, so all take two forwards."""
    members = deal(Sampler(1000, 25, micro_batch=6), 0, 4)
    assert [[len(micro.positions) for micro in member] for member in members] == [[4, 3], [3, 3], [3, 3], [3, 3]]


@pytest.mark.timeout(5)
def test_a_far_position_is_computed() -> None:
    """FAULTS E12: replaying a billion samples to get there would take an hour."""
    sampler = Sampler(10**9 + 7, 256, seed=2)
    far = sampler.deal(10**12, 8, 3)[0]
    number, index = divmod(far.positions.start, 10**9 + 7)
    assert far.indices[0] == Permutation(10**9 + 7, 2, number)[index]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "num_samples must be at least 1, not 0"),
        ({"global_batch": 0}, "global_batch must be at least 1, not 0"),
        ({"global_batch": 2.0}, "global_batch must be a whole number, not 2.0"),
        ({"global_batch": True}, "global_batch must be a whole number, not True"),
        ({"micro_batch": 0}, "micro_batch must be at least 1"),
        ({"micro_batch": 9}, "micro_batch=9 is larger than global_batch=8"),
        ({"seed": "x"}, "seed must be a whole number, not 'x'"),
        ({"num_samples": 7, "drop_last": True}, "drop_last=True with 7 samples and global_batch=8 drops every"),
    ],
)
def test_refused(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(**({"num_samples": 100, "global_batch": 8} | arguments))


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ((-1, 2, 0), "step must be at least 0, not -1"),
        ((0, 0, 0), "num_members must be at least 1, not 0"),
        ((0, 2, 2), "role=2 is not one of 2 members, counted from 0"),
        ((0, 2, -1), "role must be at least 0, not -1"),
    ],
)
def test_refused_places(place: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampler(100, 8).deal(*place)
