"""QAdam reads digits as well as Adam does: the test loss within 5 %, for five seeds."""

from pathlib import Path

import pytest
from pool import ranks

pytest.importorskip("sklearn")
PROGRAM = Path(__file__).parents[2] / "examples" / "digits.py"
STEPS, WARM_UP, LR = 400, 160, 0.003


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(5))
def test_qadam_reaches_the_loss_of_adam(seed):
    def run():
        import importlib.util
        import sys

        import torch
        import torch.distributed as dist
        from torch.nn.functional import cross_entropy

        import baguakit as bk

        spec = importlib.util.spec_from_file_location("digits", PROGRAM)
        digits = sys.modules["digits"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(digits)
        share, losses = digits.Digits(dist.get_rank(), dist.get_world_size()), {}
        for name in ("adam", "qadam"):
            torch.manual_seed(seed)
            model = digits.network()
            adam = name == "adam"
            optimizer = (torch.optim.Adam if adam else torch.optim.SGD)(model.parameters(), lr=LR)
            schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, STEPS)
            rule = bk.algorithms.gradient_allreduce() if adam else bk.algorithms.qadam(WARM_UP)
            with bk.attach(model, optimizer, rule):
                for images, labels in share.batches(STEPS, seed):
                    optimizer.zero_grad()
                    cross_entropy(model(images), labels).backward()
                    optimizer.step()
                    schedule.step()
            losses[name] = digits.loss(model, share)
        return losses

    losses = ranks(4, run, limit=500)[0]
    assert losses["qadam"] <= 1.05 * losses["adam"], losses
