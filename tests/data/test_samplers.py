"""Samplers: coverage, equal length, determinism, balance, and settings refused in words."""

import json
from collections import Counter
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampler_groups import RANKS, batch_samplers, lengths, samplers

from baguakit.data import LoadBalancedBatchSampler, LoadBalancedSampler

N = st.integers(0, 60)


def balance(work):
    """Σ max over ranks / Σ mean over ranks, and the largest deviation of a rank's share; `work` is (ranks, steps)."""
    work = np.array(work, dtype=float)
    return work.max(axis=0).sum() / work.mean(axis=0).sum(), abs(work.sum(axis=1) / work.sum() * len(work) - 1).max()


# One sample per rank and step


@given(N, RANKS, st.booleans(), st.booleans(), st.integers(0, 3), st.sampled_from([0.0, 0.3, 1.0]))
def test_padding_and_dropping_are_exact(n, ranks, shuffle, drop_last, epoch, level):
    group = samplers(n, ranks, shuffle=shuffle, drop_last=drop_last, random_level=level if shuffle else 0)
    for sampler in group:
        sampler.set_epoch(epoch)
    taken = [list(sampler) for sampler in group]
    counts = Counter(chain(*taken))
    steps = n // ranks if drop_last else -(-n // ranks)
    assert [len(t) for t in taken] == [len(s) for s in group] == [steps] * ranks
    assert counts.keys() <= set(range(n))
    if drop_last:
        assert sum(counts.values()) == n - n % ranks and set(counts.values()) <= {1}
    elif n:
        assert len(counts) == n and max(counts.values()) <= -(-ranks // n) + (ranks < n)
        assert max(counts.values()) - min(counts.values()) <= 1


@given(st.integers(1, 60), RANKS, st.integers(0, 5), st.integers(0, 5))
def test_seed_and_epoch_decide_everything(n, ranks, seed, epoch):
    first, again = samplers(n, ranks, seed=seed), samplers(n, ranks, seed=seed)
    for sampler in first + again:
        sampler.set_epoch(epoch)
    assert [list(s) for s in first] == [list(s) for s in again] == [list(s) for s in first]


def test_epochs_differ_and_so_do_seeds():
    sampler = samplers(100, 4)[0]
    orders = [list(sampler)]
    sampler.set_epoch(1)
    orders += [list(sampler), list(samplers(100, 4, seed=1)[0])]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_what_is_left_out_is_another_in_each_epoch():
    group, left = samplers(11, 4, drop_last=True), set()
    for epoch in range(20):
        for sampler in group:
            sampler.set_epoch(epoch)
        left.add(frozenset(range(11)) - {i for sampler in group for i in sampler})
    assert len(left) > 10


def test_alone_and_unshuffled_the_order_is_that_of_cost():
    costs = lengths(50)
    assert list(LoadBalancedSampler(range(50), costs, 1, 0, shuffle=False)) == np.argsort(costs, kind="stable").tolist()


def test_eight_ranks_on_lognormal_lengths_wait_two_percent_at_most():
    n, ranks = 10_000, 8
    costs = lengths(n)
    work = [costs[list(sampler)] for sampler in samplers(n, ranks, costs)]
    ours, share = balance(work)
    random, _ = balance(costs[np.random.default_rng(0).permutation(n)].reshape(ranks, -1))
    print(f"sum of maxima / mean: balanced {ours:.4f}, random {random:.4f}; largest deviation of a share {share:.1e}")
    assert ours <= 1.02 and random > 1.5 and share < 0.01


def shares(sampler, epochs):
    """Return the work of each rank relative to the mean, over the first `epochs` epochs."""
    work = np.zeros(sampler.num_replicas)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        work += sampler.costs[np.array(sampler._shares(sampler._now.stretch).parts[-1][1])].sum(axis=(0, 2))
    return work / work.mean()


@given(st.integers(1, 12), RANKS, st.booleans())
def test_over_as_many_epochs_as_ranks_all_do_exactly_the_same(groups, ranks, shuffle):
    n = groups * ranks
    assert shares(samplers(n, ranks, shuffle=shuffle)[0], 3 * ranks).tolist() == [1.0] * ranks


@pytest.mark.parametrize("n, epochs", [(1001, 16), (40_000, 1), (40_003, 1), (101, 200)])
@pytest.mark.parametrize("level", [0.0, 1.0])
def test_every_rank_has_its_share_in_the_long_run(n, epochs, level):
    assert abs(shares(samplers(n, 8, random_level=level)[0], epochs) - 1).max() < 0.01


# Batches


@settings(max_examples=200)
@given(
    N,
    RANKS,
    st.sampled_from([{"budget": 3000}, {"batch_size": 3}, {"budget": 3000, "batch_size": 4, "padded": True}]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_batches_cover_keep_to_the_limit_and_match_in_number(n, ranks, limit, shuffle, drop_last, level):
    costs = lengths(n).clip(1, 2500)
    options = {"shuffle": shuffle, "drop_last": drop_last, "random_level": level if shuffle else 0.0}
    group = batch_samplers(n, ranks, costs, **limit, **options)
    taken = [list(sampler) for sampler in group]
    assert len({len(t) for t in taken}) == 1 and all(len(s) == len(t) for s, t in zip(group, taken, strict=True))
    for step in zip(*taken, strict=True):
        sizes = [len(batch) for batch in step]
        assert min(sizes) >= 1 and max(sizes) - min(sizes) <= (0 if drop_last else 1)
        assert all(group[0].limit.allows(np.array(batch), costs) for batch in step)
        if drop_last and "budget" not in limit:
            assert set(sizes) == {limit["batch_size"]}
    counts = Counter(i for t in taken for batch in t for i in batch)
    if drop_last:
        whole = ranks * (1 if "budget" in limit else limit["batch_size"])
        assert sum(counts.values()) == n - n % whole and set(counts.values()) <= {1}
    elif n:
        assert set(counts) == set(range(n)) and sum(counts.values()) - n < ranks


@pytest.mark.parametrize("level", [0.0, 1.0])
@pytest.mark.parametrize("limit", [{"budget": 32768}, {"batch_size": 16}])
def test_batches_of_eight_ranks_wait_two_percent_at_most(limit, level):
    n, ranks = 10_000, 8
    costs = lengths(n)
    group = batch_samplers(n, ranks, costs, random_level=level, **limit)
    ours, share = balance([[costs[batch].sum() for batch in sampler] for sampler in group])
    chance = costs[np.random.default_rng(0).permutation(n)[: n // 128 * 128]].reshape(ranks, -1, 16).sum(axis=2)
    print(
        f"{limit}, random_level {level}: {ours:.4f}, random batches of 16 {balance(chance)[0]:.4f}, share {share:.1e}"
    )
    assert ours <= 1.02 and share < 0.01


def test_padded_batches_keep_the_padded_budget():
    costs = lengths(2000)
    group = batch_samplers(2000, 4, costs, budget=20_000, padded=True)
    work = [[len(batch) * costs[batch].max() for batch in sampler] for sampler in group]
    assert np.max(work) <= 20_000 and balance(work)[0] <= 1.05


def test_the_limit_is_refused_in_words_where_it_cannot_be_kept():
    with pytest.raises(ValueError, match="sample 3 alone costs 9 and the budget is 8; raise budget"):
        LoadBalancedBatchSampler(range(5), [1, 2, 3, 9, 4], budget=8)
    with pytest.raises(ValueError, match="pass budget="):
        LoadBalancedBatchSampler(range(5), [1, 2, 3, 4, 5])
    for budget in (0, -1, float("nan"), float("inf"), True, "8", [8]):
        with pytest.raises((TypeError, ValueError), match="budget is a finite number, greater than 0, not "):
            LoadBalancedBatchSampler(range(5), [1, 2, 3, 4, 5], budget=budget)
    for size in (0, -1, 2.0, float("nan"), True, "8"):
        with pytest.raises((TypeError, ValueError), match="batch_size is a whole number, 1 or more, not "):
            LoadBalancedBatchSampler(range(5), [1, 2, 3, 4, 5], batch_size=size)
    with pytest.raises(TypeError, match="padded is True or False, not 1"):
        LoadBalancedBatchSampler(range(5), [1, 2, 3, 4, 5], batch_size=2, padded=1)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_replicas": 2, "rank": 2}, "no rank 2 of 2 ranks"),
        ({"num_replicas": 0, "rank": 0}, "num_replicas is a whole number, 1 to 1048576, not 0"),
        ({"num_replicas": 2.0, "rank": 0}, "num_replicas is a whole number, 1 to 1048576, not 2.0"),
        ({"num_replicas": 2, "rank": -1}, "rank is a whole number, 0 or more, not -1"),
        ({"num_replicas": 2, "rank": True}, "rank is a whole number, 0 or more, not True"),
        ({"random_level": 1.5}, "random_level is a finite number, 0 to 1, not 1.5"),
        ({"random_level": float("nan")}, "random_level is a finite number, 0 to 1, not nan"),
        ({"random_level": "0.5"}, "random_level is a finite number, 0 to 1, not '0.5'"),
        ({"shuffle": None}, "shuffle is True or False, not None"),
        ({"drop_last": "no"}, "drop_last is True or False, not 'no'"),
        ({"random_level": 0.5, "shuffle": False}, "needs shuffle=True"),
        ({"seed": -1}, "seed is a whole number, 0 or more, not -1"),
        ({"seed": 1.5}, "seed is a whole number, 0 or more, not 1.5"),
        ({"group": object()}, "group is a ProcessGroup of which this rank is a member"),
    ],
)
def test_settings_are_refused_in_words(options, text):
    with pytest.raises((TypeError, ValueError), match=text):
        LoadBalancedSampler(range(3), [1, 2, 3], **options)


def test_what_has_no_length_is_refused_in_words():
    with pytest.raises(TypeError, match="dataset is one that has a length, not generator"):
        LoadBalancedSampler((i for i in range(3)), [1, 2, 3])


def test_numbers_of_numpy_are_as_good_as_python_s():
    ours = LoadBalancedSampler(range(6), range(6), np.int64(2), np.int32(1), np.bool_(True), np.int64(3))
    same = LoadBalancedSampler(range(6), range(6), 2, 1, True, 3)
    ours.set_epoch(np.int64(4))
    same.set_epoch(4)
    assert list(ours) == list(same) and json.dumps(ours.state_dict()) == json.dumps(same.state_dict())
