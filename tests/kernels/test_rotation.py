"""Rotation of blocks: it is exact for integers, adds in the stated order, and cuts tensors in pieces unseen."""

import pytest
import torch
from formats import bits

from baguakit.kernels import rotation

CPU = torch.device("cpu")
widths = pytest.mark.parametrize("width", [1 << power for power in range(6, 14)])


@widths
def test_a_rotation_restored_is_exact_for_integers(width):
    x, signs = torch.randint(-1000, 1000, (5, width)).float(), rotation.signs_of(width, CPU)
    rotated = rotation.rotate(x, signs)
    assert torch.equal(rotation.restore(rotated, signs), x)
    assert torch.equal((rotated.double() * 2 * width).square().sum(1), x.double().square().sum(1) * width)
    some = torch.eye(width)[:: max(1, width // 512)]
    spread = rotation.rotate(some, signs)  # its rows are those of H D
    assert torch.equal(spread.abs(), torch.full_like(some, 0.5 / width))


@widths
def test_a_rotation_adds_the_pairs_of_each_distance_in_turn(width):
    x, signs = torch.randn(3, width) * 2.0 ** torch.tensor([[-130.0], [0.0], [127.0]]), rotation.signs_of(width, CPU)
    expected = x * (signs / (2 * width))
    for distance in (1 << step for step in range(width.bit_length() - 1)):
        a, b = expected.view(3, -1, 2, distance).unbind(2)
        expected = torch.stack((a + b, a - b), 2).view(3, width)
    assert torch.equal(bits(rotation.rotate(x, signs)), bits(expected))
