"""Attach names lazy parameters, works in inference mode, and leaves no compilation to the first step."""

import pytest
import torch
from everything import ALGORITHMS, made, others_slow
from pool import ranks
from training import net_and_sgd, run_steps

import baguakit as bk
from baguakit.kernels.cpu import libraries

RULES = {
    "bytegrad": lambda bk: bk.algorithms.bytegrad(error_feedback=True),
    "qadam": lambda bk: bk.algorithms.qadam(warmup_steps=1),
    "ef21": lambda bk: bk.algorithms.ef21(bk.compressors.MinMaxUInt8()),
    "low_precision_decentralized": lambda bk: bk.algorithms.low_precision_decentralized(),
    "choco": lambda bk: bk.algorithms.choco(),
    "diloco": lambda bk: bk.algorithms.diloco(every=1, inner=bk.stages.ErrorFeedback(bk.stages.CompressedMean())),
}


def first_steps(rules, dtype_name):
    """Return, by algorithm, the number of units that attach compiled, and of those that the steps after it did."""
    from baguakit.kernels.cpu import units

    found = {}
    for name, rule in rules.items():
        units._units.clear()
        model = torch.nn.Linear(300, 300).to(getattr(torch, dtype_name))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with bk.attach(model, optimizer, rule(bk)):
            attached = len(units._units)
            for _ in range(3):
                model(torch.ones(2, 300, dtype=model.weight.dtype)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        found[name] = attached, len(units._units) - attached
    return found


@pytest.mark.skipif(not libraries.compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_after_attach_no_step_compiles(dtype):
    for found in ranks(2, first_steps, RULES, dtype):
        assert all(attached > 0 and later == 0 for attached, later in found.values()), found


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
