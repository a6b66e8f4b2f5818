"""examples/ddp_8bit.py and fsdp_8bit.py: a resumed run, dropout included, ends as an uninterrupted one does."""

import argparse
import importlib.util
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from pool import ranks

EXAMPLES = Path(__file__).parents[1] / "examples"
BITS = 8.0625  # of a value in Float8()


def trained(program, folder, steps, **options):
    """Train with a program; return all weights, whole, and the bytes sent in a step to those in fp32."""
    spec = importlib.util.spec_from_file_location(program, EXAMPLES / f"{program}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = argparse.Namespace(folder=folder, steps=steps, every=1, accumulate=2, **options)
    model, handle = module.train(options, torch.device("cpu"))
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    flat, n = torch.cat([p.detach().flatten() for p in weights]), dist.get_world_size()
    sent = None
    if handle is not None:
        report = handle.report()
        gradients = sum(row.bytes_sent for row in report.rows if row.number == 0) / report.steps
        sent = gradients / ((n - 1) / n * 4 * flat.numel())
        handle.detach()
    return flat, sent


def resumes(program, tmp_path, **options):
    """Train in one piece and in two, which must end alike; return the weights and the bytes."""
    whole = ranks(2, lambda: trained(program, tmp_path / "whole", 2, **options))
    ranks(2, lambda: trained(program, tmp_path / "parts", 1, **options))
    resumed = ranks(2, lambda: trained(program, tmp_path / "parts", 2, **options))
    assert all(torch.equal(weights, whole[0][0]) for weights, _ in [*whole, *resumed])
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == ["00000001", "00000002"]
    return whole[0]


def test_ddp(tmp_path):
    weights, sent = resumes("ddp_8bit", tmp_path, plain=False, width=32)
    assert sent == pytest.approx(2 * BITS / 32, rel=2e-3)  # all but the padding and the heads of blocks
    exact, _ = ranks(2, lambda: trained("ddp_8bit", tmp_path / "plain", 2, plain=True, width=32))[0]
    assert 0 < (weights - exact).norm() < 0.02 * exact.norm()


@pytest.mark.slow  # importing FSDP and torch.distributed.checkpoint takes seconds on each rank
@pytest.mark.parametrize("weights, reshard", [(True, False), (False, True)])
def test_fsdp(tmp_path, weights, reshard):
    _, sent = resumes("fsdp_8bit", tmp_path, weights=weights, reshard=reshard, width=64)
    assert sent == pytest.approx(BITS / 32, rel=2e-3)


@pytest.mark.slow  # likewise
def test_fsdp_gathers_weights_once_a_step(tmp_path):
    """Three modules are sharded, and a step has two micro-batches, each with a forward and a backward."""

    def gathers(reshard):
        from baguakit.interop.sharded import AllGather

        with mock.patch.object(AllGather, "__call__", autospec=True, side_effect=AllGather.__call__) as gather:
            trained("fsdp_8bit", tmp_path / str(reshard), 2, weights=True, reshard=reshard, width=32)
        return gather.call_count

    assert [ranks(2, gathers, reshard)[0] / 2 for reshard in (False, True)] == [3, 3 * 2 * 2]
