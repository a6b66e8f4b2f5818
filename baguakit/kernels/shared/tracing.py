"""Functions that are operators of torch where somebody records them, and plain calls where nobody does.

A dispatch costs the host more than the launch of a kernel, on a thread that backward waits for.
"""

from collections.abc import Callable, Iterable
from functools import cache, update_wrapper
from importlib import import_module
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

imported = cache(import_module)  # Triton is imported at the first kernel: where there is no GPU, it need not be there


def recorded(x: Tensor) -> bool:
    """Return whether work on `x` is recorded, or stands for other work.

    So it is under `torch.compile`, in a dispatch mode (`make_fx`, `FakeTensorMode`), and for a subclass of tensors.
    """
    modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
    return torch.compiler.is_compiling() or type(x) is not Tensor or modes() > 0


class Operator(Generic[Result]):
    """A function of a tensor and other arguments, called as an operator of torch where it is recorded.

    It has no gradient: what calls it asks for none. No argument of the function has a default, because torch 2.11 looks
    for mutated arguments among those that are not.

    Args:
        function: what is called.
        mutates: the names of the arguments that it overwrites.
        name: of the operator, if not that of the function.
        fake: returns what has the shapes of its results, if it has any.
    """

    def __init__(
        self,
        function: Callable[..., Result],
        mutates: Iterable[str],
        name: str = "",
        fake: Callable[..., Result] | None = None,
    ) -> None:
        update_wrapper(self, function)
        self.function = function
        name = f"baguakit::{name or function.__name__}"
        self.registered: Any = torch.library.custom_op(name, function, mutates_args=mutates)
        if fake is not None:
            self.registered.register_fake(fake)

    def __call__(self, x: Tensor, *arguments: Any) -> Result:
        function: Callable[..., Result] = self.registered if recorded(x) else self.function
        return function(x, *arguments)
