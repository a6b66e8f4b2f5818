"""`fuse` lets an optimizer step over a few flat tensors.

torch lets a step pre-hook replace the arguments of `step`, including the optimizer. The pre-hook of `fuse` passes a
*view*: an optimizer with the same attributes, but with flat parameters. The post-hook copies the results back. Between
steps, the user's optimizer has the same groups, keys of state, and methods as without `fuse`.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from ..arguments import checked
from .flat import Flat, OptimizerState, divide

Groups = list[dict[str, Any]]
ELEMENTWISE = {
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.RMSprop, optim.Rprop,
    optim.Adadelta, optim.Adagrad, optim.ASGD,
}  # fmt: skip
CALM = 8  # steps in which the same parameters must have gradients before they are laid out again


@checked
def fuse(optimizer: Optimizer, elementwise: bool = False) -> Optimizer:
    """Let an element-wise optimizer step over a few flat tensors, and return the optimizer. `unfuse` undoes this.

    The same object is returned, and stays an ordinary optimizer: groups, schedulers, hooks, checkpoints, gradient
    scaling and clipping work as before. A checkpoint loads into a fused or an unfused optimizer. Parameters keep their
    memory. A copy (`deepcopy`, pickle) is not fused. If the set of parameters with a gradient changes, all parameters
    of the group are stepped one by one for 8 steps.

    In float32, a fused step gives the same bits as an unfused step if torch's loop or `foreach` code runs. With torch's
    fused kernels on CPU, or 16-bit weights, vector and scalar code round differently: from equal state, a fused step
    differs by at most one rounding of the dtype, or three for SGD with momentum and decay.

    Args:
        optimizer: SGD, Adam, AdamW, NAdam, RAdam, Adamax, RMSprop, Rprop, Adadelta, Adagrad or ASGD of torch.
        elementwise: also accept another class. You then assert that the step of each value depends only on its own
            gradient and state, not on norms or shapes of whole tensors, nor on random numbers.

    Raises:
        ValueError: the optimizer is not known to be element-wise, or one of its options prevents fusing.
    """
    name = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(f"fuse takes a torch.optim.Optimizer, not {name}; fuse the one inside if that wraps one")
    if type(optimizer) not in ELEMENTWISE and not elementwise:
        raise ValueError(
            f"{name} cannot be fused: it is not known to be element-wise; pass elementwise=True if the step of each "
            "value depends on its own gradient and state alone"
        )
    if optimizer.defaults.get("differentiable"):
        raise ValueError(f"{name} cannot be fused with differentiable=True: autograd follows each parameter by itself")
    if type(optimizer) is optim.SGD and any(
        group.get("fused") and any(p.itemsize == 2 for p in group["params"]) for group in optimizer.param_groups
    ):
        raise ValueError(
            "SGD cannot be fused with fused=True over 16-bit weights: torch's kernel leaves out values of long tensors "
            "(pytorch/pytorch#191763); leave out fused=True"
        )
    if fusion_of(optimizer) is None:
        Fusion(optimizer)
    return optimizer


@checked
def unfuse(optimizer: Optimizer) -> Optimizer:
    """Let an optimizer, fused or not, step its parameters one by one, with its current state, and return it."""
    if fusion := fusion_of(optimizer):
        for handle in fusion.handles:
            handle.remove()
        fusion.use([])
    return optimizer


def fusion_of(optimizer: Optimizer) -> "Fusion | None":
    """Return the `Fusion` of an optimizer; None if it is not fused."""
    owners = (getattr(hook, "fusion", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Fusion)), None)


@dataclass(eq=False)
class Layout:
    """The division of a group's parameters into flat tensors and parameters that are stepped one by one."""

    params: list[Tensor]
    present: list[bool]  # for each parameter, whether it has a gradient
    flats: list[Flat] = field(default_factory=list)
    calm: int = CALM  # steps since `present` changed; below `CALM`, all parameters are stepped one by one


class Fusion:
    """The hooks of a fused optimizer. The constructor registers them."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.layouts: list[Layout] = []  # of each group, in the latest step
        self._groups: Groups = []
        self._state: OptimizerState = {}
        self._gathered = False  # whether the view has the parameters
        # The view's class is derived from the user's class. The view and the user's optimizer share all attributes,
        # except the two properties here. The first read of a property fills the view.
        kind: Any = type(optimizer)
        body = {
            "param_groups": property(lambda _: self._shown()._groups),
            "state": property(lambda _: self._shown()._state),
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
        }
        self._view: Optimizer = object.__new__(type(kind)(kind.__name__, (kind,), body))
        # torch.compile must not trace these hooks. A decorator would import the compiler with this module.
        before: Any = torch.compiler.disable(self._before)
        after: Any = torch.compiler.disable(self._after)
        before.fusion = self
        post = optimizer.register_step_post_hook(after)
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(post.id, last=False)  # other post-hooks must find new weights in the user's parameters
        self.handles = [optimizer.register_step_pre_hook(before), post]

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin a step: return (args, kwargs) with the view in place of the optimizer; None inside another step."""
        if optimizer is not self.optimizer:  # a step within a step
            return None
        if self._gathered:  # an earlier step has failed, and the user's state is authoritative
            self.use([])
        self._gathered = False
        self._groups = [{"params": []} for _ in optimizer.param_groups]
        self._view.__dict__ = optimizer.__dict__
        return (self._view, *map(self._followed, args[1:])), {key: self._followed(x) for key, x in kwargs.items()}

    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End a step: copy the parameters and the state of the view into the user's optimizer."""
        if optimizer is self.optimizer and self._gathered:
            self._scatter()

    def _followed(self, argument: Any) -> Any:
        """Return `argument`; wrap a closure, so that it sees the user's weights and may change gradients."""
        if not callable(argument):
            return argument

        def closure(*args: Any, **kwargs: Any) -> Any:
            if self._gathered:
                self._scatter()
            result = argument(*args, **kwargs)
            self._shown()
            return result

        return closure

    @torch.no_grad()
    def _shown(self) -> "Fusion":
        """Fill the view if it is empty. Return self."""
        if self._gathered:
            return self
        groups, state, before = self.optimizer.param_groups, self.optimizer.state, self.layouts
        self.use([self._layout(group, before[i] if i < len(before) else None) for i, group in enumerate(groups)])
        taken = {p for layout in self.layouts for flat in layout.flats for p in flat.params}
        self._state = defaultdict(dict, {key: known for key, known in state.items() if key not in taken})
        for group, shown, layout in zip(groups, self._groups, self.layouts, strict=True):
            shown.update(group, params=shown["params"])  # the same list all through a step: the optimizer may keep it
            shown["params"][:] = [flat.param for flat in layout.flats] + [p for p in layout.params if p not in taken]
            for flat in layout.flats:
                flat.load()
                if flat.known is not None:
                    self._state[flat.param] = dict(flat.known)
        self._gathered = True
        return self

    def _layout(self, group: dict[str, Any], before: Layout | None) -> Layout:
        """Return the layout of a group: the layout of the previous step, if it still fits.

        While the set of parameters with a gradient changes from step to step, all parameters are stepped one by one,
        because new layouts would cost more than they save.
        """
        params, state = list(group["params"]), self.optimizer.state
        if any(p.grad is not None and p.grad.layout is not torch.strided for p in params):
            raise TypeError("a sparse gradient cannot be part of a flat tensor; use sparse=False, or unfuse(optimizer)")
        present = [p.grad is not None for p in params]
        if before is not None:
            same = len(params) == len(before.params) and all(map(is_, params, before.params))
            if not same or present != before.present:
                return Layout(params, present, calm=0)
            settled = before.calm == CALM
            before.calm = min(CALM, before.calm + 1)
            if before.calm < CALM or (settled and all(flat.fits(state) for flat in before.flats)):
                return before
        return Layout(params, present, divide(params, state))

    @torch.no_grad()
    def _scatter(self) -> None:
        self._gathered = False
        state, unscaled = self.optimizer.state, getattr(self.optimizer, "grad_scale", None) is not None
        for layout in self.layouts:
            for flat in layout.flats:
                flat.store(self._state.pop(flat.param, None), state, unscaled)
        state.update(self._state)
        for group, shown in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update((key, x) for key, x in shown.items() if key != "params" and group.get(key) is not x)

    @torch.no_grad()
    def use(self, layouts: list[Layout]) -> None:
        """Use `layouts` from now on. Parameters of layouts that are no longer used get separate state tensors."""
        for flat in [flat for layout in self.layouts if layout not in layouts for flat in layout.flats]:
            flat.release(self.optimizer.state)
        self.layouts = layouts
