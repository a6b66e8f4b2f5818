"""Torch's element-wise optimizers are taken, others if their user says that they are; all else is refused by name."""

import pytest
import torch
from torch import nn
from toys import groups, parameters
from zoo import CASES, CODE, ELEMENT_WISE, HAVE_FUSED, History, Wrapper

from baguakit.optim import fuse
from baguakit.optim.fusion import fusion_of


@pytest.mark.parametrize(
    "case, code", [(case, code) for case in CASES for code in CODE if code != "fused" or case[0] in HAVE_FUSED]
)
def test_all_of_torch_that_is_element_wise_is_taken(case, code):
    kind, options = case
    assert type(fuse(kind(parameters(), **options, **CODE[code]))) is kind


class Subclass(torch.optim.Adam):
    pass


@pytest.mark.parametrize("kind", [*ELEMENT_WISE, Subclass, torch.optim.Adafactor, torch.optim.LBFGS])
def test_other_classes_are_taken_on_the_word_of_their_user(kind):
    optimizer = kind(parameters() if kind is torch.optim.LBFGS else groups(parameters()))
    with pytest.raises(ValueError, match=rf"^{kind.__name__} cannot be fused: [^\n]*elementwise=True[^\n]*$"):
        fuse(optimizer)
    assert fusion_of(optimizer) is None
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    assert fuse(optimizer, elementwise=True) is optimizer


def test_state_of_which_no_parameter_has_a_part():
    params = parameters()
    optimizer = fuse(History(params), elementwise=True)
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(TypeError, match="keeps 'history', a list"):
        optimizer.step()


def test_an_optimizer_around_another_steps_as_before():
    params, others = parameters(), parameters()
    optimizers = fuse(Wrapper(params), elementwise=True), Wrapper(others)
    for each in (params, others):
        for p in each:
            p.grad = torch.ones_like(p)
    for optimizer in optimizers:
        optimizer.step()
    assert all(map(torch.equal, params, others))


def test_other_refusals():
    with pytest.raises(TypeError, match="not Linear"):
        fuse(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="SGD cannot be fused with differentiable=True"):
        fuse(torch.optim.SGD(parameters(), differentiable=True))
    with pytest.raises(ValueError, match="leave out fused=True"):
        fuse(torch.optim.SGD(parameters(torch.bfloat16), fused=True))
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = fuse(torch.optim.SGD([table.weight, *parameters()]))
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match="sparse gradient"):
        optimizer.step()
