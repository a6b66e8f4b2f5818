"""Networks that are frozen, thawed, added to and stepped in any order, by schedules that a seed draws."""

import pytest
import torch
from pool import ranks
from schedules import attached, by_hand, schedule

import baguakit as bk

SEEDS = [*range(6), *(pytest.param(first, marks=pytest.mark.slow) for first in range(6, 300))]


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_are_averaged_as_by_hand(seed):
    drawn = schedule(seed, any_pass=True)
    right = by_hand(drawn, 2, gradients=True)
    assert torch.equal(*right)
    for found in ranks(2, attached, drawn, bk.algorithms.gradient_allreduce()):
        assert torch.equal(found, right[0])


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_are_averaged_as_by_hand(seed):
    drawn, every = schedule(seed, any_pass=True), 1 + seed % 2
    right = by_hand(drawn, 2, gradients=False, every=every)
    for found, by in zip(ranks(2, attached, drawn, bk.algorithms.local_sgd(every=every)), right, strict=True):
        assert torch.equal(found, by)
