"""The norm of gradients: that of fp64, by definition and kernels alike, and what is not finite is found."""

import pytest
import torch

from baguakit.kernels.steps import definition
from baguakit.kernels.steps import operators as steps_table

pytest.importorskip("triton")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_norm_is_that_of_fp64(dtype, device):
    from baguakit.kernels.steps import gpu

    source = torch.Generator().manual_seed(0)
    grads = [(torch.randn(n, generator=source) * 10.0 ** (i - 3)).to(dtype) for i, n in enumerate([0, 3, 20_000, 1])]
    exact = torch.cat([g.double() for g in grads]).norm().float()
    norms, found = [torch.empty(()), torch.empty((), device=device)], torch.empty((), device=device)
    definition.gradient_norm_(norms[0], grads, None)
    there = [g.to(device) for g in grads]
    plan = steps_table.tables_of({"g": there})
    for _ in range(2):
        gpu.gradient_norm_(norms[1], plan, found)
        assert torch.equal(norms[0], exact) and torch.equal(norms[1].cpu(), exact) and found == 0


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, from the interpreter
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_the_norm_finds(value, device):
    from baguakit.kernels.steps import gpu

    grads = [torch.ones(5), torch.full((2,), value)]
    there = [g.to(device) for g in grads]
    plan = steps_table.tables_of({"g": there})
    for run, x, home in ((definition.gradient_norm_, grads, "cpu"), (gpu.gradient_norm_, plan, device)):
        norm, found = torch.empty((), device=home), torch.empty((), device=home)
        run(norm, x, found)
        assert found == 1 and not norm.isfinite()
