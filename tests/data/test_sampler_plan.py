"""Dealing samples to ranks: the bounds hold for any costs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from baguakit.data.plan import Limit, all_steps, assign, by_cost, one_step

COSTS = st.lists(st.floats(0, 1e6) | st.integers(0, 50).map(float), min_size=1, max_size=120).map(np.array)
RANKS = st.integers(1, 9)


@given(COSTS, RANKS)
def test_totals_of_two_ranks_differ_by_the_widest_group_at_most(costs, ranks):
    samples = by_cost(np.arange(len(costs)), costs, 0, np.random.default_rng(0))
    groups = samples[: len(samples) // ranks * ranks].reshape(-1, ranks)
    dealt = assign(groups, costs, None)
    assert np.array_equal(np.sort(dealt, axis=1), np.sort(groups, axis=1))
    if len(groups):
        loads, spread = costs[dealt].sum(axis=0), np.ptp(costs[groups], axis=1)
        assert np.ptp(loads) <= spread.max() * (1 + 1e-9)


@given(COSTS, RANKS)
def test_neighbours_in_cost_have_the_smallest_sum_of_maxima(costs, ranks):
    """Σ max over steps is least for sorted groups; any other grouping costs as much or more."""
    rng = np.random.default_rng(0)
    whole = np.arange(len(costs) // ranks * ranks)
    ours = costs[by_cost(whole, costs, 0, rng)].reshape(-1, ranks).max(axis=1).sum()
    other = costs[rng.permutation(whole)].reshape(-1, ranks).max(axis=1).sum()
    assert ours <= other * (1 + 1e-9)


def test_random_level_moves_from_sorted_to_any_order():
    costs, rng = np.arange(1000.0), np.random.default_rng(0)
    moved = [np.abs(by_cost(np.arange(1000), costs, level, rng) - np.arange(1000)).mean() for level in (0, 0.1, 0.5, 1)]
    assert moved[0] == 0 and moved == sorted(moved)
    assert 300 < moved[-1] < 367  # a random permutation moves by n / 3 on average


@given(COSTS, RANKS)
def test_a_step_is_dealt_whole_with_one_sample_of_difference(costs, ranks):
    samples = np.arange(len(costs))
    batches = one_step(samples, costs, ranks)
    counts = [len(batch) for batch in batches]
    assert sorted(np.concatenate(batches)) == samples.tolist()
    assert max(counts) - min(counts) <= 1


@settings(max_examples=300)
@given(COSTS, RANKS, st.floats(1, 10), st.none() | st.integers(1, 7), st.booleans())
def test_cut_keeps_to_the_limit_and_loses_nothing(costs, ranks, room, batch_size, padded):
    limit = Limit(max(costs.max() * room, 1.0), batch_size, padded)
    samples = np.random.default_rng(0).permutation(len(costs))
    steps = all_steps(samples, costs, ranks, limit)
    seen = np.concatenate([batch for step in steps for batch in step])
    counts = np.bincount(seen, minlength=len(costs))
    repeated = len(seen) - len(costs)
    assert counts.min() >= 1 and 0 <= repeated < ranks
    for step in steps:
        sizes = [len(batch) for batch in step]
        assert len(step) == ranks and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        assert all(limit.allows(batch, costs) for batch in step)
    if len(costs) % ranks == 0:
        assert repeated == 0


def test_samples_are_repeated_only_where_a_rank_would_have_none():
    costs = np.ones(11)
    shared = all_steps(np.arange(11), costs, 8, Limit(2, None, False))
    assert [sorted(map(len, step)) for step in shared] == [[1] * 5 + [2] * 3]
    tight = all_steps(np.arange(11), costs, 8, Limit(1, None, False))
    assert [sorted(map(len, step)) for step in tight] == [[1] * 8, [1] * 8]
