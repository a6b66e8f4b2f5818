"""Outer optimizers that count their steps resume, in other buckets too, where parameters are scalars or empty."""

import pytest
import torch
import torch.distributed as dist
from pool import ranks
from tiers import slow_after
from torch import nn

import baguakit as bk

SHAPES = [[(), (3, 4)], [(3, 4), ()], [(), ()], [(3,), (0,)], [(0, 4), (3, 2), (), (0,)]]


def trained(shapes, optimizer, stops, cuts, older):
    """Return the weights after seven steps, taken up at each of `stops` by a new attachment with the next of `cuts`."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    state, options = None, {"lr": 0.1}
    for i, (start, stop) in enumerate(zip((0, *stops), (*stops, 7), strict=True)):
        rule = bk.algorithms.diloco(2, optimizer, **options)
        with bk.attach(model, inner, rule, broadcast=False, bucket_bytes=cuts[i % len(cuts)]) as att:
            if state is not None:
                if older:  # which did not say
                    state["rules"]["0"].pop("whole")
                att.load_state_dict(state)
            for step in range(start, stop):
                inner.zero_grad()
                sum(((p - dist.get_rank() - step) ** 2).sum() for p in model).backward()
                inner.step()
            state = att.state_dict()
    return torch.cat([p.detach().flatten() for p in model])


@pytest.mark.parametrize("optimizer", slow_after(1, [torch.optim.Adam, torch.optim.RMSprop, torch.optim.NAdam]))
def test_they_resume_in_any_buckets(optimizer):
    def run():
        for shapes in SHAPES:
            whole = trained(shapes, optimizer, (), (1 << 20,), False)
            for cuts, older in (((1 << 20, 1), False), ((1 << 20,), True), ((1, 1 << 20), True)):
                if older and optimizer is torch.optim.NAdam and shapes == [(), ()]:
                    continue  # its mu_product cannot be told from a moment
                assert torch.equal(whole, trained(shapes, optimizer, (3, 5), cuts, older)), (shapes, cuts, older)

    ranks(2, run)
