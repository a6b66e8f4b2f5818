"""QAdam against Adam, which it is in its warm-up, and after any warm-up."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after
from training import flat, loss, net, train

import baguakit as bk


@pytest.mark.parametrize("n", [1, 3])
def test_qadam_in_its_warm_up_is_adam(n):
    def ours():
        return train(
            lambda bk: [bk.algorithms.qadam(warmup_steps=20)],
            20,
            optimizer=lambda ps: torch.optim.SGD(ps, lr=0.01, weight_decay=0.1),
        )

    models = [net() for _ in range(n)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1) for m in models]
    for step in range(20):
        for rank, m in enumerate(models):
            m.zero_grad()
            loss(m, rank, step).backward()
        for ps in zip(*(m.parameters() for m in models), strict=True):
            g = sum(p.grad for p in ps) / n
            for p in ps:
                p.grad = g.clone()
        for o in optimizers:
            o.step()
    for x in ranks(n, ours):
        torch.testing.assert_close(x, flat(models[0]), rtol=0, atol=2e-6)


def test_qadam_takes_the_step_sizes_and_decays_of_its_groups():
    """In the warm-up it is AdamW with the same groups; after it, a group without a step size stays where it is."""

    def groups(model):
        layers = list(model.children())
        return [
            {"params": layers[0].parameters(), "lr": 0.01, "weight_decay": 0.1},
            {"params": layers[2].parameters(), "lr": 0.002, "weight_decay": 0.0},
            {"params": layers[4].parameters(), "lr": 0.0, "weight_decay": 0.0},
        ]

    def run(name, steps=12):
        model = net()
        adam = name == "adam"
        rule = bk.algorithms.gradient_allreduce() if adam else bk.algorithms.qadam(warmup_steps=8)
        optimizer = (torch.optim.AdamW if adam else torch.optim.SGD)(groups(model), lr=0.1)
        early = None
        with bk.attach(model, optimizer, rule):
            for step in range(steps):
                early = flat(model) if step == 8 else early
                optimizer.zero_grad()
                loss(model, dist.get_rank(), step).backward()
                optimizer.step()
        return early, flat(model)

    for (qadam, later), (adam, _) in zip(ranks(2, run, "qadam"), ranks(2, run, "adam"), strict=True):
        torch.testing.assert_close(qadam, adam, rtol=0, atol=2e-6)
        assert torch.equal(later[-8:], flat(net())[-8:]) and not torch.equal(later, qadam)


@pytest.mark.parametrize("warmup_steps", slow_after(1, [2, 1, *range(3, 11)]))
def test_qadam_stays_finite_after_any_warm_up(warmup_steps):
    def run():
        return [
            train(
                lambda bk: [
                    bk.algorithms.qadam(
                        warmup_steps,
                        compressor=bk.compressors.MinMaxUInt8(block=64),
                        error_feedback=warmup_steps % 2 == 0,
                    )
                ],
                40,
                optimizer=lambda ps, seed=seed: torch.optim.SGD(ps, lr=0.003 * (1 + seed)),
            )
            for seed in range(2)
        ]

    results = ranks(2, run)
    for seed in range(2):
        assert torch.isfinite(results[0][seed]).all() and torch.equal(results[0][seed], results[1][seed])
        assert results[0][seed].norm() < 20
