"""Optimizers to be fused: torch's, and such as users write."""

from typing import ClassVar

import torch
from torch.optim import Optimizer

optim = torch.optim
CASES = [
    (optim.SGD, {}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.02}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.02, "maximize": True}),
    (optim.Adam, {}),
    (optim.Adam, {"amsgrad": True, "weight_decay": 0.02}),
    (optim.Adam, {"maximize": True, "weight_decay": 0.02, "decoupled_weight_decay": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"amsgrad": True, "maximize": True, "betas": (0.8, 0.95), "eps": 1e-5}),
    (optim.NAdam, {}),
    (optim.NAdam, {"weight_decay": 0.02, "momentum_decay": 0.01, "maximize": True}),
    (optim.NAdam, {"weight_decay": 0.02, "decoupled_weight_decay": True}),
    (optim.RAdam, {}),
    (optim.RAdam, {"weight_decay": 0.02, "maximize": True}),
    (optim.RAdam, {"weight_decay": 0.02, "decoupled_weight_decay": True}),
    (optim.Adamax, {}),
    (optim.Adamax, {"weight_decay": 0.02, "maximize": True}),
    (optim.RMSprop, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True, "weight_decay": 0.02}),
    (optim.RMSprop, {"momentum": 0.9, "maximize": True}),
    (optim.RMSprop, {"centered": True}),
    (optim.Rprop, {}),
    (optim.Rprop, {"etas": (0.4, 1.3), "step_sizes": (1e-5, 1.0), "maximize": True}),
    (optim.Adadelta, {}),
    (optim.Adadelta, {"rho": 0.8, "weight_decay": 0.02, "maximize": True}),
    (optim.Adagrad, {}),
    (optim.Adagrad, {"lr_decay": 0.01, "weight_decay": 0.02, "initial_accumulator_value": 0.1, "maximize": True}),
    (optim.ASGD, {}),
    (optim.ASGD, {"t0": 20.0, "lambd": 0.01, "alpha": 0.6, "weight_decay": 0.02, "maximize": True}),
]
CODE = {"for-loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
HAVE_FUSED = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)


def name(case):
    kind, options = case
    return "-".join([kind.__name__, *map(str, options)])


class Custom(Optimizer):
    """Base of the optimizers of users: `update` sees one parameter, its gradient, state and group."""

    options: ClassVar = {}

    def __init__(self, params, lr=0.01, **options):
        super().__init__(params, {"lr": lr, "weight_decay": 0.0, **self.options, **options})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss


class Lion(Custom):
    """Sign of an interpolated momentum; counts its steps in a plain number."""

    options: ClassVar = {"betas": (0.9, 0.99)}

    def update(self, p, g, state, group):
        if not state:
            state["step"], state["m"] = 0, torch.zeros_like(p)
        state["step"] += 1
        b1, b2 = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(state["m"].mul(b1).add(g, alpha=1 - b1).sign(), alpha=-group["lr"] / state["step"] ** 0.5)
        state["m"].mul_(b2).add_(g, alpha=1 - b2)


class OldStyle(Custom):
    """As optimizers used to be written: writes to gradients, makes its state and its weights anew every time."""

    def update(self, p, g, state, group):
        g.add_(p.data, alpha=0.01)
        state["m"] = g.clone() if "m" not in state else state["m"] * 0.9 + g
        p.data = p.data - group["lr"] * state["m"]


class KeepsGradients(Custom):
    """Remembers the latest gradient without a copy, which is safe where gradients are made anew."""

    def update(self, p, g, state, group):
        if "last" in state:
            p.sub_(g + 0.5 * (g - state["last"]), alpha=group["lr"])
        state["last"] = g


class MasterWeights(Custom):
    """float32 weights behind those of any dtype."""

    def update(self, p, g, state, group):
        if not state:
            state["master"], state["m"] = p.float().clone(), torch.zeros_like(p, dtype=torch.float32)
        state["m"].mul_(0.9).add_(g.float())
        state["master"].sub_(state["m"], alpha=group["lr"])
        p.copy_(state["master"])


class CountsInGroup(Custom):
    """Keeps numbers in its groups and itself, as schedule-free optimizers do."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, lr)
        self.steps = 0

    def step(self, closure=None):
        self.steps += 1
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)

    def update(self, p, g, state, group):
        if not state:
            state["z"] = p.clone()
        state["z"].sub_(g, alpha=group["lr"])
        p.lerp_(state["z"], 1 / (group["k"] + 1))


class LooksTwice(Custom):
    """Evaluates the closure a second time at another point (extra-gradient)."""

    @torch.no_grad()
    def step(self, closure):
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["was"] = p.clone()
                p.sub_(p.grad, alpha=group["lr"])
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["was"]).sub_(p.grad, alpha=group["lr"])
        return loss


ELEMENT_WISE = [Lion, OldStyle, KeepsGradients, MasterWeights, CountsInGroup]


class History(Custom):
    """Keeps a list of gradients."""

    def update(self, p, g, state, group):
        state.setdefault("history", []).append(g.clone())
        p.sub_(g, alpha=group["lr"])


class Wrapper(Custom):
    """Steps with an optimizer of its own, on the same groups."""

    def __init__(self, params):
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)
