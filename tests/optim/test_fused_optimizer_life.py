"""A fused optimizer is the user's own: whatever one does with an optimizer, it does."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from toys import Gradients, equal, groups, pair, parameters, same_state, train
from zoo import LooksTwice

from baguakit.optim import fuse
from baguakit.optim.fusion import fusion_of


def test_the_object_stays_the_same():
    optimizer = torch.optim.SGD(parameters(), momentum=0.9)
    keys, step = set(vars(optimizer)), optimizer.step
    assert fuse(optimizer) is optimizer and type(optimizer) is torch.optim.SGD
    assert set(vars(optimizer)) == keys and optimizer.step == step
    assert torch.optim.SGD.step is type(optimizer).step


@pytest.mark.parametrize("through", ["memory", "disk"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, torch.optim.NAdam])
def test_checkpoints_of_either_kind_load_into_the_other(kind, through):
    """Saved in one kind, loaded into the other, and back, in mid-training: the run that was never interrupted."""

    def load(state, optimizer):
        if through == "disk":
            file = io.BytesIO()
            torch.save(state, file)
            state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        optimizer.load_state_dict(state)

    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    ours, theirs, fused, plain = pair(kind, **options)
    gradients = Gradients()
    train(5, gradients, ours, theirs, fused, plain)
    fresh = fuse(kind(groups(ours), **options)), kind(groups(theirs), **options)
    load(plain.state_dict(), fresh[0])
    load(fused.state_dict(), fresh[1])
    train(5, gradients, ours, theirs, *fresh)
    load(fresh[0].state_dict(), fused)
    load(fresh[1].state_dict(), fused)
    load(fresh[0].state_dict(), plain)
    train(5, gradients, ours, theirs, fused, plain)
    assert equal(ours, theirs) and same_state(fused, plain)


@pytest.mark.parametrize("first", ["scheduler", "fuse"])
def test_schedulers(first):
    ours, theirs = parameters(), parameters()
    fused, plain = torch.optim.SGD(groups(ours), momentum=0.9), torch.optim.SGD(groups(theirs), momentum=0.9)
    if first == "fuse":
        fuse(fused)
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20) for o in (fused, plain)]
    fuse(fused)
    gradients = Gradients()
    for _ in range(19):
        train(1, gradients, ours, theirs, fused, plain)
        for scheduler in schedulers:
            scheduler.step()
    assert equal(ours, theirs) and same_state(fused, plain)
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()


@pytest.mark.parametrize("first", ["hooks", "fuse"])
def test_hooks_see_the_users_parameters(first):
    """Pre-hooks may change gradients, post-hooks weights; both find the optimizer as it is."""
    ours, theirs = parameters(), parameters()
    fused, plain = torch.optim.Adam(groups(ours)), torch.optim.Adam(groups(theirs))
    seen = []

    def before(optimizer, args, kwargs):
        seen.append([p for group in optimizer.param_groups for p in group["params"]])
        nn.utils.clip_grad_norm_(seen[-1], 0.5)

    def after(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.mul_(0.99)

    for optimizer in (fused, plain):
        if first == "fuse" and optimizer is fused:
            fuse(fused)
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(after)
    fuse(fused)
    train(10, Gradients(), ours, theirs, fused, plain)
    assert equal(ours, theirs) and same_state(fused, plain)
    assert {id(p) for p in seen[0]} == {id(p) for p in ours}


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_model_trained_as_models_are(set_to_none):
    """zero_grad, accumulation, clipping, frozen and shared layers, channels_last, schedules of who is trained."""

    def trained(prepare):
        torch.manual_seed(0)
        shared = nn.Linear(6, 6)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Flatten(2), nn.LazyLinear(6), shared, nn.Tanh(), shared)
        model(torch.zeros(1, 3, 5, 5))
        model.to(memory_format=torch.channels_last)
        model[0].bias.requires_grad_(False)
        optimizer = prepare(torch.optim.RAdam(model.parameters(), lr=0.01))
        draw = torch.Generator().manual_seed(0)
        for step in range(20):
            if step == 10:
                model[0].bias.requires_grad_(True)
            for _ in range(2):
                model(torch.randn(2, 3, 5, 5, generator=draw)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        return list(model.parameters()), optimizer

    (ours, fused), (theirs, plain) = trained(fuse), trained(lambda optimizer: optimizer)
    assert equal(ours, theirs) and same_state(fused, plain)


def test_groups_added_later_and_changed_by_hand():
    ours, theirs, fused, plain = pair()
    gradients = Gradients(absent=False)
    train(3, gradients, ours, theirs, fused, plain)
    more = (
        [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))],
        [nn.Parameter(torch.ones(3)) for _ in range(2)],
    )
    more[1][1] = nn.Parameter(torch.ones(2, 2))
    for optimizer, extra in ((fused, more[0]), (plain, more[1])):
        optimizer.add_param_group({"params": extra, "lr": 0.1})
    train(3, gradients, ours + more[0], theirs + more[1], fused, plain)
    for optimizer in (fused, plain):  # as those do who grow and prune
        old = optimizer.param_groups[0]["params"].pop(1)
        optimizer.param_groups[1]["params"].append(old)
        optimizer.state[optimizer.param_groups[0]["params"][0]].clear()
        optimizer.param_groups[1]["weight_decay"] = 0.3
        optimizer.state[optimizer.param_groups[1]["params"][2]]["step"].fill_(40.0)
        optimizer.state[optimizer.param_groups[1]["params"][0]]["exp_avg"].zero_()
    train(3, gradients, ours + more[0], theirs + more[1], fused, plain)
    assert equal(ours + more[0], theirs + more[1]) and same_state(fused, plain)


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=str)
def test_gradient_scaling(options):
    """With `fused=True` the step itself unscales, and skips where a gradient is infinite; it does so only once."""
    ours, theirs, fused, plain = pair(torch.optim.Adam, **options)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3) for _ in range(2)]
    gradients = Gradients()
    for step in range(12):
        gradients.give(ours, theirs)
        for params, optimizer, scaler in ((ours, fused, scalers[0]), (theirs, plain, scalers[1])):
            scaler.scale(torch.zeros(()))
            for p in params:
                if p.grad is not None:
                    p.grad.mul_(scaler.get_scale())
            if step == 5:
                params[0].grad = torch.full_like(params[0], torch.inf)
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        assert equal([p.grad for p in ours if p.grad is not None], [p.grad for p in theirs if p.grad is not None])
    assert scalers[0].get_scale() == scalers[1].get_scale()
    if options:  # torch's fused kernels round the last few values of a tensor otherwise
        assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(ours, theirs, strict=True))
    else:
        assert equal(ours, theirs) and same_state(fused, plain)
    steps = [{float(s["step"]) for s in o.state.values()} for o in (fused, plain)]
    assert steps[0] == steps[1] and max(steps[0]) == 11


@pytest.mark.parametrize("kind", [torch.optim.SGD, LooksTwice])
def test_closures(kind):
    def trained(prepare):
        params = parameters()
        optimizer = prepare(kind(params, lr=0.01))
        losses = []

        def closure():
            optimizer.zero_grad()
            loss = sum((p * p.detach().cos() - 1).square().sum() for p in params)
            loss.backward()
            return loss

        for _ in range(10):
            losses.append(float(optimizer.step(closure).detach()))
        return params, losses, optimizer

    (ours, mine, fused), (theirs, others, plain) = trained(lambda o: fuse(o, elementwise=True)), trained(lambda o: o)
    assert equal(ours, theirs) and mine == others and same_state(fused, plain)


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
def test_a_copy_is_an_ordinary_optimizer(way):
    ours, theirs, fused, plain = pair(torch.optim.SGD, momentum=0.9)
    gradients = Gradients()
    train(3, gradients, ours, theirs, fused, plain)
    if way == "deepcopy":
        params, twin = copy.deepcopy((ours, fused))
    else:
        params, twin = pickle.loads(pickle.dumps((ours, fused)))
    assert fusion_of(twin) is None
    for _ in range(3):
        gradients.give(ours, theirs, params)
        for optimizer in (fused, plain, twin):
            optimizer.step()
    assert equal(ours, theirs) and equal(params, theirs) and same_state(twin, plain)


def test_a_step_that_fails_is_no_step():
    ours, theirs, fused, plain = pair()
    gradients = Gradients(absent=False)
    train(2, gradients, ours, theirs, fused, plain)
    was = [p.detach().clone() for p in ours]
    fused.param_groups[1]["lr"] = None
    with pytest.raises(TypeError):
        fused.step()
    assert equal(ours, was)
    fused.param_groups[1]["lr"] = plain.param_groups[1]["lr"]
    fused.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(2, gradients, ours, theirs, fused, plain)
    assert equal(ours, theirs) and same_state(fused, plain)
