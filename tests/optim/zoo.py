"""Optimizers to be fused, and optimizers to be refused: torch's, and such as users write."""

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


class LARS(Custom):
    """A rate for each layer, from norms of its weights and gradients."""

    def update(self, p, g, state, group):
        d = g + group["weight_decay"] * p
        p.sub_(d * (0.01 * p.norm() / d.norm()), alpha=group["lr"])


class LARSOfMatrices(Custom):
    """Leaves vectors alone, so that only a matrix tells."""

    def update(self, p, g, state, group):
        p.sub_(g * (p.norm() / g.norm()) if p.dim() > 1 else g, alpha=group["lr"])


class LAMB(Custom):
    """Adam with a trust ratio where there is weight decay."""

    def update(self, p, g, state, group):
        if not state:
            state["step"], state["m"], state["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        state["m"].lerp_(g, 0.1)
        state["v"].lerp_(g * g, 0.01)
        d = state["m"] / (state["v"].sqrt() + 1e-6) + group["weight_decay"] * p
        trust = p.norm() / d.norm() if group["weight_decay"] else 1
        p.sub_(d * trust, alpha=group["lr"])


class Shampoo(Custom):
    """A preconditioner for each dimension."""

    def update(self, p, g, state, group):
        for i, n in enumerate(p.shape):
            rows = g.transpose(0, i).reshape(n, -1)
            state[f"L{i}"] = state.get(f"L{i}", torch.eye(n)) + rows @ rows.T
            g = torch.linalg.solve(state[f"L{i}"], rows).reshape(g.transpose(0, i).shape).transpose(0, i)
        p.sub_(g, alpha=group["lr"])


class Centralized(Custom):
    """Takes the mean of every row from the gradient."""

    def update(self, p, g, state, group):
        p.sub_(g - g.mean(-1, keepdim=True), alpha=group["lr"])


class History(Custom):
    """Keeps a list of gradients."""

    def update(self, p, g, state, group):
        state.setdefault("history", []).append(g.clone())
        p.sub_(g, alpha=group["lr"])


class ByOrder(Custom):
    """Another rate for each parameter, by its number."""

    def step(self, closure=None):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                p.data.sub_(p.grad, alpha=group["lr"] / (i + 1))


class HoldsParameters(Custom):
    """Steps the parameters that it was made with, whatever its groups hold."""

    def __init__(self, params):
        self.held = list(params)
        super().__init__(self.held)

    def step(self, closure=None):
        for group in self.param_groups:
            for p in self.held:
                p.data.sub_(p.grad, alpha=group["lr"])


class Wrapper(Custom):
    """Steps with an optimizer of its own, on the same groups."""

    def __init__(self, params):
        super().__init__(params)
        self.inner = torch.optim.SGD(self.param_groups, lr=0.1)
        self.param_groups = self.inner.param_groups

    def step(self, closure=None):
        return self.inner.step(closure)


class SGLD(Custom):
    """SGD with noise."""

    def update(self, p, g, state, group):
        p.sub_(g, alpha=group["lr"]).add_(torch.randn_like(p), alpha=group["lr"] ** 0.5)


NOT_ELEMENT_WISE = [
    LARS,
    LARSOfMatrices,
    LAMB,
    Shampoo,
    Centralized,
    History,
    ByOrder,
    HoldsParameters,
    Wrapper,
    SGLD,
    optim.Adafactor,
    optim.Muon,
    optim.LBFGS,
    optim.SparseAdam,
]
