"""examples/mixture_of_experts.py: tokens in 8 bits learn as exact ones do, in a quarter of the bytes."""

import importlib.util
from pathlib import Path

import pytest
import torch
from pool import ranks

import baguakit as bk

PROGRAM = Path(__file__).parents[1] / "examples" / "mixture_of_experts.py"


def trained(steps, compressor):
    spec = importlib.util.spec_from_file_location("mixture_of_experts", PROGRAM)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.train(steps, compressor, torch.device("cpu"))


@pytest.mark.slow
def test_tokens_in_8_bits_learn_alike_in_a_quarter_of_the_bytes():
    """And the last rank has no expert, and hears no token."""
    exact = ranks(3, trained, 40, None)
    compressed = ranks(3, trained, 40, bk.compressors.MinMaxUInt8())
    for (loss, sent, heard), (loss_8, sent_8, heard_8) in zip(exact, compressed, strict=True):
        assert loss_8 == pytest.approx(loss, rel=0.01) and loss < 1.7  # it was ln 8 = 2.08
        assert 0.2 * sent < sent_8 < 0.27 * sent
        assert heard_8 == pytest.approx(heard, rel=0.1)
    assert compressed[2][2] == exact[2][2] == 0 and all(heard > 0 for _, _, heard in compressed[:2])
