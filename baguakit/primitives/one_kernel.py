"""Exchanges over the ranks of a node in one kernel, where a `Comm` has memory for it; the results are those over NCCL.

A function returns None or False, and does nothing, if NCCL must send. All ranks decide alike: by the Comm, the codec,
and the lengths and the dtype of the flat values, which are exact without a codec. It raises a RuntimeError if a rank
did not come to an earlier exchange within the timeout of the group.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..comm import Comm
from ..compressors import Compressor
from ..compressors.formats import Blockwise, Cast
from ..kernels import operators
from ..kernels.blockwise.format import aligned

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
METHODS = ("_unchecked_compress", "_unchecked_decompress", "_unchecked_reduce", "_unchecked_add")
ALL_TO_ALL, NEIGHBORS = "all_to_all", "neighbor_mean_"


def mean_in_one_kernel_(
    x: Tensor, codec: Compressor | None, comm: Comm, residual: Tensor | None, one_hop: bool
) -> Tensor | None:
    """Average `x`; return a bool tensor (programs,), whether the values of each program of the kernel are finite."""
    n, hops = (x.numel(), 1) if one_hop else (-(-x.numel() // comm.size), 2)
    found = exchange("mean_", x, None, codec, comm, [n] * comm.size, residual=residual, hops=hops, flag=one_hop)
    return None if found is None else found[0]


def rows_in_one_kernel(
    x: Tensor, codec: Compressor | None, comm: Comm, out: Tensor, residual: Tensor | None = None,
    average: bool = False, add: bool = False,
) -> bool:  # fmt: skip
    """Fill `out` with the `x` of all ranks or, to `add`, with this rank's shard of their sum. They may share memory."""
    if comm._node is None:
        return False
    kind, whole, part = ("reduce_scatter", x, out) if add else ("all_gather", out, x)
    if share_memory(x, out) and part.data_ptr() != whole.data_ptr() + comm.rank * part.nbytes:
        x = x.clone()  # a program may write what another has still to send
    if exchange(kind, out, x, codec, comm, [part.numel()] * comm.size, residual=residual, flag=average) is None:
        return False
    if not add and comm._rider is not None and (flags := comm._rider.boards(comm._part, comm.size)) is not None:
        rows, mine = (each.view(-1) for each in flags)
        rows_in_one_kernel(mine, None, comm._with(_rider=None, _formats=None), rows)
    return True


def neighbor_mean_in_one_kernel_(
    x: Tensor, own: float, sources: Mapping[int, float], factors: Mapping[int, float], comm: Comm, varies: bool
) -> bool:
    """Set x ← own · x + Σ_q sources[q] · y_q, and send x · factors[r] to rank r. `varies`: other ones in each call."""
    if comm._node is None:
        return False
    heard, ranks = {**sources, comm.rank: own}, range(comm.size)
    sends, receives = ([x.numel() * (p in each) for p in ranks] for each in (factors, heard))
    weights = [heard.get(p, 0.0) for p in ranks] + [factors.get(p, 1.0) for p in ranks]
    more: dict[str, Any] = {"weights": weights, "alike": not varies, "flag": varies}
    return exchange(NEIGHBORS, x, None, None, comm, sends, receives, **more) is not None


def exchange(
    kind: str, out: Tensor, x: Tensor | None, codec: Any, comm: Comm, sends: Sequence[int],
    receives: Sequence[int] = (), *, residual: Tensor | None = None, hops: int = 1, alike: bool = True,
    packs: Callable[[int], bool] = bool, weights: Sequence[float] = (), flag: bool = False,
) -> tuple[Tensor, set[int]] | None:  # fmt: skip
    """Launch `kind`, as `operators.exchange_in_one_kernel_` does. Return its result, and lengths of parts without room.

    Args:
        sends, receives: how many values are for and from each rank. `packs` says whether the codec packs so many.
        alike: the same on all ranks and in all calls, so that a CUDA graph can capture it. If an all-to-all is not,
            there is room for twice the longest part of the first one; longer parts are left to NCCL.
    """
    node, rank, given = comm._node, comm.rank, out if x is None else x
    if node is None or node.part != comm._part or comm.size == 1 or not (out.numel() or kind == ALL_TO_ALL):
        return None
    if not known(codec) or (out.dtype not in FLOATS and (codec is not None or kind not in ("all_gather", ALL_TO_ALL))):
        return None

    def find() -> Any:
        if not alike and given.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph would repeat the splits or weights of an exchange in one kernel, which may vary: send "
                "parts of equal length, give a topology, or use Comm(kernels=False)"
            )
        return (node.for_neighbors if kind == NEIGHBORS else node).memory(given, needed, *differs)

    packed = [n for n in {*sends, *receives} if codec is not None and packs(n)]
    rows = {n: n * out.itemsize for n in (*sends, *receives)} | {n: codec._unchecked_row_bytes(n) for n in packed}
    needed, differs = hops * comm.size * aligned(max(rows.values())), [True] * (kind == ALL_TO_ALL and not alike)
    # A decorator would import the compiler. It must not trace what asks the device and other ranks.
    if (space := (torch.compiler.disable(find) if torch.compiler.is_compiling() else find)()) is None:
        return None
    sent, left = hops * (sum(map(rows.__getitem__, sends)) - rows[sends[rank]]), set[int]()
    if kind == ALL_TO_ALL:
        left = {n for n in rows if aligned(rows[n]) > space.half_bytes // comm.size // 16 * 16}
        sent -= sum(rows[n] for p, n in enumerate(sends) if p != rank and n in left)
        sends, receives = ([-n if n in left and p != rank else n for p, n in enumerate(c)] for c in (sends, receives))
    comm._count(sent)
    form = codec if packed else out.dtype
    comm.note(form, form, "in one kernel")
    if packed and "_unchecked_compress" in vars(codec):  # it measures the error of what it compresses
        parts = [pad(given, (0, -len(given) % sends[0]))] if alike else given.split([*map(abs, sends)])
        for p, (part, n) in enumerate(zip(parts, sends, strict=False)):
            if n in packed and (alike or p != rank):
                codec._unchecked_compress(part.view(-1, n), None, 0)
    name, block = (codec.form.name, codec.block) if isinstance(codec, Blockwise) else ("", 0)
    ok = operators.exchange_in_one_kernel_(
        out, x, residual, space.addresses, space.counters, space.control, space.rank, space.half_bytes, space.limit,
        name, block, codec.dtype if isinstance(codec, Cast) else None, kind, sends, receives, packed, weights, flag,
    )  # fmt: skip
    return ok, left


def share_memory(a: Tensor, b: Tensor) -> bool:
    return max(a.data_ptr(), b.data_ptr()) < min(a.data_ptr() + a.nbytes, b.data_ptr() + b.nbytes)


def known(codec: Compressor | None) -> bool:
    """Return whether the kernel packs as `codec` does: as a format or cast of this package, without random rounding."""
    base = next((each for each in (Blockwise, Cast) if isinstance(codec, each)), None)
    if codec is None or base is None:
        return codec is None
    return not getattr(codec, "stochastic", False) and all(
        getattr(type(codec), name) is getattr(base, name) for name in METHODS
    )
