"""QAdam reads printed digits as well as Adam does: the test loss within 5 %, for five seeds."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from torch.nn.functional import cross_entropy

import baguakit as bk
from baguakit.compare.digits import Digits, evaluate, network

STEPS, WARM_UP, LR = 400, 160, 0.003


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_qadam_reaches_the_loss_of_adam(seed):
    def run():
        share, losses = Digits(dist.get_rank(), dist.get_world_size()), {}
        for name in ("adam", "qadam"):
            model = network(seed)
            adam = name == "adam"
            optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=LR)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, STEPS)
            rule = bk.algorithms.gradient_allreduce() if adam else bk.algorithms.qadam(WARM_UP)
            with bk.attach(model, optimizer, rule):
                for _, (images, labels) in zip(range(STEPS), share.batches(seed), strict=False):
                    optimizer.zero_grad()
                    cross_entropy(model(images), labels).backward()
                    optimizer.step()
                    schedule.step()
            losses[name] = evaluate(model, share)[0]
        return losses

    losses = ranks(4, run, limit=500)[0]
    assert losses["qadam"] <= 1.05 * losses["adam"], losses
