"""The memory of a fused optimizer: weights stay in place, states lie together, and nothing else is held for long."""

import gc
import weakref

import pytest
import torch
from torch import nn
from toys import Gradients, alike, equal, groups, pair, parameters, report, same_state, train

from baguakit.optim import fuse, unfuse
from baguakit.optim.fusion import CALM


def test_parameters_stay_where_they_are():
    ours, theirs, fused, plain = pair()
    places = [p.data_ptr() for p in ours]
    train(3, Gradients(), ours, theirs, fused, plain)
    assert places == [p.data_ptr() for p in ours]
    assert all(p.untyped_storage().nbytes() == p.nbytes for p in ours)


def test_each_parameter_counts_for_itself():
    """The state that a user sees of one parameter shares nothing that a step of another would change."""
    ours, _, fused, _ = pair()
    Gradients(absent=False).give(ours)
    fused.step()
    loaded = torch.optim.AdamW(groups(ours))
    loaded.load_state_dict(fused.state_dict())
    Gradients(absent=False).give(ours)
    loaded.step()
    assert all(float(state["step"]) == 2 for state in loaded.state.values())


def test_weights_from_elsewhere():
    """load_state_dict in place and by assignment, .data swapped, another dtype and back: the step sees them all."""

    def trained(prepare):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2))
        saved = {key: x.clone() for key, x in model.state_dict().items()}
        optimizer = prepare(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        averaged = [p.detach().clone() for p in model.parameters()]

        def step():
            optimizer.zero_grad()
            model(torch.ones(2, 4, dtype=model[0].weight.dtype)).square().sum().backward()
            optimizer.step()

        step()
        model.load_state_dict(saved)
        step()
        for p, x in zip(model.parameters(), averaged, strict=True):
            p.data, x.data = x.data, p.data
        step()
        optimizer.zero_grad()
        model.double()
        optimizer.load_state_dict(optimizer.state_dict())
        step()
        for p in model.parameters():
            p.data = p.data.t().contiguous().t() if p.dim() == 2 else p.data.clone()
        step()
        return list(model.parameters()), optimizer

    (ours, fused), (theirs, plain) = trained(fuse), trained(lambda optimizer: optimizer)
    assert equal(ours, theirs) and same_state(fused, plain)


def test_parameters_that_share_memory_are_stepped_in_turn():
    def trained(prepare):
        params = parameters()
        params[2].data = params[0].data.repeat(5)[:33]
        params[0].data = params[2].data[:7]
        optimizer = prepare(torch.optim.Adam(params))
        gradients = Gradients(absent=False)
        for _ in range(5):
            gradients.give(params)
            optimizer.step()
        return params

    assert equal(trained(fuse), trained(lambda optimizer: optimizer))


def test_state_that_other_processes_share_stays_where_it_is():
    ours = parameters()
    optimizer = torch.optim.Adagrad(ours)
    optimizer.share_memory()
    places = [s["sum"].data_ptr() for s in optimizer.state.values()]
    fuse(optimizer)
    Gradients(absent=False).give(ours)
    optimizer.step()
    assert places == [s["sum"].data_ptr() for s in optimizer.state.values()]


def test_weights_that_lie_one_after_another_stay_where_they_are():
    flat = torch.arange(60.0)
    ours = [nn.Parameter(x) for x in flat.split(20)]
    theirs = [nn.Parameter(x.clone()) for x in flat.split(20)]
    fused, plain = fuse(torch.optim.Adam(ours)), torch.optim.Adam(theirs)
    kept = ours[1] * ours[1]
    train(3, Gradients(absent=False), ours, theirs, fused, plain)
    assert equal(ours, theirs) and torch.equal(flat, torch.cat([p.detach() for p in theirs]))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_unfusing_leaves_every_parameter_a_state_of_its_own():
    ours, theirs, fused, plain = pair()
    train(3, Gradients(), ours, theirs, fused, plain)
    unfuse(fused)
    assert not fused._optimizer_step_pre_hooks and not fused._optimizer_step_post_hooks
    assert all(x.untyped_storage().nbytes() == x.nbytes for s in fused.state.values() for x in s.values())
    assert alike(fused.state_dict(), plain.state_dict())
    assert unfuse(fused) is fused


def test_groups_are_laid_out_again_when_the_same_have_been_absent_for_some_steps():
    """Adam counts steps by parameter; those that have come to differ are brought together where they are equal."""
    ours, theirs = ([nn.Parameter(torch.ones(3)) for _ in range(40)] for _ in range(2))
    fused, plain = fuse(torch.optim.Adam(ours)), torch.optim.Adam(theirs)

    def step(absent=()):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad, q.grad = (None, None) if i in absent else (torch.ones(3), torch.ones(3))
        fused.step()
        plain.step()

    step()
    assert report(fused).flats == 1
    for absent in (range(0, 40, 2), range(5), ()):  # it changes from step to step: all are stepped apart
        step(absent)
        assert (report(fused).flats, report(fused).absent) == (0, len(absent))
    for _ in range(CALM - 1):
        step()
        assert (report(fused).flats, report(fused).apart) == (0, 40)
    step()
    (layout,) = report(fused).layouts
    for _ in range(2):
        step()
        assert report(fused).flats == 3 and report(fused).together == 40 and report(fused).layouts == [layout]
    assert equal(ours, theirs) and same_state(fused, plain)


def test_gradients_are_not_held():
    ours, _, fused, _ = pair()
    Gradients(absent=False).give(ours)
    held = [weakref.ref(p.grad) for p in ours]
    fused.step()
    fused.zero_grad()
    gc.collect()
    assert [ref() for ref in held] == [None] * len(ours)


def test_state_left_behind_does_not_hold_on_to_flat_tensors():
    ours, theirs, fused, plain = pair()
    gradients = Gradients(absent=False)
    train(2, gradients, ours, theirs, fused, plain)
    for optimizer in (fused, plain):
        optimizer.state[optimizer.param_groups[0]["params"][0]]["step"] += 1
    train(1, gradients, ours, theirs, fused, plain)
    alone = fused.state[ours[0]]["exp_avg"]
    assert alone.untyped_storage().nbytes() == alone.nbytes
    assert equal(ours, theirs) and same_state(fused, plain)
