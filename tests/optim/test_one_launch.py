"""torch's SGD, Adam and AdamW, stepped by one launch: what CUDA tensors take, shown of CPU tensors taken for them."""

import copy

import pytest
import torch
from torch import nn
from toys import Gradients, alike, pair, parameters, train

from baguakit.kernels.steps import operators as steps_ops
from baguakit.optim import fuse, fusion, report, unfuse

COVERED = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"weight_decay": 0.02}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.02}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"weight_decay": 0.02}),
    (torch.optim.Adam, {"decoupled_weight_decay": True}),
    (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-5}),
    (torch.optim.AdamW, {"foreach": True}),
]
ULPS = 16 * 2.0**-24


@pytest.fixture
def launched(monkeypatch) -> list[int]:
    """Launch steps of CPU tensors too; return a list that grows by the number of tensors of each launch."""
    sizes: list[int] = []
    step_ = steps_ops.step_

    def counted(rule, roles, *rest):
        sizes.append(len(roles["p"]))
        step_(rule, roles, *rest)

    monkeypatch.setattr(steps_ops, "step_", counted)
    monkeypatch.setattr(fusion, "is_launched", lambda p: True)
    return sizes


def close(ours, theirs, steps) -> bool:
    """Within a few roundings a step, of numbers of a size of about one."""
    return all(((a - b).abs() <= steps * ULPS * (1 + b.abs().max())).all() for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("kind, options", COVERED, ids=str)
def test_they_are_torchs(kind, options, launched):
    ours, theirs, fused, plain = pair(kind, **{"lr": 0.01, **options})
    gradients = Gradients()
    launched.clear()
    train(40, gradients, ours, theirs, fused, plain)
    assert launched and close([p.detach() for p in ours], [p.detach() for p in theirs], 40)
    a, b = fused.state_dict(), plain.state_dict()
    assert a["state"].keys() == b["state"].keys() and alike(a["param_groups"], b["param_groups"])
    for index, state in b["state"].items():
        assert state.keys() == a["state"][index].keys()
        assert all(a["state"][index][key].dtype == x.dtype for key, x in state.items())
        assert a["state"][index].get("step", 0) == state.get("step", 0)
        kept = [key for key in state if key != "step"]
        assert close([a["state"][index][key] for key in kept], [state[key] for key in kept], 40)


def test_one_launch_for_each_group_whatever_is_in_it(launched):
    """Flat tensors, a large tensor apart and one without dimensions go together."""
    params = [*parameters(), nn.Parameter(torch.zeros(5000)), *parameters(seed=1)]
    optimizer = fuse(torch.optim.AdamW([{"params": params[:11]}, {"params": params[11:], "lr": 0.1}]))
    launched.clear()
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert len(launched) == 6 and report(optimizer).apart > 0


def test_what_is_not_covered_keeps_its_own_code(launched):
    class Own(torch.optim.Adam):
        pass

    left = [
        Own(parameters()),
        torch.optim.NAdam(parameters()),
        torch.optim.Adam(parameters(), amsgrad=True),
        torch.optim.SGD(parameters(), maximize=True, lr=0.5),
        torch.optim.AdamW(parameters(), fused=True),
        torch.optim.SGD(parameters(torch.float64)),
        torch.optim.SGD(parameters(torch.bfloat16), lr=0.5),
    ]
    for optimizer in left:
        fuse(optimizer, elementwise=True)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        was = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        optimizer.step()
        assert not any(map(torch.equal, optimizer.param_groups[0]["params"], was))
    assert launched == []


def test_on_cpus_nothing_is_launched(monkeypatch):
    monkeypatch.setattr(steps_ops, "step_", None)
    params = parameters()
    optimizer = fuse(torch.optim.AdamW(params))
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()


def test_a_checkpoint_goes_over_to_torchs_own_and_back(launched):
    ours, theirs, fused, plain = pair(torch.optim.AdamW, lr=0.01)
    gradients = Gradients(absent=False)
    for step in range(12):
        if step == 6:
            plain.load_state_dict(copy.deepcopy(fused.state_dict()))  # torch keeps the tensors that it is given
            fused.load_state_dict(copy.deepcopy(plain.state_dict()))
        if step == 9:
            unfuse(fused)
        gradients.give(ours, theirs)
        fused.step()
        plain.step()
    assert close([p.detach() for p in ours], [p.detach() for p in theirs], 12)


def test_a_rate_may_be_a_tensor(launched):
    ours, theirs = parameters(), parameters()
    fused = fuse(torch.optim.Adam(ours, lr=torch.tensor(0.01), foreach=False))
    plain = torch.optim.Adam(theirs, lr=torch.tensor(0.01), foreach=False)
    train(5, Gradients(), ours, theirs, fused, plain)
    assert launched and close([p.detach() for p in ours], [p.detach() for p in theirs], 5)
