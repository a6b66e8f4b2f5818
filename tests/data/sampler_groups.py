"""Samplers for all ranks of a group, over samples as long as texts are."""

import numpy as np
from hypothesis import strategies as st

from baguakit.data import LoadBalancedBatchSampler, LoadBalancedSampler

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
