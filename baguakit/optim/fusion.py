"""`fuse`: the step of an optimizer, on a few flat tensors.

torch lets a step pre-hook replace the arguments of `step`, the optimizer itself included. The hook here passes a view
of the optimizer whose parameters are flat; the post-hook copies the results back. Between steps the optimizer
is unchanged: its groups, its state by parameter, and its methods are torch's own.
"""

from collections import defaultdict
from dataclasses import dataclass
from types import new_class
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..arguments import check_fields, checked
from .flat import CannotFuse, Flat, OptimizerState
from .layout import Layout, lay_out, next_layout
from .probe import check_element_wise, own_step
from .steppers import Groups, step_in_launches


@checked
def fuse(optimizer: Optimizer) -> Optimizer:
    """Let an element-wise optimizer step over a few flat tensors, and return it; `unfuse` undoes it.

    The same object is returned, and stays an ordinary optimizer: groups, schedulers, hooks, checkpoints, gradient
    scaling and clipping work as before, and a checkpoint of either kind loads into the other. Parameters stay where
    they are. On CUDA, torch's own SGD, Adam and AdamW are stepped by one launch (`steppers.py` says when), which rounds
    each operation by itself, and so differs from torch's by roundings. Where the optimizer's own code runs, fused
    equals unfused bit for bit in float32 if that is torch's loop or `foreach` code. Elsewhere
    (torch's fused kernels on CPU, 16-bit weights) vector and scalar code round apart: a step from equal state ends
    within one rounding of the dtype, three for SGD with momentum and decay. A copy (`deepcopy`, pickle) is not fused.
    For 8 steps after others in a group had gradients, all of the group are stepped one by one, as without `fuse`.

    Raises:
        TypeError: this is not a `torch.optim.Optimizer`.
        ValueError: the optimizer is not element-wise (found out on toy tensors), or cannot be fused for another
            reason. A group added later is looked at when it is first stepped.
    """
    if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"fuse takes a torch.optim.Optimizer, not {type(optimizer).__name__}; fuse the one inside if that wraps one"
        )
    if fusion_of(optimizer) is None:
        fusion = Fusion(optimizer)
        fusion.look_at_groups()
        fusion.install()
    return optimizer


@checked
def unfuse(optimizer: Optimizer) -> Optimizer:
    """Let a fused optimizer step its parameters one by one again, with the state it has, and return it.

    One that is not fused is returned as it is.
    """
    fusion = fusion_of(optimizer)
    if fusion is not None:
        fusion.remove()
    return optimizer


@dataclass(frozen=True)
class Report:
    """The report of the latest step of a fused optimizer. Print it.

    Attributes:
        flats: flat tensors.
        together: parameters stepped in them.
        apart: parameters stepped as always: large ones, those that go with no other, and all of a group for 8 steps
            after others had a gradient.
        absent: parameters without a gradient.
        copied: flat tensors whose gradients had to be copied, because they did not lie one after another.
        layouts: the number of times that parameters have been laid out anew.
    """

    flats: int
    together: int
    apart: int
    absent: int
    copied: int
    layouts: int

    def __post_init__(self) -> None:
        check_fields(self)

    def __str__(self) -> str:
        return (
            f"{self.together} parameters in {self.flats} flat tensors ({self.copied} with copied gradients), "
            f"{self.apart} apart, {self.absent} without a gradient; laid out {self.layouts} times"
        )


@checked
def report(optimizer: Optimizer) -> Report:
    """Return the report of the latest step of a fused optimizer.

    Raises:
        ValueError: it is not fused.
    """
    fusion = fusion_of(optimizer)
    if fusion is None:
        raise ValueError(f"this {type(optimizer).__name__} is not fused; baguakit.optim.fuse(optimizer) does that")
    flats = [flat for layout in fusion.layouts for flat in layout.flats]
    together = sum(len(flat.params) for flat in flats)
    present = [given for layout in fusion.layouts for given in layout.present]
    absent = present.count(False)
    return Report(len(flats), together, len(present) - absent - together, absent, fusion.copied, fusion.laid_out)


def fusion_of(optimizer: Optimizer) -> "Fusion | None":
    """Return the fusion of an optimizer; None if it has none."""
    owners = (getattr(hook, "fusion", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Fusion)), None)


class Fusion:
    """The hooks of a fused optimizer.

    Attributes:
        layouts: of each group, as of the latest step.
        laid_out, copied: counts for the report.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.layouts: list[Layout] = []
        self.laid_out = self.copied = 0
        self._view = self._flat_view()
        self._looked_at: list[dict[str, Any]] = []
        self._groups: Groups = []
        self._left: Groups = []
        self._state: OptimizerState = {}
        self._gathered = self._asked = self._stale = False
        self._handles: list[Any] = []

    def install(self) -> None:
        """Hook the optimizer's step."""
        # Disabled here and not by a decorator, which would import the compiler with the package.
        before: Any = torch.compiler.disable(self.before)
        after: Any = torch.compiler.disable(self.after)
        before.fusion = self
        post = self.optimizer.register_step_post_hook(after)
        hooks: Any = self.optimizer._optimizer_step_post_hooks
        hooks.move_to_end(post.id, last=False)  # other post-hooks must find the weights where they belong
        self._handles = [self.optimizer.register_step_pre_hook(before), post]

    def remove(self) -> None:
        """Unhook, and give every parameter a state of its own."""
        for handle in self._handles:
            handle.remove()
        with torch.no_grad():
            self._release(self.layouts)
        self.layouts = []

    def look_at_groups(self) -> None:
        """Raise unless every group is one that can be fused."""
        groups = self.optimizer.param_groups
        if len(groups) != len(self._looked_at) or any(a is not b for a, b in zip(groups, self._looked_at, strict=True)):
            check_element_wise(self.optimizer, lambda toys: Fusion(toys).step)
            self._looked_at = list(groups)

    def step(self, *args: Any) -> None:
        """Step without any hooks."""
        args, kwargs = self._begin((self.optimizer, *args), {})
        own_step(type(self.optimizer))(*args, **kwargs)
        if not self._gathered:
            raise CannotFuse("its step does not look at its groups; fuse the one inside if it wraps another optimizer")
        self.after(self.optimizer, args, kwargs)

    # The hooks

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Begin a step: return the arguments with the view in place of the optimizer."""
        if optimizer is not self.optimizer:  # a step within a step
            return None
        self.look_at_groups()
        return self._begin(args, kwargs)

    def _begin(self, args: Any, kwargs: Any) -> Any:
        optimizer = self.optimizer
        self._stale = self._gathered  # an earlier step has not ended: the state of parameters is what counts
        self._gathered = self._asked = False
        self._groups = [{"params": []} for _ in optimizer.param_groups]
        self._view.__dict__ = optimizer.__dict__
        rest = tuple(self._followed(x) for x in args[1:])
        return (self._view, *rest), {key: self._followed(x) for key, x in kwargs.items()}

    def after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """End a step: copy the parameters and the state of the view into the user's."""
        if optimizer is self.optimizer and self._gathered:
            self._scatter()

    def _followed(self, argument: Any) -> Any:
        """Return a closure wrapped so that it sees the user's weights and may change gradients."""
        if not callable(argument):
            return argument
        self._asked = True

        def closure(*args: Any, **kwargs: Any) -> Any:
            if self._gathered:
                self._scatter()
            result = argument(*args, **kwargs)
            self._asked = False
            self._gather()
            return result

        return closure

    # The view

    def _flat_view(self) -> Optimizer:
        """Return an optimizer whose `step` acts on flat parameters.

        Its class is derived from the user's, and the two share all attributes (what one sets, the other has) except
        `param_groups` and `state`, which are gathered when they are first read.
        """
        kind = type(self.optimizer)
        body = {
            "param_groups": property(lambda _: self._gathered_once()._left),
            "state": property(lambda _: self._gathered_once()._state),
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
        }
        view: Optimizer = object.__new__(new_class(kind.__name__, (kind,), None, lambda names: names.update(body)))
        view.__dict__ = self.optimizer.__dict__
        return view

    def _gathered_once(self) -> "Fusion":
        if not self._gathered:
            self._gather()
        return self

    @torch.no_grad()
    def _gather(self) -> None:
        groups, state = self.optimizer.param_groups, self.optimizer.state
        before, self.layouts = self.layouts, []
        for i, group in enumerate(groups):
            self.layouts.append(self._layout(group, before[i] if i < len(before) else None))
        self._release([layout for layout in before if layout not in self.layouts])
        self._stale, self.copied = False, 0
        self._state = defaultdict(dict, {key: x for key, x in state.items() if not isinstance(key, Tensor)})
        for group, shown, layout in zip(groups, self._groups, self.layouts, strict=True):
            params = shown["params"]  # the same list all through a step: the optimizer may hold it
            shown.update(group)
            shown["params"] = params
            params[:] = [*map(self._load, layout.flats), *layout.apart]
            self._state.update((p, state[p]) for p in layout.apart if p in state)
        self._left = self._groups
        if not self._asked:
            self._left = step_in_launches(type(self.optimizer), self._groups, self._state)
        self._gathered = True

    def _layout(self, group: dict[str, Any], before: Layout | None) -> Layout:
        params, fused, state = group["params"], bool(group.get("fused")), self.optimizer.state
        if {g.layout for p in params if (g := p.grad) is not None} - {torch.strided}:
            raise TypeError("a sparse gradient cannot be part of a flat tensor; use sparse=False, or unfuse(optimizer)")
        if before is None or self._stale:
            layout = lay_out(params, state, fused)
        else:
            layout = next_layout(before, params, state, fused)
        self.laid_out += layout is not before and layout.calm > 0
        return layout

    def _load(self, flat: Flat) -> Tensor:
        self.copied += flat.load()
        if flat.known is not None:
            self._state[flat.param] = dict(flat.known)
        return flat.param

    @torch.no_grad()
    def _scatter(self) -> None:
        self._gathered = False
        state, unscaled = self.optimizer.state, getattr(self.optimizer, "grad_scale", None) is not None
        for layout in self.layouts:
            for flat in layout.flats:
                flat.store(unscaled)
                flat.remember(self._state.pop(flat.param, None), state)
        state.update(self._state)
        for group, shown in zip(self.optimizer.param_groups, self._groups, strict=True):
            group.update((key, x) for key, x in shown.items() if key != "params" and group.get(key) is not x)

    def _release(self, layouts: list[Layout]) -> None:
        for layout in layouts:
            for flat in layout.flats:
                flat.release(self.optimizer.state)
