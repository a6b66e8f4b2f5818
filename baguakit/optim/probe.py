"""Finds out whether an optimizer is element-wise: toy tensors stepped apart and together must agree.

The toys are stepped by copies of the optimizer that hold toys wherever it holds parameters; its own parameters, state
and hooks are not touched, and no random number generator is moved.
"""

import inspect
import math
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .chance import undisturbed
from .members import local
from .memory import NUMBERS, Unfit, is_elementwise

SHAPES = ((7,), (5, 3), (16,), (4, 2, 3), (1,), (3, 8))
STEPS = 12
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "weight_decay")
Step = Callable[..., Any]


def own_step(kind: type[Optimizer]) -> Step:
    """The `step` of a class, without the hooks that torch has wrapped around it."""
    step: Step = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def check_element_wise(optimizer: Optimizer, together: Callable[[Optimizer], Step]) -> None:
    """Raise ValueError unless toys stepped apart and `together` agree, that being how an optimizer is to be stepped."""
    name = type(optimizer).__name__
    if optimizer.defaults.get("differentiable"):
        raise ValueError(f"{name} cannot be fused with differentiable=True: autograd follows each parameter by itself")
    try:
        with undisturbed(_devices(optimizer)) as chance, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            difference = _difference(optimizer, together)
    except Unfit as error:
        raise ValueError(f"{name} cannot be fused: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{name} cannot be fused: it fails on toy tensors of several shapes ({type(error).__name__}: {error})"
        ) from error
    if chance.was_taken:
        raise ValueError(f"{name} cannot be fused: it draws random numbers, and would draw others for flat tensors")
    if difference is not None:
        raise ValueError(
            f"{name} cannot be fused: it is not element-wise, since tensors stepped together move otherwise than "
            f"apart ({difference}); leave it as it is"
        )


def _devices(optimizer: Optimizer) -> set[torch.device]:
    return {group["params"][0].device for group in optimizer.param_groups if group["params"]}


def _difference(optimizer: Optimizer, together: Callable[[Optimizer], Step]) -> str | None:
    """Return the difference between toys stepped apart and together; None if there is none."""
    try:
        return _compared(optimizer, together, with_state=False)
    except KeyError:  # a class that makes its state when it is constructed
        return _compared(optimizer, together, with_state=True)


def _compared(optimizer: Optimizer, together: Callable[[Optimizer], Step], with_state: bool) -> str | None:
    apart, fused = toy(optimizer, with_state), toy(optimizer, with_state)
    kind = type(optimizer)
    step, fused_step = own_step(kind), together(fused)
    closure = (_nothing,) if _needs_closure(step) else ()
    start, reach = [p.detach().clone() for p in _params(apart)], Reach()
    for i in range(STEPS):
        for toys in (apart, fused):
            _give_gradients(toys, i)
        step(apart, *closure)
        fused_step(*closure)
        for a, b, origin in zip(_params(apart), _params(fused), start, strict=True):
            if not reach.close((a, "weights"), a.detach() - origin, b.detach() - origin, a):
                return f"weights of shape {tuple(a.shape)} at step {i + 1}"
            if difference := _state_differs(reach, a, apart.state.get(a, {}), fused.state.get(b, {})):
                return f"the state {difference!r} of shape {tuple(a.shape)} at step {i + 1}"
    return None


class Reach:
    """How far from zero numbers have come so far, each under a key: the scale for what roundings may have made."""

    def __init__(self) -> None:
        self.farthest: dict[Any, float] = {}

    def close(self, key: Any, a: Tensor, b: Tensor, rounded: Tensor) -> bool:
        """Whether a and b are equal up to roundings, those of `rounded` and of sums over all parameters."""
        eps = torch.finfo(a.dtype).eps
        self.farthest[key] = max(self.farthest.get(key, 0.0), float(a.abs().max()))
        far = math.sqrt(eps) * self.farthest[key] + 8 * eps * float(rounded.detach().abs().max())
        return torch.allclose(a, b, rtol=0, atol=far, equal_nan=True)


def _state_differs(reach: Reach, p: Tensor, a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """The first key under which two states differ."""
    if a.keys() != b.keys():
        return sorted(map(str, a.keys() ^ b.keys()))[0]
    for key, x in a.items():
        y = b[key]
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape:
            same = reach.close((p, key), x, y, x) if x.is_floating_point() else torch.equal(x, y)
        else:
            same = isinstance(x, NUMBERS) and type(x) is type(y) and bool(x == y)
        if not same:
            return key
    return None


def _needs_closure(step: Step) -> bool:
    parameters = list(inspect.signature(step).parameters.values())[1:]
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _nothing() -> Tensor:
    return torch.zeros(())


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def toy(optimizer: Optimizer, with_state: bool = False) -> Optimizer:
    """A copy of an optimizer with toys for parameters: the same attributes and options, but a rate worth looking at.

    `with_state` gives each toy a state made of pieces of that of a parameter in the same group.
    """
    copy: Optimizer = object.__new__(type(optimizer))
    state: Any = defaultdict(dict)
    groups: list[dict[str, Any]] = []
    # Whatever else holds a parameter (an optimizer inside this one) must come to hold a toy.
    memo: dict[int, Any] = {id(optimizer): copy, id(optimizer.state): state, id(optimizer.param_groups): groups}
    kinds: set[str] = set()
    for group in optimizer.param_groups:
        options = {key: x for key, x in group.items() if key not in ("params", "param_names")}
        kind = repr(sorted((key, repr(x)) for key, x in options.items() if key not in RATES))
        toys = _toys(group["params"], SHAPES[1:2] if kind in kinds else SHAPES)  # many groups differ in rate only
        kinds.add(kind)
        memo.update((id(p), toys[i % len(toys)]) for i, p in enumerate(group["params"]))
        groups.append({"params": toys, **_lively(deepcopy(options, memo))})
        memo[id(group)] = groups[-1]
        if with_state:
            _give_state(toys, group["params"], optimizer.state, state)
    ours = ("state", "param_groups", "step")  # a scheduler's `step` would step its own optimizer
    for name, value in vars(optimizer).items():
        hooks = name.startswith("_optimizer_") and name.endswith("_hooks")
        if hooks or name not in ours:
            vars(copy)[name] = OrderedDict() if hooks else deepcopy(value, memo)
    copy.state, copy.param_groups = state, groups
    return copy


def _toys(params: list[Tensor], shapes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
    like = local(params[0]) if params else torch.empty(0)
    toys = []
    for i, shape in enumerate(shapes):
        values = torch.sin(1 + i + 1.7 * torch.arange(math.prod(shape), dtype=torch.float64, device="cpu"))
        toys.append(nn.Parameter((values * 3.0 ** (1 - i)).view(shape).to(like.device, like.dtype)))
    return toys


def _lively(options: dict[str, Any]) -> dict[str, Any]:
    """Options under which a trust ratio shows: a warm-up may begin at zero, and so may a decay."""
    for name, at_least in (("lr", 0.1), ("weight_decay", 0.1)):
        value = options.get(name)
        if isinstance(value, Tensor):
            options[name] = torch.full_like(value, at_least)
        elif isinstance(value, int | float) and not isinstance(value, bool) and (name == "lr" or value == 0):
            options[name] = at_least
    return options


def _give_state(toys: list[nn.Parameter], params: list[Tensor], state: Any, toy_state: Any) -> None:
    template = next((p for p in params if p in state and p.dim() > 0 and p.numel() > 0), None)
    if template is None:
        return
    for t in toys:
        for key, x in state[template].items():
            if isinstance(x, Tensor) and is_elementwise(x, template):
                values = local(x).detach().flatten()[: t.numel()]
                x = values.repeat(-(-t.numel() // len(values)))[: t.numel()].view(t.shape)
            toy_state[t][key] = deepcopy(x)


def _give_gradients(optimizer: Optimizer, step: int) -> None:
    for i, p in enumerate(_params(optimizer)):
        values = torch.cos(i + 2.3 * step + 0.9 * torch.arange(p.numel(), dtype=torch.float64, device="cpu") ** 1.3)
        p.grad = (values * 2.0 ** (i % len(SHAPES))).view(p.shape).to(p.device, p.dtype)
