"""The memory of all ranks of a node in one process, means over it, and the same by separate kernels.

The memory is on the device of the values, or in pinned memory of the host. Ranks are launches of their own, which can
only run side by side on several GPUs or in the executor (`ptx.ranks`); or *virtual*: one grid (ctas, ranks) on one GPU.
Ranks wait for each other, so a grid whose programs do not all run at once would never end: `Node` refuses it.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

from baguakit.compressors import Compressor
from baguakit.compressors.formats import Blockwise, Cast
from baguakit.kernels.exchange.mean_gpu import mean_kernel
from baguakit.kernels.exchange.tiles_gpu import Memory, Wire
from baguakit.kernels.gpu import byte_of

LINE = 128  # bytes of a cache line, at a multiple of which each half begins
NEVER = (1 << 63) - 1  # nanoseconds: a wait without a limit


class Node:
    """Memory for means over `ranks` ranks.

    Args:
        half_bytes: of each of the two halves of a rank's memory: see `needed`.
        ctas: programs of a rank.
        device: of the values, counters and addresses.
        on_host: the halves and signals are in memory of the host, pinned if the device is a GPU.
        limit: nanoseconds after which a wait gives up.

    Raises:
        ValueError: the device cannot run a program of each rank on a multiprocessor of its own.
    """

    def __init__(
        self,
        ranks: int,
        half_bytes: int,
        ctas: int,
        device: torch.device | str = "cpu",
        on_host: bool = False,
        limit: int = NEVER,
    ) -> None:
        device = torch.device(device)
        if device.type == "cuda":
            there = torch.cuda.get_device_properties(device).multi_processor_count
            if ranks * ctas > there:
                raise ValueError(
                    f"{ranks} ranks of {ctas} programs wait for each other, and this GPU has {there} multiprocessors: "
                    "with more programs than these some might never begin"
                )
        pinned = device.type == "cuda"
        half_bytes, words = -(-half_bytes // LINE) * LINE, 2 * ranks * ctas
        self.ranks, self.half_bytes, self.ctas, self.device, self.limit = ranks, half_bytes, ctas, device, limit
        place: dict[str, Any] = {"pin_memory": pinned} if on_host else {"device": device}
        self._kept = [torch.zeros(LINE + 2 * half_bytes + 4 * words, dtype=torch.uint8, **place) for _ in range(ranks)]
        self.whole = [each[-each.data_ptr() % LINE :][: 2 * half_bytes + 4 * words] for each in self._kept]
        self.addresses = torch.tensor([each.data_ptr() for each in self.whole], dtype=torch.int64, device=device)
        self.counters = torch.zeros(ranks, ctas, dtype=torch.int32, device=device)
        self.control = torch.zeros(ranks, 1 + ranks, dtype=torch.int32, pin_memory=pinned)

    @property
    def data(self) -> list[Tensor]:
        """Return the halves of each rank."""
        return [each[: 2 * self.half_bytes] for each in self.whole]

    @property
    def signals(self) -> list[Tensor]:
        """Return the words of signals of each rank."""
        return [each[2 * self.half_bytes :].view(torch.int32) for each in self.whole]

    def memory(self, rank: int) -> Memory:
        """Return what kernels of a rank take."""
        return Memory(
            rank, self.ranks, self.addresses.clone(), self.counters[rank], self.control[rank], self.half_bytes,
            self.limit,
        )  # fmt: skip


def wire_of(codec: Compressor | None, dtype: torch.dtype = torch.float32) -> Wire:
    """Return the form in which values cross; exact without a codec."""
    if codec is None:
        return Wire(None, dtype=dtype, exact=True)
    if isinstance(codec, Cast):
        return Wire(None, dtype=codec.dtype)
    assert isinstance(codec, Blockwise), f"{codec} has no form of fixed length"
    return Wire(codec.form, codec.block)


def needed(ranks: int, wire: Wire, length: int, one_hop: bool = False) -> int:
    """Return the bytes of each half of a rank's memory for a mean of `length` values, with room for lines."""
    rows, n = (ranks, length) if one_hop else (2 * ranks, -(-length // ranks))
    return 2 * ranks * LINE + rows * wire.row_bytes(n)


@triton.jit(
    do_not_specialize=["ranks", "length", "n", "limit"], do_not_specialize_on_alignment=["oks_ptr", "control_ptr"]
)
def virtual_ranks_kernel(
    xs_ptr, residuals_ptr, oks_ptr, peers_ptr, counters_ptr, control_ptr, ranks, stride, half_bytes, limit,
    signs_ptr, row_bytes, header_at, length, n,
    ADD_UP: tl.constexpr, MEASURE: tl.constexpr, ENCODE: tl.constexpr, DECODE: tl.constexpr, WORD: tl.constexpr,
    FORM: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WIDTH: tl.constexpr, NARROW: tl.constexpr,
    EXACT: tl.constexpr, ONE_HOP: tl.constexpr, THREADS: tl.constexpr,
):  # fmt: skip
    """Run `mean_kernel` for the rank of this program: the second number of the grid. Values are rows of `stride`."""
    rank, ctas = tl.program_id(1), tl.num_programs(0)
    at = tl.cast(rank, tl.int64) * stride
    residual_ptr = residuals_ptr
    if residuals_ptr is not None:
        residual_ptr = residuals_ptr + at
    mean_kernel(
        xs_ptr + at, residual_ptr, oks_ptr + rank * ctas, peers_ptr, counters_ptr + rank * ctas,
        control_ptr + rank * (1 + ranks), rank, ranks, half_bytes, limit, signs_ptr, row_bytes, header_at, length, n,
        ADD_UP, MEASURE, ENCODE, DECODE, WORD, FORM, BLOCK, BLOCKS, WIDTH, NARROW, EXACT, ONE_HOP, THREADS,
    )  # fmt: skip


def mean_of_virtual_ranks_(
    node: Node, wire: Wire, xs: Tensor, residuals: Tensor | None = None, one_hop: bool = False
) -> Tensor:
    """Average the rows of `xs` (ranks, values) in one launch, in place; return whether CTAs' values are finite."""
    length = xs.shape[1]
    n = length if one_hop else -(-length // node.ranks)
    node.memory(0).must_hold(f"a mean of {length:,} values", (1 if one_hop else 2) * node.ranks * wire.row_bytes(n))
    oks = torch.empty(node.ranks, node.ctas, dtype=torch.bool, device=xs.device)
    at_16 = not any(each.data_ptr() % 16 or each.stride(0) % 16 for each in (xs, residuals) if each is not None)
    virtual_ranks_kernel[(node.ctas, node.ranks)](
        xs, residuals, byte_of(oks), node.addresses, node.counters, node.control, node.ranks, xs.stride(0),
        node.half_bytes, node.limit, *wire.arguments(n, xs.device), length, n,
        ONE_HOP=one_hop, **wire.constants(n, xs.itemsize, at_16),
    )  # fmt: skip
    return oks


def separately(
    codec: Compressor | None, xs: Sequence[Tensor], residuals: Sequence[Tensor] | None = None, one_hop: bool = False
) -> list[Tensor]:
    """Return the mean that each rank has, by the compressor's own calls, and overwrite the residuals likewise.

    On a GPU these are the kernels that fly over NCCL; what NCCL would do are copies here.
    """
    ranks, length, dtype = len(xs), len(xs[0]), xs[0].dtype
    if codec is None:
        total = (xs[0] * (1 / ranks)).float()
        for x in xs[1:]:
            total += (x * (1 / ranks)).float()
        return [total.to(dtype)] * ranks
    if one_hop:
        rows = [
            codec.compress(x[None], None if residuals is None else residuals[rank][None]) for rank, x in enumerate(xs)
        ]
        total = codec.decompress(rows[0], length)[0]
        for row in rows[1:]:
            total += codec.decompress(row, length)[0]
        return [(total / torch.full((1,), ranks, dtype=torch.float32, device=total.device)).to(dtype)] * ranks
    n = -(-length // ranks)
    padded = [torch.cat([x, x.new_zeros(ranks * n - length)]).view(ranks, n) for x in xs]
    lost = None if residuals is None else [torch.empty_like(x, dtype=torch.float32) for x in padded]
    sent = [codec.compress(x, None if lost is None else lost[rank]) for rank, x in enumerate(padded)]
    means = []
    for rank in range(ranks):
        inbox = torch.stack([each[rank] for each in sent])
        means.append(codec.reduce(inbox, n, None if lost is None else lost[rank][rank]))
    whole = codec.decompress(torch.cat(means), n, dtype).view(-1)[:length]
    for rank, each in enumerate(lost or ()):
        assert residuals is not None
        residuals[rank].copy_(each.view(-1)[:length])
    return [whole] * ranks
