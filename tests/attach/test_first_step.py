"""The first step waits for no compiler: attach has seen to it."""

import pytest
import torch
from pool import ranks

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
