"""Means of flat tensors over all ranks: exact, compressed, and sparse."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, strided

from ..arguments import instance, message, several, tensor
from ..buckets import real
from ..comm import Comm, check_comm, times_, weighed
from ..compressors import Compressor, TopK, check_dense
from ..compressors.base import check_dtype
from ..compressors.formats import Blockwise
from ..kernels import operators
from ..kernels.cpu import DTYPES
from ..lanes import Phases, whole
from .one_kernel import mean_in_one_kernel_
from .transports import bytes_for, gathered, scattered, shared

P = ParamSpec("P")
Tensors = TypeVar("Tensors", bound=Tensor | Sequence[Tensor])


def on_flat(primitive: Callable[Concatenate[Tensor, P], Tensor]) -> Callable[Concatenate[Tensors, P], Tensors]:
    """Let a primitive for a contiguous 1-D tensor overwrite any tensor or list: a message for each dtype and device."""

    @wraps(primitive)
    def wrapped(x: Tensors, *args: P.args, **options: P.kwargs) -> Tensors:
        if torch.is_grad_enabled():
            with torch.no_grad():
                return wrapped(x, *args, **options)
        dense = isinstance(x, Tensor) and x.layout is strided and x.is_contiguous()
        if isinstance(x, Tensor) and dense and x.dtype in DTYPES and not x.is_meta:
            primitive(x.view(-1), *args, **options)  # as a stage calls it
            return x
        listed = [x] if isinstance(x, Tensor) else several("x", x, "a tensor or a list of tensors", ordered=True)
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for each in (real(each) if isinstance(each, Tensor) else each for each in listed):
            check_averageable(each)
            alike.setdefault((each.dtype, each.device), []).append(each)
        for first, *others in alike.values():
            if not others and first.is_contiguous():
                primitive(first.view(-1), *args, **options)
            else:
                tensors = [first, *others]
                flat = primitive(torch.cat([t.detach().flatten() for t in tensors]), *args, **options)
                parts = flat.split([t.numel() for t in tensors])
                torch._foreach_copy_(tensors, [p.view(t.shape) for p, t in zip(parts, tensors, strict=True)])
        return x

    return cast(Callable[Concatenate[Tensors, P], Tensors], wrapped)


def check_averageable(x: Tensor) -> None:
    """Raise a TypeError unless `x` is a dense floating tensor; a ValueError if it was expanded or has no data."""
    check_dtype("x", tensor("x", x, floating=True).dtype)
    if not x.is_contiguous() and any(n > 1 and not s for n, s in zip(x.shape, x.stride(), strict=True)):
        raise ValueError(message("x", "a tensor whose values lie apart", x) + "; it was expanded: clone it")


# A piece of a large tensor is compressed while the previous piece is on the wire. Pieces of fewer than 2²⁰ values would
# cost more in calls and messages than the overlap gains. More than eight pieces gain nothing.
PIECES, PIECE_VALUES = 8, 1 << 20
# Rows are cut in pieces at multiples of BLOCKS, so that only the last piece has a block that is not full. Short rows
# are cut at multiples of LINE, so that kernels move whole cache lines.
BLOCKS, LINE = 1 << 13, 64


def pieces_of(values: int, by_nccl: bool) -> int:
    """Return the number of pieces for `values` values: 1 over NCCL, where overlap with the codec gains little."""
    return 1 if by_nccl else max(1, min(PIECES, values // PIECE_VALUES))


@lru_cache(maxsize=1024)  # the lengths of a model's buckets are few
def row_pieces(length: int, rows: int, by_nccl: bool) -> tuple[slice, ...]:
    """Return the slices that cut a row of `length` values into pieces, if `rows` rows are sent together."""
    width = -(-length // pieces_of(length * rows, by_nccl))
    width += -width % (BLOCKS if width >= 2 * BLOCKS else LINE)
    return tuple(slice(start, min(start + width, length)) for start in range(0, length, width or 1))


@on_flat
def mean_(x: Tensor, comm: Comm) -> Tensor:
    """Average `x` over all ranks:  x ← (1/n) Σ_r x_r.

    Multiplies `x` by 1/n, then calls torch's all-reduce in the dtype of `x`, as `DistributedDataParallel` does. In one
    kernel (`Comm(kernels=True)`) the products are added in fp32, in the order of the ranks. With `comm.weighted(w)`,
    the factor is w_r / Σ_j w_j, and NCCL sends the products.

    Args:
        x: a dense floating tensor of any shape (else a TypeError), or a list of them; overwritten and returned.
        comm: the group. With one rank nothing happens.
    """
    check_comm(comm)
    one_hop = fits_one_hop(x.numel(), x.nbytes, comm.size)
    weighted = comm._weights is not None
    if comm.size > 1 and (weighted or mean_in_one_kernel_(x, None, comm, None, one_hop) is None):
        comm.all_reduce(times_(x, comm._fraction))
    return x


GATHERING = 1 << 16  # the first tag of the second hop: messages of both hops may be in the air at the same time


def mean_of_shards(x: Tensor, codec: Compressor, comm: Comm, residual: Tensor | None) -> Tensor:
    """Average the flat `x`, of any length, over all ranks in two hops. The last shard is padded with zeros."""
    whole(_in_two_hops(x, codec, comm, residual))
    return x


def _in_two_hops(x: Tensor, codec: Compressor, comm: Comm, residual: Tensor | None, ok: Tensor | None = None) -> Phases:
    """Do the same as `mean_of_shards`, in phases for one piece on a CPU. Set `ok` to whether the mean is finite."""
    n, rank, length = comm.size, comm.rank, x.numel()
    if length % n:
        padded = torch.cat([x, x.new_zeros(-length % n)])
        lost = None if residual is None else torch.empty_like(padded, dtype=torch.float32)
        yield from _in_two_hops(padded, codec, comm, lost, ok)
        x.copy_(padded[:length])
        if residual is not None and lost is not None:
            residual.copy_(lost[:length])
        return
    # `parts` has, for each piece, its values in one row for each rank, and their residual.
    runs = [slice(n * part.start, n * part.stop) for part in row_pieces(length // n, n, comm._by_nccl(x.device))]
    parts = [(x[run].view(n, -1), None if residual is None else residual[run].view(n, -1)) for run in runs]
    # For each piece, a rank receives its own shard from every rank, and then the averaged shard of each rank.
    shards, means = ([bytes_for(n, rows.shape[1], codec, x.device) for rows, _ in parts] for _ in range(2))

    def packed(i: int, ranks: slice) -> Tensor:
        rows, lost = parts[i]
        here, key = None if lost is None else lost[ranks], comm.key(i * n + (ranks.start or 0))
        return codec._unchecked_compress(rows[ranks], here, key)

    def mean(i: int) -> Tensor:
        rows, lost = parts[i]
        own, key = None if lost is None else lost[rank], comm.key((len(parts) + i) * n)
        if checking is not None:
            form, drawn = checking.form.name, checking._drawn(key)
            return operators.reduce(shards[i], form, rows.shape[1], checking.block, own, drawn, ok)
        return codec._unchecked_reduce(shards[i], rows.shape[1], own, key)

    checking = codec if ok is not None and isinstance(codec, Blockwise) else None  # of one piece
    comm.agree_on_shares()
    averaged: Iterable[Tensor] = map(mean, scattered(comm, shards, packed))
    if len(parts) == 1 and x.is_cpu:  # several pieces overlap each other
        averaged = [*averaged]
        yield x
    for ranks, i in gathered(comm, means, averaged, tag=GATHERING):
        rows = parts[i][0][ranks]
        if checking is not None:
            operators.decompress_(rows, checking.form.name, means[i][ranks], checking.block, ok)
        else:
            codec._unchecked_decompress(means[i][ranks], rows.shape[1], rows.dtype, rows)


# Up to this many bytes per rank are sent in one hop: at 100 Mb/s they take 2.6 ms, about as long as a second hop.
ONE_HOP_BYTES = 1 << 15
ONE_HOP_VALUES = 1 << 16  # a rank decompresses fewer in one hop: with few bits a value, many ranks have more to do


@on_flat
def compressed_mean_(x: Tensor, compressor: Compressor, comm: Comm, residual: Tensor | None = None) -> Tensor:
    """Average `x` over all ranks, sending only compressed values.

    For N values on n ranks, with c(N) the bytes of N packed values:

        few     (n − 1) c(N) ≤ 32 KiB and n N < 2¹⁶. In one hop: every rank sends all its compressed values to all other
                ranks. It averages the decompressed values of all ranks in fp32, in the order of the ranks.
        many    In two hops: every rank receives one compressed shard from all ranks, averages it in fp32, compresses
                the mean and sends it to all ranks. Each rank sends 2 (n − 1) c(N/n) bytes: with an 8-bit compressor
                2 (n − 1)/n bytes per value, plus headers.

    Every rank decodes the same bytes, so the results are bitwise equal. If packed shards would take more bytes than the
    values themselves, as with very short tensors, this is `mean_`.

    Args:
        x: a floating tensor of any shape, or a list of them in one dtype; overwritten and returned.
        compressor: such as `compressors.MinMaxUInt8()`.
        comm: the group. With one rank, `x` is unchanged and the residual is 0.
        residual: fp32, as long as `x`; overwritten by the compression error of this rank's contribution, such that
            Σ_r residual_r = Σ_r x_r − n · result, up to the rounding of the result. In one hop it is x − Q(x). In two
            hops the owner of a shard adds n times the error of the second compression. With `comm.weighted(w)`, the
            contribution is `comm.share` times x.

    Raises:
        TypeError: a tensor is not floating, or is sparse; `compressor` is not dense.
        ValueError: `residual` is not contiguous, not fp32, or not as long as `x`.
    """
    check_comm(comm)
    check_dense("compressor", compressor)
    if residual is not None:
        check_residual(residual, x)
        residual = residual.view(-1)
    whole(mean_in_phases(x, compressor, comm, residual, check=False))
    return x


def mean_in_phases(x: Tensor, codec: Compressor, comm: Comm, residual: Tensor | None, check: bool = True) -> Phases:
    """Average the flat `x` as `compressed_mean_` does, in two phases if it is one piece in two hops on a CPU.

    With `check`, return whether the result is finite for `Blockwise` in two hops over NCCL, or one kernel; else None.
    """
    if comm._weights is not None:
        wide, comm = weighed(x, comm)
        ok = yield from mean_in_phases(wide, codec, comm, residual, check)
        x.copy_(wide)
        return ok
    if not compresses(x, codec, comm, comm.size) or comm.size == 1:
        if residual is not None:
            residual.zero_()
        mean_(x, comm)
        return None
    one_hop = in_one_hop(x.numel(), codec, comm.size)
    if (good := mean_in_one_kernel_(x, codec, comm, residual, one_hop)) is not None:
        return good.all() if check else None
    if one_hop:
        _mean_of_rows(x, codec, comm, residual)
    else:
        checks = check and comm._by_nccl(x.device) and isinstance(codec, Blockwise)
        ok = torch.empty((), dtype=torch.bool, device=x.device) if checks else None
        yield from _in_two_hops(x, codec, comm, residual, ok)
        return ok
    return None


def check_residual(residual: Tensor, x: Tensor) -> None:
    instance("residual", residual, Tensor, "a tensor")
    if residual.dtype != torch.float32 or residual.numel() != x.numel() or not residual.is_contiguous():
        what = f"a contiguous float32 tensor of {x.numel()} values, as many as are averaged"
        raise ValueError(message("residual", what, residual))


def pays(values: int, value_bytes: int, compressor: Compressor, size: int) -> bool:
    """Return whether `values` values, in `size` equal messages, take no more bytes packed than uncompressed."""
    shard = -(-values // size)
    return values > 0 and compressor._unchecked_row_bytes(shard) <= shard * value_bytes


@lru_cache(maxsize=1024)
def fewer(values: int, ranks: int) -> str:
    some, are = ("1 value", "is") if values == 1 else (f"{values:,} values", "are")
    return f"{some} on {ranks} ranks {are} fewer bytes uncompressed"


@lru_cache(maxsize=1024)
def longer(sent: int, plain: int) -> str:
    return f"{sent:,} bytes, and {plain:,} uncompressed"


def compresses(x: Tensor, compressor: Compressor, comm: Comm, rows: int) -> bool:
    """Return whether `x`, in `rows` messages of equal length, is sent compressed; note the answer for the report."""
    if pays(x.numel(), x.itemsize, compressor, rows):
        comm.note(compressor, compressor)
        return True
    if x.numel():
        comm.note(compressor, x.dtype, fewer(x.numel(), comm.size))
    return False


def in_one_hop(values: int, compressor: Compressor, size: int) -> bool:
    return fits_one_hop(values, compressor._unchecked_row_bytes(values), size)


def fits_one_hop(values: int, nbytes: int, size: int) -> bool:
    return (size - 1) * nbytes <= ONE_HOP_BYTES and size * values < ONE_HOP_VALUES


def _mean_of_rows(x: Tensor, codec: Compressor, comm: Comm, residual: Tensor | None) -> Tensor:
    """Average in one hop:  x ← (1/n) Σ_r Q(x_r), and residual ← x − Q(x)."""
    n, N = comm.size, x.numel()
    rows, lost = bytes_for(n, N, codec, x.device), None if residual is None else residual.view(1, N)
    comm.agree_on_shares()
    shared(comm, rows, codec._unchecked_compress(x.view(1, N), lost, comm.key()))
    total, *others = codec._unchecked_decompress(rows, N, torch.float32, None).unbind()
    for row in others:  # one by one, because torch's sums have an order of their own
        total += row
    return x.copy_(total.div_(total.new_full((1,), n)))


@on_flat
def sparse_mean_(x: Tensor, compressor: Compressor, comm: Comm, residual: Tensor | None = None) -> Tensor:
    """Average the values that a sparse compressor keeps of each rank's `x`:  x ← (1/n) Σ_r keep(x_r).

    Contributions are gathered, and added one rank after another, so that the results are bitwise equal. A rank sends
    (n − 1) times the packed bytes.

    Args:
        x, comm: as in `compressed_mean_`.
        compressor: such as `compressors.TopK(0.01)`.
        residual: fp32, with as many values as `x`; overwritten by the part of `x` that this rank did not send.

    Raises:
        TypeError: a tensor is not floating, or is sparse.
        ValueError: `residual` is not contiguous or not fp32, or has another number of values than `x`.
    """
    check_comm(comm)
    instance("compressor", compressor, Compressor, "a compressor such as TopK(0.01)")
    if residual is not None:
        check_residual(residual, x)
    sparse_mean_with_check_(x, compressor, comm, residual)
    return x


def sparse_mean_with_check_(x: Tensor, compressor: Compressor, comm: Comm, residual: Tensor | None) -> Tensor | None:
    """Average the flat `x` as `sparse_mean_` does. Return None or, for `TopK` on a GPU, whether the mean is finite."""
    if comm._weights is not None:
        wide, comm = weighed(x, comm)
        ok = sparse_mean_with_check_(wide, compressor, comm, residual)
        x.copy_(wide)
        return ok
    others = comm.size - 1
    sent, plain = others * compressor._unchecked_row_bytes(x.numel()), 2 * others * x.nbytes // comm.size
    comm.note(compressor, compressor, longer(sent, plain) if sent >= plain > 0 else "")
    if comm.size == 1 or x.numel() == 0:
        if residual is not None:
            residual.zero_()
        return None
    row, lost = x.view(1, -1), None if residual is None else residual.view(1, -1)
    if x.is_cuda and isinstance(compressor, TopK):
        ok = torch.empty((), dtype=torch.bool, device=x.device)
        compressor._mean_of(comm.all_gather(compressor._compress_with_check(row, lost, comm.key(), ok)), x, ok)
        return ok
    compressor._mean_of(comm.all_gather(compressor._unchecked_compress(row, lost, comm.key())), x)
    return None
