"""The methods by which torch calls a process group: by old names and new, from Python and from C++.

A method that is missing here would reach the inner group's backend without a word.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from ..comm import Comm
from ..compressors import Compressor
from . import exchanges

Group: Any = dist.ProcessGroup
# torch 2.13 renamed these; older versions have only the old names.
GATHER = "all_gather_single" if hasattr(Group, "all_gather_single") else "_allgather_base"
SCATTER = "reduce_scatter_single" if hasattr(Group, "reduce_scatter_single") else "_reduce_scatter_base"
ALL_TO_ALL = "all_to_all_single" if hasattr(Group, "all_to_all_single") else "alltoall_base"
SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


@dataclass(frozen=True)
class Call:
    """A call of a collective.

    Attributes:
        operation: its name in a policy, or that of a method that is always exact.
        outs: the tensors that it fills.
        whole: those that are reduced, scattered or gathered, for their size.
        passed: the methods of the inner group that do it exactly, and their arguments.
        compressed: functions of a compressor and a `Comm` that do it compressed; none, if it is always exact.
        op: of a reduction.
        unlike: why it must be exact, if its tensors are of different sizes.
    """

    operation: str
    outs: Sequence[Tensor]
    whole: Sequence[Tensor]
    passed: Sequence[tuple[str, Sequence[Any]]]
    compressed: Sequence[Callable[[Compressor | None, Comm], None]] = ()
    op: Any = None
    unlike: str = ""


class Methods(Group):  # type: ignore[misc]
    """A process group that launches its collectives as calls."""

    _launch: Callable[[Call], Any]

    def allreduce(self, tensors: Any, opts: Any = SUM, timeout: Any = None) -> Any:
        xs, op = listed(tensors), getattr(opts, "reduceOp", opts)
        passed = [("allreduce", ([x], *given(opts, timeout))) for x in xs]
        compressed = [partial(exchanges.all_reduce, x, op == AVG) for x in xs]
        return self._launch(Call("all_reduce", xs, xs, passed, compressed, op))

    def allreduce_coalesced(self, tensors: Any, opts: Any = SUM) -> Any:
        return self.allreduce(tensors, getattr(opts, "reduceOp", opts))

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter_single_coalesced([out], [x], opts)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> Any:
        op = getattr(opts, "reduceOp", SUM)
        pairs = list(zip(outs, xs, strict=True))
        passed = [(SCATTER, (out, x, *given(opts))) for out, x in pairs]
        compressed = [partial(exchanges.reduce_scatter, out, x, op == AVG) for out, x in pairs]
        return self._launch(Call("reduce_scatter", outs, xs, passed, compressed, op))

    def reduce_scatter(self, outs: Any, ins: Any, opts: Any = SUM, timeout: Any = None) -> Any:
        op, out, parts = getattr(opts, "reduceOp", opts), listed(outs)[0], ins if isinstance(outs, Tensor) else ins[0]
        passed = [("reduce_scatter", (outs, ins, *given(opts, timeout)))]
        compressed = [partial(exchanges.reduce_scatter, out, parts, op == AVG)]
        return self._launch(Call("reduce_scatter", [out], parts, passed, compressed, op, unlike(parts)))

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        return self.all_gather_single_coalesced([out], [x], opts)

    def all_gather_single_coalesced(self, outs: list[Tensor], xs: list[Tensor], opts: Any = None) -> Any:
        pairs = list(zip(outs, xs, strict=True))
        passed = [(GATHER, (out, x, *given(opts))) for out, x in pairs]  # gloo has no coalesced one
        compressed = [partial(exchanges.all_gather, out, x) for out, x in pairs]
        return self._launch(Call("all_gather", outs, outs, passed, compressed))

    def allgather(self, outs: Any, ins: Any, opts: Any = None) -> Any:
        rows, xs = ([outs], [ins]) if isinstance(ins, Tensor) else (outs, ins)
        filled = [x for row in rows for x in row]
        passed = [("allgather", ([row], [x], *given(opts))) for row, x in zip(rows, xs, strict=True)]
        compressed = [partial(exchanges.all_gather, row, x) for row, x in zip(rows, xs, strict=True)]
        return self._launch(Call("all_gather", filled, filled, passed, compressed, unlike=unlike(*rows)))

    def allgather_coalesced(self, outs: list[list[Tensor]], ins: list[Tensor], opts: Any = None) -> Any:
        return self.allgather([list(rows) for rows in zip(*outs, strict=True)], ins, opts)

    def all_to_all_single(self, out: Tensor, x: Tensor, there: Any, here: Any, opts: Any = None) -> Any:
        passed = [(ALL_TO_ALL, (out, x, there, here, *given(opts)))]
        outs, ins = parts(out, there, self.size()), parts(x, here, self.size())
        return self._launch(Call("all_to_all", [out], [x], passed, [partial(exchanges.all_to_all, outs, ins)]))

    def alltoall(self, outs: list[Tensor], ins: list[Tensor], opts: Any = None) -> Any:
        passed = [("alltoall", (outs, ins, *given(opts)))]
        return self._launch(Call("all_to_all", outs, ins, passed, [partial(exchanges.all_to_all, outs, ins)]))

    # The names before torch 2.13
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _exact(name: str) -> Callable[..., Any]:
    """Return the method of a collective that is always exact."""

    def method(self: Methods, *args: Any, opts: Any = None, timeout: Any = None) -> Any:
        tensors = [x for x in listed(args[0]) if isinstance(x, Tensor)] if args and name != "barrier" else []
        return self._launch(Call(name, tensors, tensors, [(name, (*args, *given(opts, timeout)))]))

    return method


for _name in ("broadcast", "reduce", "gather", "gather_single", "gather_into_tensor", "scatter", "barrier"):
    setattr(Methods, _name, _exact(_name))


def listed(tensors: Any) -> list[Any]:
    """Return tensors as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def given(*arguments: Any) -> list[Any]:
    """Return the arguments that are given."""
    return [each for each in arguments if each is not None]


def parts(x: Tensor, sizes: Sequence[int], n: int) -> Sequence[Tensor]:
    """Return the rows of `x` for each of n ranks: equally many, unless `sizes` says how many."""
    return x.split(list(sizes)) if len(sizes) else x.chunk(n) if len(x) else [x] * n


def unlike(*rows: Sequence[Tensor]) -> str:
    """Return why the tensors of a row cannot be gathered or scattered as one; "" if they can."""
    return "unequal sizes" if any(len({x.numel() for x in row}) > 1 for row in rows) else ""
