"""A backward that fails on one rank and is caught costs all ranks the same step, or is told to all."""

import pytest
import torch
from pool import ranks
from saying import TIMEOUT, said
from training import flat, net, sgd

# A backward that fails on one rank


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        raise MemoryError("out of memory")


RULES = {
    "all-reduce": lambda bk: bk.algorithms.gradient_allreduce(),
    "bytegrad": lambda bk: bk.algorithms.bytegrad(bk.compressors.MinMaxUInt8(block=64), True),
    "qadam": lambda bk: bk.algorithms.qadam(3),
    "power_sgd": lambda bk: bk.algorithms.power_sgd(2),
    "top_k": lambda bk: bk.algorithms.top_k(0.1),
    "gradient_tracking": lambda bk: bk.algorithms.gradient_tracking(),
    "post-local": lambda bk: bk.algorithms.local_sgd(every=2, start=5),
}


def skipping(rule, at, without, scaled=False, steps=8):
    """Train, and skip a batch whose backward fails: rank 1's at step `at`; or, `without`, no rank sees that batch."""
    import torch.distributed as dist

    import baguakit as bk

    rank, model = dist.get_rank(), net()
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    with bk.attach(model, optimizer, rule(bk), bucket_bytes=200, scaler=scaler if scaled else None) as att:
        for step in range(steps):
            if without and step == at:
                continue
            optimizer.zero_grad()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * step + rank))
            hidden = model[2](model[1](model[0](x)))
            hidden = Fails.apply(hidden) if step == at and rank == 1 else hidden
            try:
                scaler.scale(model[4](model[3](hidden)).square().mean()).backward()
            except MemoryError:
                continue
            scaler.step(optimizer)
            scaler.update(1024.0 if scaled else None)
        return flat(model), att.step


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", RULES)
def test_a_failed_backward_costs_all_ranks_the_same_step(name, scaled):
    if scaled and name in ("gradient_tracking", "post-local"):
        pytest.skip("rules on weights want a ShardedGradScaler")
    here, there = (ranks(3, skipping, RULES[name], 3, without, scaled) for without in (False, True))
    for (weights, step), (expected, wanted) in zip(here, there, strict=True):
        assert torch.equal(weights, expected) and step == wanted == 7


def test_a_failed_backward_whose_gradients_lie_in_the_buckets_is_told_to_all(own_pools):
    def run():
        import torch.distributed as dist

        import baguakit as bk

        model = net()
        optimizer = sgd(model.parameters())
        with bk.attach(model, optimizer, bk.algorithms.gradient_allreduce(), timeout=TIMEOUT, bucket_bytes=200):
            for step in range(4):
                optimizer.zero_grad(set_to_none=False)
                x = model[3](model[2](model[1](model[0](torch.ones(2, 6)))))
                x = Fails.apply(model[1](model[0](torch.ones(2, 6)))) if step == 2 and dist.get_rank() == 1 else None
                hidden = model[1](model[0](torch.ones(2, 6))) if x is None else x
                try:
                    model[4](model[3](model[2](hidden))).sum().backward()
                except MemoryError:
                    continue
                optimizer.step()

    for sentence in own_pools(3).run(said, run):
        assert sentence.startswith("PeerError: a backward failed on rank 1 after "), sentence
        assert sentence.endswith("use zero_grad(set_to_none=True)")
