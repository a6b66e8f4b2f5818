"""Means over the ranks of a node in one kernel, where a `Comm` has memory for it; the results are those over NCCL."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..comm import Comm
from ..compressors import Compressor
from ..compressors.formats import Blockwise, Cast
from ..kernels import operators
from ..kernels.blockwise.format import aligned

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
METHODS = ("_unchecked_compress", "_unchecked_decompress", "_unchecked_reduce")
SAID = "in one kernel"


def mean_in_one_kernel_(
    x: Tensor, codec: Compressor | None, comm: Comm, residual: Tensor | None, one_hop: bool
) -> Tensor | None:
    """Average the flat `x` in one kernel, exactly without a `codec`; return None, and do nothing, if NCCL must send it.

    All ranks decide alike: by the Comm, the codec, and the length and dtype of `x`.

    Returns:
        A bool tensor (programs,) with whether the values of each program of the kernel are finite.

    Raises:
        RuntimeError: a rank did not come to an earlier mean within the timeout of the group.
    """
    if (node := comm._node) is None or node.part != comm._part or x.dtype not in FLOATS or not known(codec):
        return None
    ranks, N = comm.size, x.numel()
    n = N if one_hop else -(-N // ranks)
    row = n * x.itemsize if codec is None else codec._unchecked_row_bytes(n)
    hops = 1 if one_hop else 2
    # A decorator would import the compiler. It must not trace what asks the device and other ranks.
    memory = torch.compiler.disable(node.memory) if torch.compiler.is_compiling() else node.memory
    if not N or (space := memory(x, hops * ranks * aligned(row))) is None:
        return None
    comm._count(hops * (ranks - 1) * row)
    if codec is not None and "_unchecked_compress" in vars(codec):  # it measures the error of what it compresses
        codec._unchecked_compress(pad(x, (0, hops // 2 * (-N % ranks))).view(-1, n), None, 0)
    form, block = (codec.form.name, codec.block) if isinstance(codec, Blockwise) else ("", 0)
    sent = codec.dtype if isinstance(codec, Cast) else None
    return operators.mean_in_one_kernel_(
        x, residual, space.addresses, space.counters, space.control, space.rank, space.half_bytes, space.limit,
        form, block, sent, one_hop,
    )  # fmt: skip


def known(codec: Compressor | None) -> bool:
    """Return whether the kernel packs as `codec` does: as a format or cast of this package, without random rounding."""
    base = next((each for each in (Blockwise, Cast) if isinstance(codec, each)), None)
    if codec is None or base is None:
        return codec is None
    return not getattr(codec, "stochastic", False) and all(
        getattr(type(codec), name) is getattr(base, name) for name in METHODS
    )
