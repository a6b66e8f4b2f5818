"""Optimizers that are not element-wise are refused by name, and the probe changes nothing."""

import contextlib
import copy
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from toys import alike, equal, groups, parameters
from zoo import CASES, CODE, ELEMENT_WISE, HAVE_FUSED, LAMB, LARS, NOT_ELEMENT_WISE, SGLD, Lion

from baguakit.optim import fuse, report, unfuse


def matrices():
    return [nn.Parameter(torch.randn(4, 5)), nn.Parameter(torch.randn(3, 4))]


@pytest.mark.parametrize("kind", NOT_ELEMENT_WISE)
def test_refused_by_name_in_one_sentence(kind):
    optimizer = kind(matrices())
    with pytest.raises(ValueError, match=rf"^{kind.__name__} cannot be fused: [^\n]*$"):
        fuse(optimizer)
    with pytest.raises(ValueError, match="not fused"):
        report(optimizer)
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize(
    "kind, reason", [(SGLD, "random numbers"), (LARS, "not element-wise"), (torch.optim.Muon, "2D")]
)
def test_the_reason_is_said(kind, reason):
    with pytest.raises(ValueError, match=reason):
        fuse(kind(matrices()))


@pytest.mark.parametrize(
    "case, code", [(case, code) for case in CASES for code in CODE if code != "fused" or case[0] in HAVE_FUSED]
)
def test_all_that_is_element_wise_is_accepted(case, code):
    kind, options = case
    assert type(fuse(kind(parameters(), **options, **CODE[code]))) is kind


@pytest.mark.parametrize("kind", ELEMENT_WISE)
def test_those_of_users_are_accepted(kind):
    assert type(fuse(kind(groups(parameters())))) is kind


def test_a_trust_ratio_hides_neither_behind_a_warm_up_nor_behind_a_decay_of_zero():
    for options in ({"lr": 0.0, "weight_decay": 0.1}, {"lr": 0.1, "weight_decay": 0.0}):
        with pytest.raises(ValueError, match="LAMB cannot be fused"):
            fuse(LAMB(matrices(), **options))


def test_a_group_is_looked_at_when_it_is_first_stepped():
    class Either(LARS):
        def update(self, p, g, state, group):
            if group.get("layerwise"):
                super().update(p, g, state, group)
            else:
                p.sub_(g, alpha=group["lr"])

    ours, more = parameters(), matrices()
    optimizer = fuse(Either(ours))
    optimizer.add_param_group({"params": more[:1]})
    for p in ours + more:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.add_param_group({"params": more[1:], "layerwise": True})
    was = [p.detach().clone() for p in ours + more]
    with pytest.raises(ValueError, match="Either cannot be fused"):
        optimizer.step()
    assert equal(ours + more, was)
    unfuse(optimizer).step()


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, Lion, SGLD, LAMB])
def test_the_probe_disturbs_nothing(kind):
    params = parameters()
    optimizer = kind(params)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    steps = []
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    everywhere = register_optimizer_step_post_hook(lambda *_: steps.append(2))
    before = (
        copy.deepcopy(optimizer.state_dict()),
        [p.detach().clone() for p in params],
        [p.grad.clone() for p in params],
    )
    chance = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with contextlib.suppress(ValueError):
        fuse(optimizer)
    everywhere.remove()
    assert alike(before[0], optimizer.state_dict())
    assert equal(before[1], params) and equal(before[2], [p.grad for p in params])
    assert torch.equal(chance[0], torch.get_rng_state())
    assert chance[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert steps == []


def test_a_scheduler_from_before_does_not_lead_the_probe_to_the_user():
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=1.0)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step)
    was = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["lr"] = 1.0
    fuse(optimizer)
    assert equal(params, was)


def test_other_refusals():
    with pytest.raises(TypeError, match="not Linear"):
        fuse(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="SGD cannot be fused with differentiable=True"):
        fuse(torch.optim.SGD(parameters(), differentiable=True))
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = fuse(torch.optim.SGD([table.weight, *parameters()]))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse gradient"):
        optimizer.step()
