"""Attach is called before lazy parameters have shapes, and in inference mode."""

import pytest
import torch
from everything import ALGORITHMS, made, others_slow
from pool import ranks
from training import net_and_sgd, run_steps

import baguakit as bk


def test_a_lazy_parameter_is_named():
    def run():
        model = torch.nn.Sequential(torch.nn.LazyLinear(4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for broadcast in (True, False):
            with pytest.raises(TypeError, match=r"0\.weight has no shape yet; run a forward pass"):
                bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), broadcast=broadcast)

    ranks(2, run)


@pytest.mark.parametrize("algorithm", others_slow(ALGORITHMS))
def test_an_attachment_made_in_inference_mode_trains(algorithm):
    def run():
        model, optimizer = net_and_sgd()
        with torch.inference_mode():
            attachment = bk.attach(model, optimizer, made(algorithm))
        with attachment:
            run_steps(model, optimizer, range(3))
            return attachment.step

    assert ranks(2, run) == [3, 3]
