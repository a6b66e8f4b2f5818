"""Buckets: parameters or gradients as one flat tensor.

Weights are copied to the bucket and back. Gradients become views of the bucket when they are stored, as with DDP's
`gradient_as_bucket_view`. Backward then accumulates directly into the bucket, and the gradients take no further memory.
Their addresses are the same in every step (with a delay d, in every (d + 1)-th step). Loading and storing 10 M fp32
gradients takes 2.4 ms with views, 3.7 ms with copies back (40 tensors, one CPU thread; a copy of 10 M values takes 2.3
ms), and 0.04 ms if `zero_grad(set_to_none=False)` keeps the views.

A complex number is stored as two real numbers: the flat tensor of complex parameters is real, its views are complex.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import compress
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from .arguments import describe, instance, integer, message, one_of, several, tensor
from .tensors import is_dense, sharing

What = Literal["grad", "data"]
WHAT = get_args(What)
Pair = tuple[Tensor, Tensor]  # a tensor to copy to, and one to copy from
LEAST, MOST = 1 << 20, 25 << 20  # bounds of the default size of a bucket
AVERAGED = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128}


class Bucket:
    """Parameters that are exchanged together, and the flat tensor that holds them.

    Args:
        params: parameters of one floating or complex dtype, on one device. If a parameter is sharded (a DTensor, as
            with FSDP2), the bucket holds this rank's shard of the weights; it holds no sharded gradients.
        multiple_of: the flat tensor is padded with zeros to a multiple of this number of values.

    Attributes:
        params: the given parameters.
        flat: the flat tensor (n,) in the dtype of the parameters; n is the sum of their sizes, padded. For complex
            parameters it is real and holds pairs (real part, imaginary part).
        views: views of `flat` with the shapes and the dtype of the parameters; each has a separate version counter.

    Raises:
        TypeError: a parameter has a dtype that cannot be averaged (integers, float8), or two have different dtypes.
        ValueError: two parameters are on different devices or share memory, or there are no parameters.
    """

    def __init__(self, params: Iterable[Tensor], multiple_of: int = 1) -> None:
        self.params = [tensor("each of params", p) for p in several("params", params, "a list of tensors")]
        integer("multiple_of", multiple_of, 1, 1 << 40)
        if not self.params:
            raise ValueError("params holds at least one parameter, and this Bucket was given none: []")
        first = self.params[0]
        for p in self.params:
            check_averaged("each of params", p)
            if p.dtype != first.dtype:
                raise TypeError(f"a Bucket holds one dtype, not {first.dtype} and {p.dtype}; make one for each")
            if p.device != first.device:
                raise ValueError(f"a Bucket has one device and was given parameters on {first.device} and {p.device}")
        check_apart(self.params)
        used = values(self.params)
        self.flat: Tensor = torch.zeros(used + -used % multiple_of, dtype=first.dtype.to_real(), device=first.device)
        self._lay_out(used)

    @classmethod
    def of(cls, x: Tensor, params: Iterable[Tensor] = ()) -> "Bucket":
        """Return a bucket that shares the memory of the flat tensor `x`, which holds `params` one after another."""
        if tensor("x", x, floating=True).dim() != 1:
            raise ValueError(message("x", "a flat tensor, of shape (n,)", x))
        bucket = cls.__new__(cls)
        listed = several("params", params, "a list of tensors")  # shards may be meta tensors
        bucket.params, bucket.flat = [instance("each of params", p, Tensor, "a list of tensors") for p in listed], x
        if (used := values(bucket.params)) > x.numel():
            raise ValueError(f"params hold {used} values, and x {x.numel()}: {describe(x)}")
        bucket._lay_out(used if bucket.params else x.numel())
        return bucket

    def _lay_out(self, used: int) -> None:
        self.views: list[Tensor] = [view.data for view in views(self.flat, self.params)]
        self.padding: Tensor = self.flat[used:]
        # Zeros are copied together with the values: setting the padding to zero would take a second launch on a GPU.
        self.zeros: Tensor | None = torch.zeros_like(self.padding) if self.padding.numel() else None

    def __repr__(self) -> str:
        padding, kind = self.padding.numel(), f"{self.flat.dtype} on {self.flat.device}".removeprefix("torch.")
        padded, n = f", {padding} of them padding" * (padding > 0), len(self.params)
        return f"<Bucket of {n} parameter{'s' * (n != 1)}: {self.flat.numel():,} values{padded}, {kind}>"

    @torch.no_grad()
    def load(self, what: What) -> Tensor:
        """Copy the gradients or the weights to `flat`, and return it. A gradient of None counts as zero."""
        if type(what) is not str or what not in WHAT:  # a call costs in each step
            one_of("what", what, WHAT)
        if what == "grad":
            return self._load_gradients([p.grad for p in self.params])
        return self._copy(self.flat, zip(self.views, map(local, self.params), strict=True))

    def _load_gradients(self, grads: Sequence[Tensor | None], beside: Sequence[Pair] = ()) -> Tensor:
        """Copy the gradients `grads` to `flat`, and the pairs `beside` in the same launch; return `flat`.

        `grads` is passed because a lane must not read `p.grad`: the user may set it to None after a failed backward.
        """
        absent, pairs = [], [*beside]
        for view, grad in zip(self.views, grads, strict=True):
            if grad is None:
                absent.append(view)
            elif not is_view(grad, view):
                if hasattr(grad, "to_local"):
                    raise TypeError("a bucket cannot hold a sharded gradient (a DTensor); use bk.interop.fsdp")
                if grad.layout is not torch.strided:
                    raise TypeError(
                        "a bucket cannot hold a sparse gradient; use sparse=False in the embedding, or leave it out "
                        "with where="
                    )
                pairs.append((view, grad.detach()))
        if absent:
            torch._foreach_zero_(absent)
        return self._copy(self.flat, pairs)

    @torch.no_grad()
    def now(self) -> Tensor:
        """Return the current weights in a new flat tensor. `flat` does not change."""
        flat = torch.empty_like(self.flat)
        return self._copy(flat, zip(views(flat, self.params), map(local, self.params), strict=True))

    def _copy(self, flat: Tensor, pairs: Iterable[Pair]) -> Tensor:
        """Copy the `pairs` of tensors, and zeros to the padding of `flat`, in one launch; return `flat`."""
        padded = [] if self.zeros is None else [(flat[flat.numel() - self.zeros.numel() :], self.zeros)]
        if every := [*pairs, *padded]:
            to, source = zip(*every, strict=True)
            torch._foreach_copy_(to, source)
        return flat

    @torch.no_grad()
    def store(self, what: What, only: Sequence[bool] | None = None) -> None:
        """Copy `flat` to the weights, or make the gradients views of `flat`.

        A gradient of `backward(create_graph=True)` keeps its graph.

        Args:
            what: "grad" or "data".
            only: for each parameter, whether to store it; None for all.
        """
        if type(what) is not str or what not in WHAT:
            one_of("what", what, WHAT)
        if only is not None and [*map(type, several("only", only, "a list of bool"))] != [bool] * len(self.params):
            raise ValueError(message("only", f"as many bool as there are parameters, {len(self.params)}", only))
        params, views = self.params, self.views
        if only is not None:
            params, views = list(compress(params, only)), list(compress(views, only))
        if what == "grad":
            for p, view in zip(params, views, strict=True):
                grad = p.grad
                if grad is not None and grad.requires_grad:  # a second backward goes through it
                    grad.data = view
                elif not is_view(grad, view):
                    p.grad = view
        elif params:
            torch._foreach_copy_(list(map(local, params)), views)


class Span(NamedTuple):
    """A part of a flat tensor that begins at index `at`, with the shape and the strides of its view."""

    at: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        """Return the index after the last value of this part."""
        return self.at + self.shape.numel()

    def of(self, flat: Tensor) -> Tensor:
        """Return the view of this part of `flat`."""
        return flat[self.at : self.end].as_strided(self.shape, self.stride)


@torch.no_grad()
def local(x: Tensor) -> Tensor:
    """Return this rank's shard of `x`, or a detached `x` if it is not sharded. The result shares the memory of `x`."""
    shard = getattr(x, "to_local", None)
    return x.detach() if shard is None else shard()


def values(params: Iterable[Tensor]) -> int:
    """Return how many values the parameters take in a flat tensor; a complex number takes two."""
    return sum(local(p).numel() * (1 + p.is_complex()) for p in params)


def pieces(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return consecutive views of `flat` with the shapes of `like`; (*x.shape, 2) for a complex x in a real `flat`.

    The view of a tensor in a dense memory format (such as channels_last) has this format, so that copies are contiguous
    and a gradient has the layout that autograd expects.
    """
    found, at = [], 0
    for x in like:
        x = local(x) if hasattr(x, "to_local") else x  # a tensor that is not sharded has its shape and stride at hand
        shape, stride = x.shape, x.stride()
        if x.is_complex() and not flat.is_complex():
            shape, stride = torch.Size([*shape, 2]), (*(2 * step for step in stride), 1)
        piece = flat[at : at + shape.numel()]
        at += shape.numel()
        found.append(piece.as_strided(shape, stride) if is_dense(x) else piece.view(shape))
    return found


def views(flat: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the `pieces` of `flat`, but a complex view for each complex tensor."""
    every = zip(pieces(flat, like), like, strict=True)
    return [torch.view_as_complex(piece) if x.is_complex() else piece for piece, x in every]


def real(x: Tensor) -> Tensor:
    """Return a complex tensor as a view of real pairs, (*x.shape, 2); return any other tensor unchanged.

    A conjugate view gives the stored pairs, not conjugated: the mean of conjugates is the conjugate of the mean.
    """
    return torch.view_as_real(x.conj() if x.is_conj() else x) if x.is_complex() else x


def check_averaged(name: str, x: Tensor) -> None:
    if x.dtype not in AVERAGED:
        raise TypeError(f"{name} is of dtype {x.dtype}, which cannot be averaged; keep it in bfloat16 or a wider dtype")


def check_apart(params: Sequence[Tensor]) -> None:
    """Raise a ValueError if two dense `params` share memory, or values of an expanded one do: writes would collide."""
    here = [local(p) for p in params]
    for p in here:
        if any(n > 1 and not s for n, s in zip(p.shape, p.stride(), strict=True)) and p.numel():
            raise ValueError(f"params have separate memory, but values of {describe(p)} share memory: it was expanded")
    dense = [p for p in here if is_dense(p)]  # others may be interleaved without sharing memory
    for _, i, *_ in (group for group in sharing(dense) if len(group) > 1):
        raise ValueError(f"params have separate memory, but {describe(dense[i])} shares memory with another one")


def is_view(grad: Tensor | None, view: Tensor) -> bool:
    """Return whether a gradient has the address, strides and dtype of `view`, a view of a bucket."""
    if grad is None or grad.layout is not torch.strided:
        return False
    return grad.data_ptr() == view.data_ptr() and grad.stride() == view.stride() and grad.dtype == view.dtype


def split(
    params: Sequence[Tensor], bucket_bytes: int, least: int | None = None, apart: Mapping[Tensor, int] = {}
) -> list[list[Tensor]]:
    """Return the parameters in groups of at most `bucket_bytes`, in the reverse order of `params` (backward's order).

    The parameters of a group have the same dtype, device and number in `apart`. With `apart`, groups are sorted by the
    time when backward completes them. A parameter larger than `bucket_bytes` is a group of one parameter.

    With `least`, the first group and the last groups are about half as large: the network has work sooner, and less is
    left when backward has ended. A group of less than half of `least` takes the next parameter, however large.
    """
    groups: list[list[Tensor]] = []
    open_: dict[Any, tuple[list[Tensor], int, int]] = {}  # {kind: (group being filled, its bytes, its size)}
    left: dict[Any, int] = {}  # {kind: bytes that are in no group yet}
    kinds = [(p.dtype, p.device, apart.get(p)) for p in params]
    for p, kind in zip(params, kinds, strict=True):
        left[kind] = left.get(kind, 0) + p.nbytes
    for p, kind in zip(reversed(params), reversed(kinds), strict=True):
        group, used, size = open_.get(kind, ([], 0, 0))
        full = used + p.nbytes > bucket_bytes and 2 * used >= (least or 0)
        if not group or full or used + min(p.nbytes, 1) > size:
            size = bucket_bytes
            if least is not None:  # half of it for the first group, or half of what is left; no small rest
                size = max(least, bucket_bytes // 2, left[kind] // 2 if kind in open_ else 0)
                size = min(bucket_bytes, left[kind] if 2 * left[kind] < 3 * size else size)
            group, used = [], 0
            groups.append(group)
        group.append(p)
        open_[kind] = group, used + p.nbytes, size
        left[kind] -= p.nbytes
    if apart:  # a group that was begun first may be complete last, and must not delay the other groups
        place = {p: i for i, p in enumerate(params)}
        groups.sort(key=lambda group: -place[group[-1]])
    return groups
