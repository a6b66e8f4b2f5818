"""A backward that fails on one rank and is caught costs all ranks the same step, or is told to all."""

import pytest
import torch
import torch.distributed as dist
from everything import ALGORITHMS, delayed, made, others_slow, runs_free, waits_for_weights
from failing import Fails
from pool import ranks
from saying import TIMEOUT, said
from training import flat, net, net_and_sgd, sgd

import baguakit as bk
from baguakit.rules import rules_of

WITH_GRADIENTS = [  # of which a rule acts on gradients at the step that fails, and lands them in it
    each
    for each in ALGORITHMS
    if not runs_free(made(each))
    and not delayed(made(each))
    and any(rule.what == "grad" and rule.acts(3) for rule in rules_of(made(each)))
]


def skipping(algorithm, at, without, scaled=False, steps=6):
    """Train, and skip a batch whose backward fails: rank 1's at step `at`; or, `without`, no rank sees that batch."""
    rank, model = dist.get_rank(), net()
    optimizer = sgd(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    with bk.attach(model, optimizer, made(algorithm), bucket_bytes=200, scaler=scaler if scaled else None) as att:
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


@pytest.mark.parametrize("algorithm", others_slow(WITH_GRADIENTS))
def test_a_failed_backward_costs_all_ranks_the_same_step(algorithm):
    """With a gradient scaler, too, where rules on weights do not want another."""

    def run(scaled):
        return skipping(algorithm, 3, False, scaled), skipping(algorithm, 3, True, scaled)

    for scaled in (False,) if waits_for_weights(made(algorithm)) else (False, True):
        for (weights, step), (expected, wanted) in ranks(2 if scaled else 3, run, scaled):
            assert torch.equal(weights, expected) and step == wanted == 5, scaled


def test_a_failed_backward_whose_gradients_lie_in_the_buckets_is_told_to_all(own_pools):
    def run():
        model, optimizer = net_and_sgd()
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
