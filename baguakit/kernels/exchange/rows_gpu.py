"""Exchanges of the ranks of a node in one kernel, in one hop: each rank writes rows to others, and takes what came.

    all-gather        x                    →  row r of every rank                      out = all rows
    reduce-scatter    shard p of x         →  row r of rank p                          out = Σ_q row q, or 1/n of it
    all-to-all        part p of x          →  row r of rank p                          out = all rows
    neighbour mean    x, times a factor    →  row r of the ranks that hear rank r      x ← w_r x + Σ_q w_q row q

Every rank has the same room for the row of each other. When all ranks wait for all, the two halves of the memory are
safe in turn (`tiles_gpu.py`). Neighbours wait for each other only, and a rank may be far ahead of one that it does not
hear. Their rule is: rank s writes to rank r in exchange k after it has heard that r has sent in exchange k − 1.

    By then r has ended exchange k − 2 and those before, in which it read the half that s writes to, since kernels of a
        rank run one after another. Exchange k − 1 uses the other half.
    So every rank signals all ranks in every exchange, after its rows, also those that get none: a rank that does not
        write to r now may do so in the next exchange. A signal is one posted write.
    Nobody waits for ever. A rank waits until those it writes to have sent in exchange k − 1, and those it hears in k.
        Of the ranks that wait, take those in the earliest exchange k: all ranks have sent in k − 1, so these can
        write, and then hear each other.

`mean_kernel` does not wait before it writes: behind such an exchange it could meet a rank that still reads. So
exchanges between neighbours have a memory of their own. A function raises a ValueError if its memory is of the wrong
kind or too small, and returns of each CTA whether it heard all ranks that it waits for: a bool tensor (ctas,). Where
not, the result is NaN, or −1 in integers.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import gcd
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from ..blockwise.format import aligned
from ..gpu import byte_of, launch
from .signals_gpu import heard, word_at
from .tiles_gpu import DTYPES, Memory, Wire, all_heard, land, memory_of, send, tell_all

# A table has, for each rank: where its part begins in a tensor, how many values it has, and where the headers of its
# row begin (PLAIN: the row has values of x as they are). Neighbours wait for the ranks whose parts have values.
BEGIN, VALUES, HEADER = (tl.constexpr(place) for place in range(3))
PLAIN = tl.constexpr(-1)
BYTES = tl.constexpr((8, False, False))  # FORM of values as they are
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Part = tuple[int, int, int]  # begin, values, header


@triton.jit
def part_of(table_ptr, peer, ranks, NARROW):
    begin = tl.load(table_ptr + BEGIN * ranks + peer)
    if not NARROW:
        begin = begin // 16 * 16  # as it is: so Triton knows that parts are aligned as x is
    return begin, tl.load(table_ptr + VALUES * ranks + peer), tl.load(table_ptr + HEADER * ranks + peer)


@triton.jit
def met(table_ptr, own_ptr, words_at, rank, ranks, number, control_ptr, limit, THREADS: tl.constexpr):
    """Wait for the neighbours whose parts have values in a table, and return whether all have come."""
    senders = tl.arange(0, THREADS) % ranks
    senders = tl.where(tl.load(table_ptr + VALUES * ranks + senders) > 0, senders, rank)
    return heard(word_at(own_ptr, words_at, 0, ranks, senders), number, senders, control_ptr, limit, THREADS)


@triton.jit(
    do_not_specialize=["rank", "ranks", "limit"],
    do_not_specialize_on_alignment=["ok_ptr", "counters_ptr", "control_ptr", "sends_ptr", "weights_ptr"],
)
def rows_kernel(
    x_ptr, out_ptr, residual_ptr, ok_ptr, peers_ptr, counters_ptr, control_ptr, rank, ranks, half_bytes, limit,
    sends_ptr, weights_ptr, signs_ptr,
    MEASURE: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, WORD: tl.constexpr, FORM: tl.constexpr,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, NARROW: tl.constexpr, EXACT: tl.constexpr,
    THREADS: tl.constexpr, ONE: tl.constexpr, OWN: tl.constexpr, RAW: tl.constexpr, ADD: tl.constexpr,
    NEIGHBORS: tl.constexpr,
):  # fmt: skip
    cta = tl.program_id(0)
    number = tl.load(counters_ptr + cta) + 1
    half, row_bytes = (number & 1).to(tl.int64) * half_bytes, tl.cast(half_bytes // ranks // 16 * 16, tl.int64)
    own_ptr, words_at = memory_of(peers_ptr, rank), 2 * tl.cast(half_bytes, tl.int64)
    row_at, heard_ptr = half + rank * row_bytes, sends_ptr + 3 * ranks  # the second table

    good = True
    if NEIGHBORS:
        good = met(sends_ptr, own_ptr, words_at, rank, ranks, number - 1, control_ptr, limit, THREADS)
    if good:
        for step in range(1 if ONE else ranks):
            peer = (rank + 1 + step) % ranks
            begin, n, header_at = part_of(sends_ptr, rank if ONE else peer, ranks, NARROW)
            part_ptr, count = x_ptr + begin, (ranks if OWN else ranks - 1) if ONE else 1
            if RAW is not None and header_at == PLAIN:
                send(
                    part_ptr.to(tl.pointer_type(RAW)), None, peers_ptr, peer, count, ranks, row_at, None, 0, 0, 1, n, n,
                    None, None, None, None, RAW, BYTES, BLOCK, BLOCKS, WIDTH,
                )  # fmt: skip
            else:
                send(
                    part_ptr, None if residual_ptr is None else residual_ptr + begin, peers_ptr, peer, count, ranks,
                    row_at, signs_ptr, header_at, 0, 1, n, n, tl.load(weights_ptr + ranks + peer) if EXACT else None,
                    MEASURE, ENCODE, DECODE, WORD, FORM, BLOCK, BLOCKS, WIDTH,
                )  # fmt: skip
        tell_all(peers_ptr, words_at, 0, ranks, rank, number, THREADS)
        if NEIGHBORS:
            good = met(heard_ptr, own_ptr, words_at, rank, ranks, number, control_ptr, limit, THREADS)
        else:
            good = all_heard(own_ptr, words_at, 0, ranks, number, control_ptr, limit, THREADS)

    if ADD:
        begin, n, header_at = part_of(heard_ptr, rank, ranks, NARROW)
        land(
            out_ptr, own_ptr + half, signs_ptr, row_bytes, header_at, 0, 1, rank, ranks, n, n, good, None,
            DECODE, WORD, FORM, BLOCK, BLOCKS, WIDTH, EXACT, True,
            x_ptr if NEIGHBORS else None, heard_ptr + VALUES * ranks, weights_ptr,
        )  # fmt: skip
    else:
        for peer in range(ranks):
            begin, n, header_at = part_of(heard_ptr, peer, ranks, NARROW)
            row_ptr = own_ptr + half + peer * row_bytes
            if not OWN and peer == rank:  # it was not sent
                row_ptr = (x_ptr + tl.load(sends_ptr + BEGIN * ranks + rank)).to(tl.pointer_type(tl.uint8))
            if RAW is not None and header_at == PLAIN:
                land(
                    (out_ptr + begin).to(tl.pointer_type(RAW)), row_ptr, None, 0, 0, 0, 1, rank, ranks, n, n, good,
                    None, None, RAW, BYTES, BLOCK, BLOCKS, WIDTH, False, False,
                )  # fmt: skip
            else:
                land(
                    out_ptr + begin, row_ptr, signs_ptr, 0, header_at, 0, 1, rank, ranks, n, n, good,
                    None, DECODE, WORD, FORM, BLOCK, BLOCKS, WIDTH, False, False,
                )  # fmt: skip
    tl.store(ok_ptr + cta, tl.cast(good, tl.uint8))
    tl.store(counters_ptr + cta, number)


def all_gather(memory: Memory, wire: Wire | None, x: Tensor, out: Tensor) -> Tensor:
    """Store the values of all ranks in `out`, in the order of ranks, as decoded from the `wire`; None: exact bytes.

    `x`, of equal length on all ranks, is apart from `out`, or this rank's part of it; both are contiguous.
    """
    wire, x, out, _ = _as_sent(wire, x, out)
    part, ranks = (0, len(x), wire.arguments(len(x), x.device)[2]), memory.ranks
    heard = [(place * len(x), *part[1:]) for place in range(ranks)]
    own = wire.dtype.is_floating_point  # is rounded as well
    return _exchange("an all-gather", memory, wire, x, out, [part] * ranks, heard, ONE=True, OWN=own)


def reduce_scatter(
    memory: Memory, wire: Wire, x: Tensor, out: Tensor, residual: Tensor | None = None, average: bool = False
) -> Tensor:
    """Store in `out` this rank's shard of the sum of `x` over all ranks, or of their mean.

    `x`, of equal length on all ranks, is apart from `out`, or `out` is this rank's shard of it; both are contiguous.
    The fp32 `residual`, as long as `x`, gets x − Q(x). With `average`, x is divided before it is sent if the wire is
    exact, and else each row.
    """
    n, scale = out.numel(), 1 / memory.ranks if average else 1.0
    sends = [(place * n, n, wire.arguments(n, x.device)[2]) for place in range(memory.ranks)]
    weights = [1.0 if wire.exact else scale] * memory.ranks + [scale] * memory.ranks
    heard = [(0, *part[1:]) for part in sends]
    return _exchange("a reduce-scatter", memory, wire, x, out, sends, heard, weights, residual, OWN=True, ADD=True)


def all_to_all(
    memory: Memory, wire: Wire | None, x: Tensor, out: Tensor, sends: Sequence[int], receives: Sequence[int],
    pays: Callable[[int], bool] = bool,
) -> Tensor:  # fmt: skip
    """Send each rank its part of `x`, and store in `out`, which is apart, what each rank sent to this one.

    Args:
        wire: as in `all_gather`; this rank's part for itself is exact.
        sends, receives: how many values of `x` and `out` are for and from each rank; −n for n values that are left out.
            If they differ, no CUDA graph can capture the call.
        pays: says whether a part of so many values is packed; others are sent as they are.
    """
    wire, x, out, times = _as_sent(wire, x, out)

    def part(counts: Sequence[int], peer: int) -> Part:
        n, packed = max(0, counts[peer]) * times, peer != memory.rank and pays(counts[peer])
        return sum(map(abs, counts[:peer])) * times, n, wire.arguments(n, x.device)[2] if packed else PLAIN.value

    there, here = ([part(counts, peer) for peer in range(memory.ranks)] for counts in (sends, receives))
    there[memory.rank] = there[memory.rank][0], 0, PLAIN.value  # it is not sent
    return _exchange("an all-to-all", memory, wire, x, out, there, here, keep=len({*sends, *receives}) == 1)


def neighbor_mean_(
    memory: Memory, wire: Wire, x: Tensor, sends: Sequence[int], receives: Sequence[int], weights: Sequence[float],
    varies: bool = False,
) -> Tensor:  # fmt: skip
    """Set x_r ← Σ_q w_q y_q with the y_q that rank q sends, y_r = x_r, with the bits of `primitives.neighbor_mean_`.

    All ranks call it, also those without neighbours in this round.

    Args:
        memory: for exchanges between neighbours.
        wire: exact, of the dtype of `x`.
        x: flat, contiguous, of equal dtype and length on all ranks; overwritten.
        sends, receives: the length of x for each rank that hears this one, or that this one hears, itself too; 0 else.
        weights: w_q for each rank, then for each the factor of the x that is sent to it.
        varies: weights and neighbours are those of this call only, which no CUDA graph can capture.
    """
    there, here = ([(0, n, 0) for n in each] for each in (sends, receives))
    how: dict[str, Any] = {"keep": not varies, "ADD": True, "NEIGHBORS": True}
    return _exchange("a mean of neighbours", memory, wire, x, x, there, here, weights, **how)


def _as_sent(wire: Wire | None, x: Tensor, out: Tensor) -> tuple[Wire, Tensor, Tensor, int]:
    """Return a wire; the tensors, as integers if there was none; and how many of these a value is."""
    if wire is not None:
        return wire, x.view(-1), out.view(-1), 1
    dtype = INTEGERS[min(x.itemsize, 8)]
    return Wire(None, dtype=dtype), x.view(-1).view(dtype), out.view(-1).view(dtype), x.itemsize // dtype.itemsize


def _new_table(columns: tuple[Any, ...], dtype: torch.dtype, device: torch.device, pin: bool = True) -> Tensor:
    # Of memory that is not pinned, the copy is complete when `.to` returns, so that any stream may read it.
    pinned = pin and device.type == "cuda"
    return torch.tensor(columns, dtype=dtype, device="cpu", pin_memory=pinned).to(device, non_blocking=pinned)


_table = lru_cache(maxsize=None)(partial(_new_table, pin=False))  # of few lengths; CUDA graphs have the addresses


def _exchange(
    what: str, memory: Memory, wire: Wire, x: Tensor, out: Tensor, sends: Sequence[Part], heard: Sequence[Part],
    weights: Sequence[float] = (), residual: Tensor | None = None, keep: bool = True,
    ONE: bool = False, OWN: bool = False, ADD: bool = False, NEIGHBORS: bool = False,
) -> Tensor:  # fmt: skip
    """Launch an exchange of parts, and keep their table: ONE part for all ranks; its OWN part is sent as well."""
    parts, ok = [*sends, *heard], torch.empty(memory.ctas, dtype=torch.bool, device=x.device)
    others = [part for rank, part in enumerate(heard) if rank != memory.rank]
    rows = [aligned(n * x.itemsize) if header < 0 else wire.row_bytes(n) for _, n, header in (*sends, *others)]
    memory.must_hold(what, memory.ranks * max(rows), NEIGHBORS)
    columns = *zip(*sends, strict=True), *zip(*heard, strict=True)
    table = _table if keep else _new_table
    at_16 = not any(each.data_ptr() % 16 for each in (x, out, residual) if each is not None)
    constants = wire.constants(gcd(*(begin for begin, *_ in parts)), x.itemsize, at_16)
    raw = DTYPES[INTEGERS[x.itemsize]] if not (ONE or ADD) and wire.dtype.is_floating_point else None
    launch(
        rows_kernel, memory.ctas, x, out, residual, byte_of(ok), memory.addresses, memory.counters, memory.control,
        memory.rank, memory.ranks, memory.half_bytes, memory.limit, table(columns, torch.int64, x.device),
        table(tuple(weights), torch.float32, x.device), wire.arguments(1, x.device)[0],
        ONE=ONE, OWN=OWN, RAW=raw, ADD=ADD, NEIGHBORS=NEIGHBORS,
        **{name: constants[name] for name in constants if name != "ADD_UP"},
    )  # fmt: skip
    return ok
