"""Collectives with a backward pass. Messages of both passes may be compressed.

    forward           backward
    all-gather        reduce-scatter of the sum
    reduce-scatter    all-gather
    all-to-all        all-to-all, with its splits swapped
    all-reduce        identity
    identity          all-reduce

The gradients are those of the sum of all ranks' losses. All-reduce and identity are for tensor-parallel blocks, where
the loss is equal on all ranks and counts once. The gradient of rounding is the identity.

All collectives are one operator of torch. It has a fake implementation, so that `torch.compile(fullgraph=True)` records
it. It looks up groups and compressors by a name, because a graph cannot hold them.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..arguments import describe, integer, message, several, tensor
from ..comm import Comm, check_comm
from ..compressors import Compressor, check_dense
from .collectives import check_arguments, compressed_all_gather, compressed_reduce_scatter, output
from .compressed import compressed_mean_, fewer, pays, row_pieces
from .one_kernel import ALL_TO_ALL, exchange, share_memory
from .transports import bytes_for, exchanged, scattered

Sizes = Sequence[int] | None


@torch.no_grad()
def compressed_all_to_all(
    x: Tensor,
    compressor: Compressor | None,
    comm: Comm,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Send a part of `x` to each rank, compressed, and return the parts that all ranks sent to this rank.

        out = [Q(part r of x_0); Q(part r of x_1); … ; Q(part r of x_{n−1})]  on rank r, (Σ output_split_sizes, …)

    A rank's part for itself is not sent, and is exact. Each rank sends N_r values to each other rank r, in
    Σ_r c(N_r) bytes. The values are sent in pieces: a piece is compressed while another piece is on the wire.

    Args:
        x, compressor, comm: `x` is (rows, …). Its dtype and shape, except the first dimension, are equal on all ranks.
        output_split_sizes: the number of rows from each rank. It must match the `input_split_sizes` of the other ranks.
        input_split_sizes: the number of rows of `x` for each rank, in the order of ranks; 0 is allowed. Give both sizes
            or neither; without them, all parts have rows / size rows.
        out: has as many values as the result; it shares no memory with `x`.
    """
    check_arguments(x, compressor, comm)
    values, n, rank = x.detach().reshape(-1).contiguous(), comm.size, comm.rank
    sends, receives = splits_of(x, output_split_sizes, input_split_sizes, comm)
    result = output(out, x, (sum(receives), *x.shape[1:]))
    if share_memory(result, values):
        raise ValueError("out shares memory with x: what arrives would overwrite what is still to be sent")
    landed, width = result.detach().view(-1), math.prod(x.shape[1:])
    there, here = ([width * count for count in each] for each in (sends, receives))
    if n == 1 or not _exchange(values, landed, there, here, output_split_sizes is None, compressor, comm):
        landed.split(here)[rank].copy_(values.split(there)[rank])
    return result


def _exchange(
    x: Tensor, out: Tensor, sends: list[int], receives: list[int], alike: bool, compressor: Compressor | None,
    comm: Comm,
) -> bool:  # fmt: skip
    """Send each rank its part of `x`, and fill the parts of `out`. Return whether this rank's own part is there, too.

    If all parts have the same length (`alike`), few values are compressed in one call, together with this rank's own
    part, because this is faster than a call for each part.
    """
    n, device, dtype = comm.size, x.device, x.dtype
    leaving, coming = x.split(sends), out.split(receives)
    peers = [rank for rank in range(n) if rank != comm.rank]

    def packs(values: int) -> bool:
        return compressor is not None and pays(values, x.itemsize, compressor, 1)

    def cut(part: Tensor) -> list[tuple[Tensor, Compressor | None]]:
        """Return (piece, its compressor or None) for each piece of a part. Sender and receiver compute the same."""
        if not packs(part.numel()):
            return [(part, None)] if part.numel() else []
        return [(part[piece], compressor) for piece in row_pieces(part.numel(), n, comm._by_nccl(device))]

    sent, heard = ({p: cut(parts[p]) for p in peers} for parts in (leaving, coming))
    pieces = [each for part in (*sent.values(), *heard.values()) for each in part]
    plain = [piece.numel() for piece, form in pieces if form is None]
    if compressor is not None and len(plain) < len(pieces):
        comm.note(compressor, compressor)
    if compressor is not None and plain:
        comm.note(compressor, dtype, fewer(max(plain), n))
    comm.agree_on_shares()
    found = exchange(ALL_TO_ALL, out, x, compressor, comm, sends, receives, alike=alike, packs=packs)
    if found is not None:  # what has no room there is left
        sent = {p: each for p, each in sent.items() if sends[p] in found[1]}
        heard = {p: each for p, each in heard.items() if receives[p] in found[1]}
    elif compressor is not None and alike and not plain and len(pieces) == 2 * (n - 1):
        rows = x.view(n, -1)
        packed = bytes_for(n, rows.shape[1], compressor, device)
        codes = compressor._unchecked_compress
        for _ in scattered(comm, [packed], lambda i, ranks: codes(rows[ranks], None, comm.key(0))):
            compressor._unchecked_decompress(packed, rows.shape[1], dtype, out.view(n, -1))
        return False

    def outgoing(p: int) -> Iterator[Tensor]:
        for i, (piece, form) in enumerate(sent[p]):
            yield piece if form is None else form._unchecked_compress(piece.view(1, -1), None, comm.key(i * n + p))

    incoming = {
        p: [piece if form is None else bytes_for(1, piece.numel(), form, device) for piece, form in part]
        for p, part in heard.items()
    }
    for p, i in exchanged(comm, {p: outgoing(p) for p in sent}, incoming, device):
        piece, form = heard[p][i]
        if form is not None:
            form._unchecked_decompress(incoming[p][i], piece.numel(), dtype, piece.view(1, -1))
    return found is not None


def splits_of(x: Tensor, output: Sizes, input: Sizes, comm: Comm) -> tuple[list[int], list[int]]:
    """Return the number of rows of `x` for each rank, and the number of rows from each rank, or raise."""
    n = comm.size
    if (output is None) != (input is None):
        raise TypeError(
            "output_split_sizes and input_split_sizes are given both or neither; "
            f"they are {describe(output)} and {describe(input)}"
        )
    if output is None or input is None:
        if not x.dim() or x.shape[0] % n:
            raise ValueError(
                f"the first dimension of x is a multiple of {n} ranks if no splits are given, and x is {describe(x)}; "
                "give output_split_sizes and input_split_sizes"
            )
        return [x.shape[0] // n] * n, [x.shape[0] // n] * n
    sends, receives = sizes("input_split_sizes", input, n), sizes("output_split_sizes", output, n)
    if not x.dim() or sum(sends) != x.shape[0]:
        raise ValueError(f"input_split_sizes add up to the rows of x; they are {sends}, and x is {describe(x)}")
    if sends[comm.rank] != receives[comm.rank]:
        raise ValueError(f"rank {comm.rank} sends {sends[comm.rank]} rows for itself and takes {receives[comm.rank]}")
    return sends, receives


def sizes(name: str, values: Sequence[int], n: int) -> list[int]:
    listed = several(name, values, "a list of numbers of rows", ordered=True)
    if len(listed) != n:
        raise ValueError(message(name, f"a number of rows for each of {n} ranks", values))
    return [integer(f"each of {name}", value, 0) for value in listed]


_named: "WeakValueDictionary[str, Differentiable]" = WeakValueDictionary()
_numbers = itertools.count()


@dataclass(frozen=True, eq=False)
class Differentiable:
    """Collectives on activations, with a backward pass. Construct it outside of compiled functions.

        tokens = bk.primitives.Differentiable(comm, forward=MinMaxUInt8(), backward=MinMaxUInt8())
        heard = tokens.all_to_all(x, output_split_sizes, input_split_sizes)

    All ranks of the group call the same methods in the same order, and run the same backward passes. Methods take a
    floating tensor, return a new one, and raise the errors of the primitives that they call.

    Args:
        comm: the group.
        forward: the compressor for the forward pass; None sends uncompressed values.
        backward: the compressor of gradients, for the backward pass; None sends uncompressed values.
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
        return self._do("all_gather", x)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Return this rank's shard (k, …) of the sum of `x` (size · k, …) over all ranks. Backward: `all_gather`."""
        return self._do("reduce_scatter", x)

    def all_to_all(
        self, x: Tensor, output_split_sizes: Sequence[int] | None = None, input_split_sizes: Sequence[int] | None = None
    ) -> Tensor:
        """Send a part of `x` (rows, …) to each rank, and return the parts for this rank, in the order of the ranks.

        A rank's part for itself is exact. Splits are numbers of rows. Give both or neither: see
        `compressed_all_to_all`. Backward: `all_to_all` with the splits swapped.
        """
        if not torch.compiler.is_compiling():
            splits_of(tensor("x", x, floating=True), output_split_sizes, input_split_sizes, self.comm)
        return self._do("all_to_all", x, list(output_split_sizes or ()), list(input_split_sizes or ()))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of `x` over all ranks. Backward: the identity."""
        return self._do("all_reduce", x)

    def identity(self, x: Tensor) -> Tensor:
        """Return a copy of `x`. Backward: the sum over all ranks, sent with the compressor `backward`."""
        return self._do("identity", x)

    def _do(self, operation: str, x: Tensor, output: Sequence[int] = (), input: Sequence[int] = ()) -> Tensor:
        if not torch.compiler.is_compiling():  # an operator of torch would say it in its own words
            tensor("x", x, floating=True)
        return _collective(x, operation, self.comm.size, output, input, self._name, True)  # type: ignore[no-any-return]


def _found(name: str, forward: bool) -> tuple[Compressor | None, Comm]:
    """Return the compressor of a pass, and the group at a new round, so that random rounding differs between calls."""
    if name not in _named:
        raise RuntimeError("the Differentiable of this graph is gone; keep it as long as what was computed with it")
    found = _named[name]
    round = (found.comm._round or 0) + next(found._calls)
    comm = found.comm.for_flight(round, found.comm._step, 0, found._sent, found.comm._formats)
    return found.forward if forward else found.backward, comm


BACKWARD = {"all_gather": "reduce_scatter", "all_to_all": "all_to_all", "all_reduce": "identity"}
BACKWARD |= {there: here for here, there in BACKWARD.items()}


@torch.library.custom_op("baguakit::collective", mutates_args=())
def _collective(
    x: Tensor, operation: str, size: int, output: Sequence[int], input: Sequence[int], name: str, forward: bool
) -> Tensor:
    """Run a collective. `forward` is False in a backward pass, and True again in the backward of a backward pass."""
    if operation == "identity":
        return x.clone(memory_format=torch.contiguous_format)  # an operator cannot return its argument
    compressor, comm = _found(name, forward)
    if operation == "all_gather":
        return compressed_all_gather(x, compressor, comm)
    if operation == "reduce_scatter":
        return compressed_reduce_scatter(x, compressor, comm)
    if operation == "all_to_all":
        return compressed_all_to_all(x, compressor, comm, *((output, input) if output or input else ()))
    out = x.clone(memory_format=torch.contiguous_format)
    return comm.all_reduce(out) if compressor is None else compressed_mean_(out, compressor, comm).mul_(comm.size)


@_collective.register_fake
def _(x: Tensor, operation: str, size: int, output: Sequence[int], *_: Any) -> Tensor:
    if operation in ("all_reduce", "identity"):
        return x.new_empty(x.shape)
    rows = {"all_gather": size * x.shape[0], "reduce_scatter": x.shape[0] // size}
    return x.new_empty(rows.get(operation, sum(output) if output else x.shape[0]), *x.shape[1:])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep all arguments except the tensor, because the backward pass does not need its values."""
    ctx.arguments = inputs[1:]
    ctx.of = _named.get(inputs[-2])  # until the backward has run


def _back(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    operation, size, output, input, name, forward = ctx.arguments
    return _collective(grad, BACKWARD[operation], size, input, output, name, not forward), *[None] * 6


_collective.register_autograd(_back, setup_context=_keep)
