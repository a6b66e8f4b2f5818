"""Compressed collectives over real NCCL: what they return equals what it is over gloo, bit for bit."""

import pytest
import torch
from drawn import all_of_them
from pool import ranks

import baguakit as bk

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


def differences(piece):
    """The largest difference of each result on a GPU, in pieces of so many values, from the same on the processor."""
    from baguakit.primitives import compressed as pieces

    comm, usual = bk.Comm(), pieces.PIECE_VALUES
    expected = all_of_them(comm)
    try:
        pieces.PIECE_VALUES = piece or usual
        found = all_of_them(comm, "cuda")
    finally:
        pieces.PIECE_VALUES = usual
    return [(a - b.cpu()).abs().max().item() for a, b in zip(expected, found, strict=True)]


@pytest.mark.parametrize("piece", [None, 1 << 10], ids=["whole", "pieces"])
@pytest.mark.parametrize("n", [2, 3])
def test_collectives_mean_what_they_mean_over_gloo(n, piece):
    assert ranks(n, differences, piece, cuda=True) == [[0.0] * 7] * n
