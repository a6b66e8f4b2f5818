"""The check that an optimizer is element-wise: toy tensors stepped apart and together must agree.

The toys are stepped by copies of the optimizer that hold toys wherever it holds parameters; its own parameters, state
and hooks are not touched, and no random number generator is moved.
"""

import contextlib
import inspect
import math
import random
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .flat import NUMBERS, CannotFuse, is_elementwise, shard_of

SHAPES = ((7,), (5, 3), (16,), (4, 2, 3), (1,), (3, 8))
STEPS = 12
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "weight_decay")
StepFunction = Callable[..., Any]


def own_step(kind: type[Optimizer]) -> StepFunction:
    """Return the `step` of a class, without the hooks that torch has wrapped around it."""
    step: StepFunction = kind.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def check_element_wise(optimizer: Optimizer, together: Callable[[Optimizer], StepFunction]) -> None:
    """Raise a ValueError unless toys stepped apart and by the step that `together(optimizer)` returns agree."""
    name = type(optimizer).__name__
    if optimizer.defaults.get("differentiable"):
        raise ValueError(f"{name} cannot be fused with differentiable=True: autograd follows each parameter by itself")
    try:
        devices = {group["params"][0].device for group in optimizer.param_groups if group["params"]}
        with restored_generators(devices) as have_drawn, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            difference, drawn = _difference(optimizer, together), have_drawn()
    except CannotFuse as error:
        raise ValueError(f"{name} cannot be fused: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{name} cannot be fused: it fails on toy tensors of several shapes ({type(error).__name__}: {error})"
        ) from error
    if drawn:
        raise ValueError(f"{name} cannot be fused: it draws random numbers, and would draw others for flat tensors")
    if difference is not None:
        raise ValueError(
            f"{name} cannot be fused: it is not element-wise, since tensors stepped together move otherwise than "
            f"apart ({difference}); leave it as it is"
        )


@contextlib.contextmanager
def restored_generators(devices: Iterable[torch.device]) -> Iterator[Callable[[], bool]]:
    """Restore the global random generators of torch (on the CPU and `devices`), NumPy and Python after the body.

    Yield a function that returns whether the body has drawn from them.
    """
    modules = [(torch.get_device_module(d), d) for d in devices if d.type not in ("cpu", "meta")]

    def states() -> list[Any]:
        on_devices = [module.get_rng_state(d) for module, d in modules]
        return [torch.get_rng_state(), random.getstate(), np.random.get_state(), *on_devices]

    before = states()
    try:
        yield lambda: not _equal(states(), before)
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
        for (module, d), state in zip(modules, before[3:], strict=True):
            module.set_rng_state(state, d)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two states, made of tensors, arrays and tuples, are equal."""
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(np.array_equal(a, b))


def _difference(optimizer: Optimizer, together: Callable[[Optimizer], StepFunction]) -> str | None:
    """Return the difference between toys stepped apart and together; None if there is none."""
    try:
        return _compared(optimizer, together, with_state=False)
    except KeyError:  # a class that makes its state when it is constructed
        return _compared(optimizer, together, with_state=True)


def _compared(optimizer: Optimizer, together: Callable[[Optimizer], StepFunction], with_state: bool) -> str | None:
    apart, fused = toy(optimizer, with_state), toy(optimizer, with_state)
    kind = type(optimizer)
    step, fused_step = own_step(kind), together(fused)
    closure = (lambda: torch.zeros((), dtype=torch.float32),) if _needs_closure(step) else ()
    start, magnitudes = [p.detach().clone() for p in _params(apart)], Magnitudes()
    for i in range(STEPS):
        for toys in (apart, fused):
            _give_gradients(toys, i)
        step(apart, *closure)
        fused_step(*closure)
        for a, b, origin in zip(_params(apart), _params(fused), start, strict=True):
            if not magnitudes.close((a, "weights"), a.detach() - origin, b.detach() - origin, a):
                return f"weights of shape {tuple(a.shape)} at step {i + 1}"
            if difference := _state_differs(magnitudes, a, apart.state.get(a, {}), fused.state.get(b, {})):
                return f"the state {difference!r} of shape {tuple(a.shape)} at step {i + 1}"
    return None


class Magnitudes:
    """The largest magnitude so tolerance of the values under each key, which scales the tolerance for roundings."""

    def __init__(self) -> None:
        self.largest: dict[Any, float] = {}

    def close(self, key: Any, a: Tensor, b: Tensor, rounded: Tensor) -> bool:
        """Return whether a and b are equal up to roundings, those of `rounded` and of sums over all parameters."""
        eps = torch.finfo(a.dtype).eps
        self.largest[key] = max(self.largest.get(key, 0.0), float(a.abs().max()))
        tolerance = math.sqrt(eps) * self.largest[key] + 8 * eps * float(rounded.detach().abs().max())
        return torch.allclose(a, b, rtol=0, atol=tolerance, equal_nan=True)


def _state_differs(magnitudes: Magnitudes, p: Tensor, a: dict[str, Any], b: dict[str, Any]) -> str | None:
    """Return the first key under which two states differ; None if they are equal."""
    if a.keys() != b.keys():
        return sorted(map(str, a.keys() ^ b.keys()))[0]
    for key, x in a.items():
        y = b[key]
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.shape == y.shape:
            same = magnitudes.close((p, key), x, y, x) if x.is_floating_point() else torch.equal(x, y)
        else:
            same = isinstance(x, NUMBERS) and type(x) is type(y) and bool(x == y)
        if not same:
            return key
    return None


def _needs_closure(step: StepFunction) -> bool:
    parameters = list(inspect.signature(step).parameters.values())[1:]
    return any(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def toy(optimizer: Optimizer, with_state: bool = False) -> Optimizer:
    """Return a copy of an optimizer with toys for parameters: the same attributes and options, but a rate above 0.

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
        groups.append({"params": toys, **_with_positive_rates(deepcopy(options, memo))})
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
    like = shard_of(params[0]) if params else torch.empty(0, dtype=torch.float32)
    toys = []
    for i, shape in enumerate(shapes):
        values = torch.sin(1 + i + 1.7 * torch.arange(math.prod(shape), dtype=torch.float64, device="cpu"))
        toys.append(nn.Parameter((values * 3.0 ** (1 - i)).view(shape).to(like.device, like.dtype)))
    return toys


def _with_positive_rates(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with a positive rate and decay, without which a trust ratio would not show."""
    for name in ("lr", "weight_decay"):
        value = options.get(name)
        if isinstance(value, Tensor):
            options[name] = torch.full_like(value, 0.1)
        elif isinstance(value, int | float) and not isinstance(value, bool) and (name == "lr" or value == 0):
            options[name] = 0.1
    return options


def _give_state(toys: list[nn.Parameter], params: list[Tensor], state: Any, toy_state: Any) -> None:
    template = next((p for p in params if p in state and p.dim() > 0 and p.numel() > 0), None)
    if template is None:
        return
    for t in toys:
        for key, x in state[template].items():
            if isinstance(x, Tensor) and is_elementwise(x, template):
                values = shard_of(x).detach().flatten()[: t.numel()]
                x = values.repeat(-(-t.numel() // len(values)))[: t.numel()].view(t.shape)
            toy_state[t][key] = deepcopy(x)


def _give_gradients(optimizer: Optimizer, step: int) -> None:
    for i, p in enumerate(_params(optimizer)):
        values = torch.cos(i + 2.3 * step + 0.9 * torch.arange(p.numel(), dtype=torch.float64, device="cpu") ** 1.3)
        p.grad = (values * 2.0 ** (i % len(SHAPES))).view(p.shape).to(p.device, p.dtype)
