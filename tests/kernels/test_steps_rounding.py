"""Weights rounded at random: to one of two neighbours, each with its chance, and what is not finite stays so."""

import torch

from baguakit.kernels.steps import definition as steps


def neighbours(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bf16 numbers next to fp32 values, towards zero and away from it; equal where one is exact."""
    word = x.view(torch.int32).long() & 0xFFFFFFFF
    exact = word & 0xFFFF == 0
    ends = [word >> 16, torch.where(exact, word >> 16, (word >> 16) + 1)]
    return tuple((e.to(torch.int32) << 16).view(torch.float32) for e in ends)


def test_draws_are_one_of_the_two_neighbours_each_with_its_chance():
    x = torch.cat([torch.randn(400) * 10 ** torch.randn(400), torch.tensor([0.0, -0.0, 1e-45, -1e-40, 1.0, 3.3e38])])
    below, above = neighbours(x)
    draws = torch.stack(
        [
            steps.drawn(x, 0, steps.numbers_of(steps.SGD(), steps.Conditions(0.1, t - 1, key=1))[2]).float()
            for t in range(400)
        ]
    )
    assert ((draws == below) | (draws == above)).all()
    # Draws have 16 bits, as many as x has beyond bf16: the chance is exact, and the mean of 400 · 400 is normal.
    chance = (x.view(torch.int32) & 0xFFFF).double() / 65536
    raised = (draws == above).double() * (above != below)
    spread = (chance * (1 - chance)).sum().mul(400).sqrt()
    assert (raised.sum() - 400 * chance.sum()).abs() <= 5 * spread
    assert ((raised.mean(0) - chance).abs() <= 6 * (chance * (1 - chance) / 400).sqrt() + 1e-12).all()


def test_values_that_are_not_finite_stay_so():
    x = torch.tensor([float("nan"), float("inf"), -float("inf")] * 50)
    drawn = steps.drawn(x, 0, (1, 2)).float()
    assert torch.equal(drawn.isnan(), x.isnan()) and torch.equal(drawn[~x.isnan()], x[~x.isnan()])
