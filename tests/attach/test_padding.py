"""Padding is zero at every launch, whatever a compressor makes of it: so a resumed run is the uninterrupted one."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from everything import COMPRESSORS, usual
from pool import ranks
from tiers import slow_after
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import baguakit as bk
from baguakit.algorithms.gradients import TrackedMean

COMPRESSORS = [*usual(COMPRESSORS).values(), "Sign(block=64)"]
ALGORITHMS = {
    "bytegrad": "during_backward(ErrorFeedback({mean}))",
    "qadam": "bk.algorithms.qadam(2, compressor={c}, error_feedback=True)",
    "ef21": "during_backward(TrackedMean({mean}, momentum=0.5))",
    "dcd": "bk.algorithms.low_precision_decentralized(compressor={c})",
    "choco": "bk.algorithms.choco(compressor={c})",
    "choco, one peer": "bk.algorithms.choco(bk.topology.OnePeerExact(), {c}, gamma=0.3)",
    "diloco": "bk.algorithms.diloco(2, inner=ErrorFeedback({mean}))",
    "diloco, delayed": "bk.algorithms.diloco(2, delay=1, inner=ErrorFeedback({mean}))",
}
GOSSIP = ("dcd", "choco", "choco, one peer")
SHAPES = [(7,), (990,), (3,)]  # 1,000 values, which no block divides


def made(algorithm, compressor, stage=lambda stage: stage):
    c = eval(compressor, vars(bk.compressors))
    mean = f"CompressedMean({compressor})" if c.dense else f"SparseMean({compressor})"
    rule = eval(
        ALGORITHMS[algorithm].format(c=compressor, mean=mean),
        {
            "bk": bk,
            "TrackedMean": TrackedMean,
            **vars(bk.compressors),
            **vars(bk.stages),
            "during_backward": bk.during_backward,
        },
    )
    return stage(rule)


def trained(rule, stops=(), steps=6, comm=None, shapes=SHAPES, padded=True):
    """The weights after some steps, taken up by a new attachment at each of `stops`."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(dist.get_rank())
    aims = [torch.randn(p.shape, generator=draw) + 3 for p in model]
    state = None
    for start, stop in zip((0, *stops), (*stops, steps), strict=True):
        with bk.attach(model, optimizer, rule, broadcast=False, comm=comm) as att:
            assert padded == any(bucket.padding.numel() for bucket in att._life.runners[0].buckets)
            if state is not None:
                att.load_state_dict(state)
            for step in range(start, stop):
                optimizer.zero_grad()
                sum(((p - aim) ** 2).sum() * (1 + step % 3) for p, aim in zip(model, aims, strict=True)).backward()
                optimizer.step()
            state = att.state_dict()
    return torch.cat([p.detach() for p in model])


@pytest.mark.parametrize("compressors", slow_after(1, [["Sign()", "TopK(0.05)"], COMPRESSORS]), ids=["two", "all"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_resuming_is_exact_with_every_compressor(algorithm, compressors):
    def run():
        for compressor in compressors:
            dense = not compressor.startswith("TopK")
            if dense or algorithm != "qadam":
                rule, padded = made(algorithm, compressor), dense or algorithm in GOSSIP
                assert torch.equal(trained(rule, padded=padded), trained(rule, (3,), padded=padded)), compressor

    ranks(2, run)


@pytest.mark.slow  # four ranks
@pytest.mark.parametrize("algorithm", ["bytegrad", "choco, one peer"])
def test_resuming_shards_is_exact(algorithm):
    """Of a bucket that nodes divide among their ranks, some have part of the padding, or nothing else."""

    def run():
        comm = bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra")))
        for compressor in ("Sign()", "MinMaxUInt8(block=64)"):
            for shapes in (SHAPES, [(20,)]):
                rule = made(algorithm, compressor, bk.hierarchical)
                whole = trained(rule, comm=comm, shapes=shapes)
                assert torch.equal(whole, trained(rule, (3,), comm=comm, shapes=shapes)), compressor

    ranks(4, run)


@pytest.mark.parametrize("around", slow_after(1, ["whole", "shards"]))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_is_zero_when_a_stage_is_called(algorithm, around):
    from baguakit.stages import Stage

    @dataclass(frozen=True, repr=False)
    class Looking(Stage):
        """Does what `inner` does; before that it looks at what lies beyond the parameters' values."""

        inner: Any
        parts: int  # of the bucket, of which it is given one

        @property
        def same_on_all_ranks(self):
            return self.inner.same_on_all_ranks

        def multiple_of(self, comm):
            return 256

        def __call__(self, x, state, comm):
            used = max(0, 1000 - dist.get_rank() % self.parts * x.numel())
            held = [x, *tensors(state, x.numel())]
            assert len(held) > 1 and not any(tensor[used:].any() for tensor in held)
            return self.inner(x, state["inner"], comm)

    def tensors(value, length):
        for each in value.values():
            if isinstance(each, dict):
                yield from tensors(each, length)
            elif each.shape == (length,):
                yield each

    def run():
        from dataclasses import replace

        rule, comm = made(algorithm, "Sign()"), None
        if around == "whole":
            rule = replace(rule, stage=Looking(rule.stage, 1))
        else:
            comm = bk.Comm(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("inter", "intra")))
            rule = replace(rule, stage=bk.stages.Hierarchical(Looking(rule.stage, 2)))
        trained(rule, comm=comm)

    ranks(2 if around == "whole" else 4, run)
