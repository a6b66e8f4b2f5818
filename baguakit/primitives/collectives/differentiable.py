"""Collectives with a backward, itself compressed or not.

    forward           backward
    all-gather        reduce-scatter of the sum
    reduce-scatter    all-gather
    all-to-all        all-to-all, with its splits swapped
    all-reduce        identity
    identity          all-reduce

The gradients are those of the sum of all ranks' losses; the last pair is that of a tensor-parallel block, whose loss is
the same on all ranks and counts once. They are straight-through: rounding counts as the identity.

Each is an operator of torch, with a fake, that `torch.compile(fullgraph=True)` records whole. In a graph there are no
groups and no compressors: the operators find them by a name, as torch's functional collectives do.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ...arguments import tensor
from ...comm import Comm, check_comm
from ...compressors import Compressor
from ...compressors.base import check_dense
from ..compressed import compressed_mean_
from .gathers import compressed_all_gather
from .scatters import compressed_reduce_scatter
from .transposes import compressed_all_to_all, splits_of

_named: "WeakValueDictionary[str, Differentiable]" = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Differentiable:
    """Collectives on activations, with a backward; for `torch.compile`, constructed outside of the compiled function.

        tokens = bk.primitives.Differentiable(comm, forward=MinMaxUInt8(), backward=MinMaxUInt8())
        heard = tokens.all_to_all(x, output_split_sizes, input_split_sizes)

    All ranks of the group call the same methods in the same order, and run the same backward passes. Methods take a
    floating tensor, return a new one, and raise what the primitives of these names raise.

    Args:
        comm: the group. With one rank nothing is sent and nothing is lost.
        forward: the compressor of what is sent in the forward pass; None sends values as they are.
        backward: the compressor of the gradients that are sent in the backward pass; None sends them as they are.

    Raises:
        TypeError: `comm` is no Comm, or a compressor is none, or keeps some places only.
    """

    comm: Comm
    forward: Compressor | None = None
    backward: Compressor | None = None
    _name: str = field(default="", init=False, repr=False)
    _calls: "itertools.count[int]" = field(default_factory=itertools.count, init=False, repr=False)
    _sent: dict[str, float] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        check_comm(self.comm)
        for name in ("forward", "backward"):
            if getattr(self, name) is not None:
                check_dense(name, getattr(self, name))
        object.__setattr__(self, "_name", str(next(_numbers)))
        _named[self._name] = self

    def __deepcopy__(self, memo: Any) -> "Differentiable":
        return self  # in the copy of a model, over the same group

    @property
    def bytes_sent(self) -> float:
        """The bytes that this rank has sent, in both passes."""
        return sum(self._sent.values())

    def all_gather(self, x: Tensor) -> Tensor:
        """Return the tensors `x` (k, …) of all ranks, concatenated: (size · k, …). Backward: `reduce_scatter`."""
        return _all_gather(_checked(x), self.comm.size, self._name, True)  # type: ignore[no-any-return]

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's shard (k, …) of the sum of `x` (size · k, …) over all ranks. Backward: `all_gather`."""
        return _reduce_scatter(_checked(x), self.comm.size, self._name, True)  # type: ignore[no-any-return]

    def all_to_all(
        self,
        x: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Send a part of `x` (rows, …) to each rank, and return the parts for this one, in the order of the ranks.

        A rank's part for itself is exact. Splits are numbers of rows, given both or neither: see
        `compressed_all_to_all`. Backward: the same, with the splits swapped.
        """
        if not torch.compiler.is_compiling():
            splits_of(_checked(x), output_split_sizes, input_split_sizes, self.comm)
        splits = [[] if each is None else list(each) for each in (output_split_sizes, input_split_sizes)]
        return _all_to_all(x, *splits, self._name, True)  # type: ignore[no-any-return]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks. Backward: the identity."""
        return _all_reduce(_checked(x), self._name, True)  # type: ignore[no-any-return]

    def identity(self, x: Tensor) -> Tensor:
        """Return a copy of `x`. Backward: the sum over all ranks, sent with the compressor `backward`."""
        return _identity(_checked(x), self._name, True)  # type: ignore[no-any-return]


def _checked(x: Tensor) -> Tensor:
    """Return `x`, or raise unless it is a floating tensor, which an operator of torch would say in its own words."""
    return x if torch.compiler.is_compiling() else tensor("x", x, floating=True)


def _found(name: str, forward: bool) -> tuple[Compressor | None, Comm]:
    """Return the compressor of a pass, and the group at a round of its own: draws differ from call to call."""
    if name not in _named:
        raise RuntimeError("the Differentiable of this graph is gone; keep it as long as what was computed with it")
    found = _named[name]
    round = (found.comm._round or 0) + next(found._calls)
    comm = found.comm.stand(round, found.comm._step, 0, found._sent, found.comm._notes)
    return found.forward if forward else found.backward, comm


# The operators. `forward` is False in a backward pass, and True again in the backward of one.


@torch.library.custom_op("baguakit::all_gather", mutates_args=())
def _all_gather(x: Tensor, size: int, name: str, forward: bool) -> Tensor:
    compressor, comm = _found(name, forward)
    return compressed_all_gather(x, compressor, comm)


@torch.library.custom_op("baguakit::reduce_scatter", mutates_args=())
def _reduce_scatter(x: Tensor, size: int, name: str, forward: bool) -> Tensor:
    compressor, comm = _found(name, forward)
    return compressed_reduce_scatter(x, compressor, comm)


@torch.library.custom_op("baguakit::all_to_all", mutates_args=())
def _all_to_all(x: Tensor, output: Sequence[int], input: Sequence[int], name: str, forward: bool) -> Tensor:
    compressor, comm = _found(name, forward)
    splits = (output, input) if output or input else ()
    return compressed_all_to_all(x, compressor, comm, *splits)


@torch.library.custom_op("baguakit::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, name: str, forward: bool) -> Tensor:
    compressor, comm = _found(name, forward)
    out = x.clone(memory_format=torch.contiguous_format)
    return comm.all_reduce(out) if compressor is None else compressed_mean_(out, compressor, comm).mul_(comm.size)


@torch.library.custom_op("baguakit::identity", mutates_args=())
def _identity(x: Tensor, name: str, forward: bool) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)  # an operator cannot return its argument


@_all_gather.register_fake
def _(x: Tensor, size: int, name: str, forward: bool) -> Tensor:
    return x.new_empty(size * x.shape[0], *x.shape[1:])


@_reduce_scatter.register_fake
def _(x: Tensor, size: int, name: str, forward: bool) -> Tensor:
    return x.new_empty(x.shape[0] // size, *x.shape[1:])


@_all_to_all.register_fake
def _(x: Tensor, output: Sequence[int], input: Sequence[int], name: str, forward: bool) -> Tensor:
    return x.new_empty(sum(output) if output else x.shape[0], *x.shape[1:])


@_all_reduce.register_fake
@_identity.register_fake
def _(x: Tensor, name: str, forward: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep all arguments but the tensor: a backward needs no values."""
    ctx.arguments = inputs[1:]
    ctx.of = _named.get(inputs[-2])  # until the backward has run


def _scatter_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    size, name, forward = ctx.arguments
    return _reduce_scatter(grad, size, name, not forward), None, None, None


def _gather_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    size, name, forward = ctx.arguments
    return _all_gather(grad, size, name, not forward), None, None, None


def _send_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    output, input, name, forward = ctx.arguments
    return _all_to_all(grad, input, output, name, not forward), None, None, None, None


def _as_it_is(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    name, forward = ctx.arguments
    return _identity(grad, name, not forward), None, None


def _sum_back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    name, forward = ctx.arguments
    return _all_reduce(grad, name, not forward), None, None


_all_gather.register_autograd(_scatter_back, setup_context=_keep)
_reduce_scatter.register_autograd(_gather_back, setup_context=_keep)
_all_to_all.register_autograd(_send_back, setup_context=_keep)
_all_reduce.register_autograd(_as_it_is, setup_context=_keep)
_identity.register_autograd(_sum_back, setup_context=_keep)
