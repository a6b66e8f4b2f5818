"""The code that steps the flat tensors of an optimizer: one launch, or the optimizer's own.

On CUDA, torch's own SGD, Adam and AdamW are stepped by one launch for all tensors of a group that have taken as many
steps, the large ones that are stepped apart included. Whatever that does not cover is left to the optimizer's own
code: other classes (subclasses, too), tensors that are not plain fp32, and the options amsgrad, capturable, fused,
differentiable and maximize. The state stays in torch's terms and places.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from ..kernels.operators import is_dense
from .flat import PLAIN, OptimizerState
from .steps import adam_step_, adamw_step_, sgd_step_

Groups = list[dict[str, Any]]
NOT_COVERED = ("amsgrad", "capturable", "fused", "differentiable", "maximize")
OURS = {"momentum_buffer"}, {"exp_avg", "exp_avg_sq", "step"}  # the states of SGD, and of Adam


def step_in_launches(kind: type[Optimizer], groups: Groups, state: OptimizerState) -> None:
    """Step what launches can of groups for an optimizer of class `kind`, and take it out of them."""
    for group in groups if kind in (SGD, Adam, AdamW) else ():
        # Options are plain numbers, except the rate, which may lie on a device.
        options = [*group.get("betas", ()), group.get("momentum", 0), group.get("dampening", 0), group["weight_decay"]]
        if any(group.get(option) for option in NOT_COVERED) or any(isinstance(x, Tensor) for x in options):
            continue
        together: dict[tuple[torch.device, int], list[Tensor]] = defaultdict(list)
        for p in group["params"]:
            if _is_ours(p, state.get(p, {}), _adam(group)):
                together[p.device, _taken(p, state, group)].append(p)
        for (_, taken), params in together.items():
            _step(params, taken, group, state)
        done = {p for params in together.values() for p in params}
        group["params"][:] = [p for p in group["params"] if p not in done]


def is_launched(p: Tensor) -> bool:
    """Return whether the device of a parameter is one on which kernels step it."""
    return p.is_cuda


def _adam(group: dict[str, Any]) -> bool:
    return "betas" in group


def _is_ours(p: Tensor, known: dict[str, Any], adam: bool) -> bool:
    g = p.grad
    if g is None or not is_launched(p) or not p.numel():
        return False
    tensors = [p, g, *(x for key, x in known.items() if key != "step" and x is not None)]
    return known.keys() <= OURS[adam] and all(
        type(x) in PLAIN
        and x.dtype == torch.float32
        and x.layout is torch.strided
        and (x.shape, x.stride(), x.device) == (p.shape, p.stride(), p.device)
        and is_dense(x)
        for x in tensors
    )


def _taken(p: Tensor, state: OptimizerState, group: dict[str, Any]) -> int:
    """Return the number of steps that a parameter has taken (SGD: 0 or 1); make its state if there is none."""
    if not _adam(group) and not group["momentum"]:
        return 1
    known = state[p]
    if not _adam(group):
        if known.get("momentum_buffer") is not None:
            return 1
        known["momentum_buffer"] = torch.zeros_like(p)
        return 0
    if not known:
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        known["step"] = torch.tensor(0.0, dtype=dtype, device="cpu")
        known["exp_avg"], known["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    return int(known["step"])


def _step(params: Sequence[Tensor], taken: int, group: dict[str, Any], state: OptimizerState) -> None:
    """Step parameters that have all taken `taken` steps."""
    g = [p.grad for p in params if p.grad is not None]
    if _adam(group):
        step = adamw_step_ if group.get("decoupled_weight_decay") else adam_step_
        m, v = ([state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        step(params, g, m, v, taken, **options)
        for p in params:
            state[p]["step"] += 1
    else:
        b = [state[p]["momentum_buffer"] for p in params] if group["momentum"] else None
        options = {name: group[name] for name in ("lr", "momentum", "dampening", "nesterov", "weight_decay")}
        sgd_step_(params, g, b, taken, **options)
