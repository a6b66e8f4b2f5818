"""Balance of the work of ranks, and the cost of a sampler's epoch and of a cached sample.

    pytest --benchmark bench/bench_data.py --benchmark-json data.json

Ideal lines: balance 1 (every rank works the mean), a hit one copy of the sample's bytes.
"""

from time import perf_counter

import numpy as np
import pytest
import torch

from baguakit.data import CachedDataset, LMDBStore, LoadBalancedBatchSampler, LoadBalancedSampler, MemoryStore
from bench import slow_epochs

RANKS = 8


def lengths(n):
    """Log-normal, as the lengths of texts are."""
    return np.random.default_rng(0).lognormal(5.5, 1.0, n).round().clip(1)


def balance(work):
    """Σ max over ranks / Σ mean over ranks of `work` (ranks, steps)."""
    return float(work.max(axis=0).sum() / work.mean(axis=0).sum())


def random_balance(costs, batch):
    whole = len(costs) // (RANKS * batch) * RANKS * batch
    return balance(
        costs[np.random.default_rng(1).permutation(len(costs))[:whole]].reshape(RANKS, -1, batch).sum(axis=2)
    )


def said_of(info):
    """Return how the balance compares to the ideal, and to random samples."""
    return f"longest / mean work of a step: {info['balance']:.3f}; random samples: {info['random']:.3f}"


@pytest.mark.parametrize("n", [10_000, 1_000_000])
def bench_sampler(benchmark, n):
    """One epoch of one rank of eight; balance over all ranks is checked first."""
    costs = lengths(n)
    sampler = LoadBalancedSampler(range(n), costs, RANKS, 0)
    plan = np.array(sampler._shares(sampler._now.stretch).parts[-1][1])[:, :, 0]
    assert sorted(plan.ravel().tolist()) == list(range(n))
    work = costs[plan].T
    benchmark.extra_info.update(
        balance=balance(work),
        random=random_balance(costs, 1),
        largest_deviation_of_a_share=float(abs(work.sum(axis=1) / work.sum() * RANKS - 1).max()),
    )
    assert benchmark.extra_info["balance"] <= 1.02
    benchmark.extra_info["beside"] = said_of(benchmark.extra_info)

    def epoch():
        sampler.set_epoch(sampler.epoch + 1)
        return list(sampler)

    benchmark(epoch)
    print(f"\n{n} samples: {benchmark.extra_info}")


@pytest.mark.parametrize("level", [0.0, 1.0])
@pytest.mark.parametrize("limit", [{"budget": 32768}, {"batch_size": 16}], ids=str)
def bench_batch_sampler(benchmark, limit, level):
    """One epoch of 100,000 samples in batches, for one rank of eight."""
    n = 100_000
    costs = lengths(n).clip(max=16384)
    sampler = LoadBalancedBatchSampler(range(n), costs, num_replicas=RANKS, rank=0, random_level=level, **limit)
    plan = sampler._shares(sampler._now.stretch).parts[-1][1]
    assert sorted(np.concatenate([b for step in plan for b in step]).tolist()) == list(range(n))
    work = np.array([[costs[batch].sum() for batch in step] for step in plan]).T
    benchmark.extra_info.update(balance=balance(work), random=random_balance(costs, 16), steps=len(plan))
    if "budget" in limit:
        benchmark.extra_info["filled"] = float(work.mean() / limit["budget"])
    benchmark.extra_info["beside"] = said_of(benchmark.extra_info)

    def epoch():
        sampler.set_epoch(sampler.epoch + 1)
        return list(sampler)

    benchmark(epoch)
    print(f"\n{limit}, random_level {level}: {benchmark.extra_info}")


@pytest.mark.parametrize("store", ["memory", "lmdb"])
@pytest.mark.parametrize("side", [32, 224])
def bench_hit(benchmark, tmp_path, store, side):
    """Reading a cached uint8 image of 3 × side × side, against one copy of its bytes."""
    image = torch.randint(0, 255, (3, side, side), dtype=torch.uint8)
    with MemoryStore() if store == "memory" else LMDBStore(tmp_path) as opened:
        cached = CachedDataset([(image, i) for i in range(64)], opened, name="images")
        for i in range(64):
            assert cached[i][1] == i
        assert torch.equal(cached[5][0], image) and cached.report().hits == 1
        begun = perf_counter()
        for _ in range(1000):
            image.clone()
        copy = (perf_counter() - begun) / 1000
        benchmark(lambda: [cached[i] for i in range(64)])
    benchmark.extra_info.update(samples=64, bytes=image.nbytes, seconds_of_a_copy=copy)
    benchmark.extra_info["beside"] = f"64 samples; 64 copies: {64 * copy * 1e6:.0f} µs"
    print(f"\n{store}, {image.nbytes} bytes: one copy {copy * 1e6:.1f} µs; the time above is of 64 samples")


def bench_slow_dataset(benchmark, tmp_path):
    """10 ms a sample, 2 ranks × 2 loader workers: the first epoch and the next two."""
    seconds, computed, _ = benchmark.pedantic(slow_epochs.epochs, (tmp_path, 501, 3))
    assert sorted(computed) == list(range(501))
    benchmark.extra_info.update(seconds_by_epoch=seconds, second_epoch_speedup=seconds[0] / seconds[1])
    benchmark.extra_info["beside"] = f"first epoch / second: {seconds[0] / seconds[1]:.1f}"
    print(f"\n{benchmark.extra_info}")
