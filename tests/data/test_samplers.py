"""Samplers: coverage, equal length, determinism, balance, and going on where one stopped."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import ranks as on_ranks
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from baguakit.data import LoadBalancedBatchSampler, LoadBalancedSampler

N = st.integers(0, 60)
RANKS = st.integers(1, 9)


def lengths(n, seed=0, sigma=1.0):
    """Log-normal lengths, as texts have."""
    return np.random.default_rng(seed).lognormal(5.5, sigma, n).round().clip(1)


def samplers(n, ranks, costs=None, **options):
    costs = lengths(n) if costs is None else costs
    return [LoadBalancedSampler(range(n), costs, ranks, rank, **options) for rank in range(ranks)]


def batch_samplers(n, ranks, costs=None, **options):
    costs = lengths(n) if costs is None else costs
    return [LoadBalancedBatchSampler(range(n), costs, num_replicas=ranks, rank=r, **options) for r in range(ranks)]


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
    """What each rank had to do, relative to the mean, over the first `epochs` epochs."""
    work = np.zeros(sampler.num_replicas)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        work += sampler.order.costs[np.array(sampler._plan(sampler._now))].sum(axis=(0, 2))
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
    for options, text in [({}, "give budget="), ({"budget": 0}, "positive"), ({"batch_size": 0}, "at least 1")]:
        with pytest.raises(ValueError, match=text):
            LoadBalancedBatchSampler(range(5), [1, 2, 3, 4, 5], **options)


@pytest.mark.parametrize(
    "options, text",
    [
        ({"num_replicas": 2, "rank": 2}, "no rank 2 of 2 ranks"),
        ({"num_replicas": 0, "rank": 0}, "of 0 ranks"),
        ({"random_level": 1.5}, "random_level is 1.5"),
        ({"random_level": 0.5, "shuffle": False}, "needs shuffle=True"),
        ({"seed": -1}, "seed is -1"),
        ({"group": object()}, "init_process_group first"),
    ],
)
def test_settings_are_refused_in_words(options, text):
    with pytest.raises(ValueError, match=text):
        LoadBalancedSampler(range(3), [1, 2, 3], **options)


# Going on in mid-epoch

KINDS = {
    "samples": lambda n, ranks, **o: samplers(n, ranks, **o),
    "budget": lambda n, ranks, **o: batch_samplers(n, ranks, lengths(n).clip(1, 900), budget=1000, **o),
    "batches": lambda n, ranks, **o: batch_samplers(n, ranks, batch_size=3, **o),
}


def start(sampler, steps):
    it = iter(sampler)
    return [next(it) for _ in range(steps)]


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 60), ranks=RANKS, part=st.floats(0, 1), shuffle=st.booleans(), drop=st.booleans())
def test_resuming_gives_exactly_the_rest(kind, n, ranks, part, shuffle, drop):
    options = {"shuffle": shuffle, "drop_last": drop, "random_level": 0.5 * shuffle}
    for sampler, fresh in zip(KINDS[kind](n, ranks, **options), KINDS[kind](n, ranks, **options), strict=True):
        sampler.set_epoch(2)
        whole, cut = list(sampler), int(part * len(sampler))
        start(sampler, cut)
        state = sampler.state_dict()
        assert state == sampler.state_dict(consumed=cut)
        fresh.load_state_dict(state)
        fresh.set_epoch(2)  # as loops do at the head of an epoch
        assert len(fresh) == len(whole) and list(fresh) == whole[cut:]
        assert list(fresh) == whole  # the next pass is a whole one


def flat(items):
    return [i for item in items for i in (item if isinstance(item, list) else [item])]


@pytest.mark.parametrize("kind", KINDS)
@given(n=st.integers(1, 60), before=RANKS, after=RANKS, part=st.floats(0, 1), again=st.floats(0, 1))
def test_another_number_of_ranks_takes_over_what_is_left(kind, n, before, after, part, again):
    """Over three runs every sample is trained; repeated are only those that some run had to repeat."""
    runs, state = [], None
    for size, share in [(before, part), (after, again), (before, 1.0)]:
        group = KINDS[kind](n, size)
        for sampler in group:
            if state is not None:
                sampler.load_state_dict(state)
        steps = round(share * (len(group[0]) - group[0].state_dict()["step"]))
        runs.append([i for sampler in group for i in flat(start(sampler, steps))])
        state = group[0].state_dict()
        assert all(sampler.state_dict() == state for sampler in group)
    trained = list(chain(*runs))
    assert set(trained) == set(range(n))
    if before == after:
        assert sorted(trained) == sorted(flat(item for sampler in KINDS[kind](n, before) for item in sampler))
    else:
        assert sum(len(set(run)) for run in runs) == n


def test_resuming_with_other_data_or_settings_is_refused():
    state = samplers(20, 2)[0].state_dict()
    for other, text in [
        (LoadBalancedSampler(range(21), lengths(21), 2, 0), "length=20 and the sampler has 21"),
        (LoadBalancedSampler(range(20), np.ones(20), 2, 0), "complexity="),
        (LoadBalancedSampler(range(20), lengths(20), 2, 0, seed=1), "seed=0 and the sampler has 1"),
        (batch_samplers(20, 2, batch_size=2)[0], "batch_size=None"),
    ]:
        with pytest.raises(ValueError, match=text):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="consumed is 11 and this pass has 10 items"):
        samplers(20, 2)[0].state_dict(consumed=11)


# In a loader


@pytest.mark.parametrize("workers, persistent", [(0, False), (2, False), (2, True)])
def test_loaders_go_through_an_epoch_and_resume(workers, persistent):
    data = TensorDataset(torch.arange(40))
    sampler, batches = samplers(40, 2)[1], batch_samplers(40, 2, batch_size=4)[1]
    options = {"num_workers": workers, "persistent_workers": persistent}
    if workers:
        options["multiprocessing_context"] = "fork"
    by_sample = DataLoader(data, batch_size=4, sampler=sampler, **options)
    by_batch = DataLoader(data, batch_sampler=batches, **options)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        batches.set_epoch(epoch)
        assert [i for (x,) in by_sample for i in x.tolist()] == list(sampler)
        seen = [x.tolist() for (x,) in by_batch]
        assert seen == list(batches) and len(seen) == len(by_batch)
    batches.load_state_dict(batches.state_dict(consumed=2))
    assert [x.tolist() for (x,) in by_batch] == seen[2:]


def test_trainers_find_a_distributed_sampler_and_set_epoch():
    assert isinstance(samplers(4, 2)[0], DistributedSampler)
    batches = batch_samplers(4, 2, batch_size=1)[0]
    DataLoader(range(4), batch_sampler=batches).batch_sampler.sampler.set_epoch(3)
    assert batches.epoch == 3


def test_ranks_come_from_the_process_group():
    def taken():
        from baguakit.data import LoadBalancedSampler as Sampler

        sampler = Sampler(range(10), list(range(10)))
        return sampler.rank, sampler.num_replicas, list(sampler)

    answers = on_ranks(2, taken)
    assert [a[:2] for a in answers] == [(0, 2), (1, 2)]
    assert sorted(answers[0][2] + answers[1][2]) == list(range(10))
