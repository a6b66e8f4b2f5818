"""Compressed collectives: weights, tokens and activations in fewer bytes, over one group of ranks.

N is the number of values of a tensor, n the number of ranks, and c(N) the bytes of N packed values.

    all-gather        each rank sends its N values                          (n − 1) c(N)
    reduce-scatter    each rank sends every other rank its shard            (n − 1) c(N/n)
    all-to-all        each rank sends N_r values to rank r                  Σ_r c(N_r)
    broadcast         all but the last rank of a chain send N values        c(N)    (few values: see its docstring)
    send              a rank sends its N values to one rank                 c(N)

The last column has the bytes that one rank sends. A few values, which would take more bytes packed, are sent
uncompressed. With one rank nothing is sent or rounded. All primitives of this module have these arguments:

    x            a dense floating tensor; only primitives whose name ends in `_` write to it
    compressor   a dense compressor, such as `compressors.MinMaxUInt8()`; None sends uncompressed values
    comm         the group
    out          a contiguous tensor in the dtype of `x`, for the result; None: the result is a new tensor

All ranks pass the same compressor, and tensors whose shapes and dtypes fit each other. A primitive does not check this:
over gloo a message of another length never arrives, and an uncompressed tensor of another length may end the process.
In a stage of an attachment, a rank with another compressor is found before anything is sent. An argument of a wrong
type raises a TypeError; a wrong value raises a ValueError.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..arguments import describe, instance, integer, tensor, truth
from ..comm import Comm, check_comm, check_peer, times_, weighed
from ..compressors import Compressor, check_dense, check_dtype
from .compressed import ONE_HOP_BYTES, check_averageable, check_residual, compresses, on_flat, row_pieces
from .one_kernel import rows_in_one_kernel, share_memory
from .transports import bytes_for, gathered, scattered


def check_arguments(x: Tensor, compressor: Compressor | None, comm: Comm) -> None:
    check_comm(comm)
    if compressor is not None:
        check_dense("compressor", compressor)
    check_dtype("x", tensor("x", x, floating=True).dtype)


def codec_of(x: Tensor, compressor: Compressor | None, comm: Comm, rows: int = 1) -> Compressor | None:
    """Return the compressor, or None if `rows` messages of `x` are shorter without it; note the choice for a report."""
    return compressor if compressor and compresses(x, compressor, comm, rows) and comm.size > 1 else None


def output(out: Tensor | None, x: Tensor, shape: Sequence[int]) -> Tensor:
    """Return `out`, or a new tensor of this shape if `out` is None. Raise if `out` does not fit `x` and `shape`."""
    if out is None:
        return x.new_empty(shape)
    instance("out", out, Tensor, "a tensor")
    values = math.prod(shape)
    if out.numel() != values or out.dtype != x.dtype or out.device != x.device or not out.is_contiguous():
        raise ValueError(f"out is contiguous, of {values} values of {x.dtype} on {x.device}, not {describe(out)}")
    return out


@torch.no_grad()
def compressed_send(x: Tensor, compressor: Compressor | None, comm: Comm, peer: int) -> None:
    """Send `x` to `peer`, compressed to c(N) bytes for N values, and wait until it has been sent.

    `peer`, another rank of `comm`, calls `compressed_receive_` with the same `compressor`, and a tensor that has the
    same number of values and the same dtype.
    """
    check_arguments(x, compressor, comm)
    check_peer(peer, comm.group)
    values, codec = x.detach().reshape(-1), codec_of(x, compressor, comm)
    if codec is None:
        works = [comm.send_later(values, peer)] if values.numel() else []
    else:
        parts = [values[part].view(1, -1) for part in row_pieces(values.numel(), 1, comm._by_nccl(x.device))]
        codes, key = codec._unchecked_compress, comm.key
        works = [comm.send_later(codes(row, None, key(i)), peer, i) for i, row in enumerate(parts)]
    for work in works:
        work.wait()


@torch.no_grad()
def compressed_receive_(x: Tensor, compressor: Compressor | None, comm: Comm, peer: int) -> Tensor:
    """Overwrite `x` with the tensor that `peer` sends by `compressed_send`, and return it:  x ← Q(x_peer).

    `x` has the size and dtype of the sent tensor. `compressor`, `comm` and `peer` are as in `compressed_send`.
    """
    check_arguments(x, compressor, comm)
    check_averageable(x)
    check_peer(peer, comm.group)
    codec, N = codec_of(x, compressor, comm), x.numel()
    values = x.detach().view(-1) if x.is_contiguous() else x.new_empty(N)
    if codec is None:
        if N:
            comm.receive_later(values, peer).wait()
    else:
        parts = [values[part].view(1, -1) for part in row_pieces(N, 1, comm._by_nccl(x.device))]
        packed = [bytes_for(1, part.numel(), codec, x.device) for part in parts]
        works = [comm.receive_later(each, peer, i) for i, each in enumerate(packed)]
        for part, each, work in zip(parts, packed, works, strict=True):
            work.wait()
            codec._unchecked_decompress(each, part.numel(), x.dtype, part)
    if not x.is_contiguous():
        x.detach().copy_(values.view(x.shape))
    return x


# A *link* is a part of LINK values. Each rank of the chain passes a link on while it receives the next, so the chain
# takes the time of c(N) bytes plus n − 2 links. A rank decodes a link while the next link is on the wire.
LINK, MOST_LINKS = 1 << 17, 256


@on_flat
def compressed_broadcast_(x: Tensor, compressor: Compressor | None, comm: Comm, source: int = 0) -> Tensor:
    """Overwrite `x` on all ranks with the rounded `x` of rank `source`, and return it:  x ← Q(x_source).

    Values are compressed once. All ranks, also the source, decode the same bytes, so the results are bitwise equal.

        few     (n − 1) c(N) ≤ 32 KiB. The source sends all its values to all other ranks: (n − 1) c(N) bytes.
        many    A chain begins at the source. Each rank but the last sends c(N) bytes to the next rank, in parts: a
                rank sends a part while it receives the next part.
        NCCL    its broadcast of the packed values.

    `x` may be a list of tensors in one dtype, overwritten at the source, too. `compressor`, `comm`: see this module.
    """
    check_arguments(x, compressor, comm)
    integer("source", source, 0, comm.size - 1)
    codec, n, N = codec_of(x, compressor, comm), comm.size, x.numel()
    if codec is None:
        return comm.broadcast(x, source) if N else x
    place, row = (comm.rank - source) % n, x.view(1, -1)
    if comm._by_nccl(x.device):
        packed = bytes_for(1, N, codec, x.device) if place else codec._unchecked_compress(row, None, comm.key())
        codec._unchecked_decompress(comm.broadcast(packed, source), N, x.dtype, row)
        return x
    heard, targets = (comm.rank - 1) % n, [(comm.rank + 1) % n] if place < n - 1 else []
    if (n - 1) * codec._unchecked_row_bytes(N) <= ONE_HOP_BYTES:
        heard, targets = source, [] if place else [(source + i) % n for i in range(1, n)]
    least = LINK * (4 if comm.flows > 1 else 1)  # flows divide messages of 256 KiB
    links = row.split(least * -(-N // (least * MOST_LINKS)), dim=1)
    comm.agree_on_shares()
    incoming = [bytes_for(1, link.numel(), codec, x.device) for link in links] if place else []
    receives = [comm.receive_later(each, heard, tag) for tag, each in enumerate(incoming)]
    sends = []
    for tag, link in enumerate(links):
        if place:
            receives[tag].wait()
        packed = incoming[tag] if place else codec._unchecked_compress(link, None, comm.key(tag))
        sends += [comm.send_later(packed, target, tag) for target in targets]
        codec._unchecked_decompress(packed, link.numel(), x.dtype, link)
    for work in sends:
        work.wait()
    return x


@torch.no_grad()
def compressed_all_gather(x: Tensor, compressor: Compressor | None, comm: Comm, out: Tensor | None = None) -> Tensor:
    """Return the tensors `x` (k, …) of all ranks, concatenated and rounded: (size · k, …).

        out = [Q(x_0); Q(x_1); … ; Q(x_{n−1})]

    All ranks decode the same bytes, so the results are bitwise equal. Each rank sends (n − 1) c(N) bytes for its N
    values, in pieces: a piece is compressed or decompressed while another piece is on the wire.

    `x` has one shape and dtype on all ranks. It may be a part of `out` (n N values). Scalars give a result (size,).
    `compressor` and `comm` are as in `compressed_send`.
    """
    check_arguments(x, compressor, comm)
    mine, n = x.detach().reshape(-1), comm.size
    result = output(out, x, (n * x.shape[0], *x.shape[1:]) if x.dim() else (n,))
    if not mine.numel():
        return result
    rows, codec = result.detach().view(n, -1), codec_of(result, compressor, comm, n)
    if rows_in_one_kernel(mine, codec, comm, rows.view(-1)):
        return result
    if codec is None:
        landed = comm.all_gather(mine)
        return landed.view(result.shape) if out is None and n > 1 else result.copy_(landed.view(result.shape))
    parts = row_pieces(mine.numel(), n, comm._by_nccl(x.device))
    incoming = [bytes_for(n, part.stop - part.start, codec, x.device) for part in parts]
    packed = (codec._unchecked_compress(mine[part].view(1, -1), None, comm.key(i)) for i, part in enumerate(parts))
    comm.agree_on_shares()
    for ranks, i in gathered(comm, incoming, packed):
        out_rows = rows[ranks, parts[i]]
        codec._unchecked_decompress(incoming[i][ranks], out_rows.shape[1], x.dtype, out_rows)
    return result


def scattered_mean(x: Tensor, comm: Comm) -> Tensor:
    """Return this rank's shard of the mean of the flat `x` (size · k,), which may be overwritten."""
    shard = x.new_empty(x.numel() // comm.size)
    if comm._weights is None and rows_in_one_kernel(x, None, comm, shard, average=True, add=True):
        return shard
    return comm.reduce_scatter(times_(x, comm._fraction))


@torch.no_grad()
def compressed_reduce_scatter(
    x: Tensor,
    compressor: Compressor | None,
    comm: Comm,
    residual: Tensor | None = None,
    average: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return this rank's shard (k, …) of the sum of `x` (size · k, …) over all ranks, sending only compressed values.

        shard_r = Σ_q Q(shard r of x_q)     or, with `average`, (1/n) Σ_q Q(shard r of x_q)

    Values are rounded once, and added in fp32 in the order of the ranks. Each rank sends (n − 1) c(N/n) bytes for its N
    values, in pieces: a piece is compressed while another piece is on the wire. If packed shards would take more bytes
    than their values, `x` is summed in its dtype.

    Args:
        x, compressor, comm: `x` has one shape and dtype on all ranks.
        residual: fp32, contiguous, as long as `x`; overwritten by the compression error of this rank, x − Q(x). The
            residuals of all ranks add up to the exact sum minus the rounded sum, except for the rounding of fp32.
        average: divide the sum by the number of ranks; with `comm.weighted(w)`, return the weighted mean.
        out: N/n values; may be a part of `x`.
    """
    check_arguments(x, compressor, comm)
    values, n = x.detach().reshape(-1), comm.size
    truth("average", average)
    if residual is not None:
        check_residual(residual, x)
    if not x.dim() or x.shape[0] % n:
        raise ValueError(f"x is (size · k, …), its first dimension a multiple of {n} ranks, not {describe(x)}; pad it")
    result = output(out, x, (x.shape[0] // n, *x.shape[1:]))
    shard = result.detach().view(-1)
    if average and comm._weights is not None:
        wide, comm = weighed(values.clone(), comm)
        shard.copy_(compressed_reduce_scatter(wide, compressor, comm, residual, average))
        return result
    codec = codec_of(x, compressor, comm, n)
    if codec is None or compressor is None:
        if residual is not None:
            residual.zero_()
        if values.numel() and not rows_in_one_kernel(values, None, comm, shard, average=average, add=True):
            shard.copy_(values if n == 1 else comm.reduce_scatter(values * (1 / n) if average else values))
        return result
    if rows_in_one_kernel(values, codec, comm, shard, residual, average, add=True):
        return result
    rows, parts = values.view(n, -1), row_pieces(values.numel() // n, n, comm._by_nccl(x.device))
    lost = None if residual is None else residual.detach().view(n, -1)
    incoming = [bytes_for(n, part.stop - part.start, codec, x.device) for part in parts]
    apart = shard.dtype != torch.float32 or share_memory(shard, values)  # values are read while others are added
    total = (torch.empty_like(shard, dtype=torch.float32) if apart else shard).zero_()
    weights = torch.full((n,), 1 / n if average else 1.0, dtype=torch.float32, device=x.device)

    def packed(i: int, ranks: slice) -> Tensor:
        loss = None if lost is None else lost[ranks, parts[i]]
        return codec._unchecked_compress(rows[ranks, parts[i]], loss, comm.key(i * n + (ranks.start or 0)))

    comm.agree_on_shares()
    for i in scattered(comm, incoming, packed):
        compressor._unchecked_add(total[parts[i]], incoming[i], weights)
    if total is not shard:
        shard.copy_(total)
    return result
