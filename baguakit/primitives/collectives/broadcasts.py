"""The values of one rank, on all ranks."""

from torch import Tensor

from ...arguments import integer
from ...comm import Comm
from ...compressors import Compressor
from ...compressors.base import Unchecked
from ..compressed import ONE_HOP_BYTES
from ..flat import on_flat
from ..transports import bytes_for
from .rows import check_arguments, codec_of

# Values of a link in the chain. Each rank passes one on while it receives the next, so the chain takes as long as c(N)
# takes, and n − 2 links more; and one is decoded while the next is on the wire.
LINK, MOST_LINKS = 1 << 17, 256


@on_flat
def compressed_broadcast_(x: Tensor, compressor: Compressor | None, comm: Comm, source: int = 0) -> Tensor:
    """Overwrite `x` on all ranks with that of rank `source`, rounded:  x ← Q(x_source).

    Values are compressed once, and all ranks decode the same bytes, the source included, so that the results are
    bitwise equal.

        few     (n − 1) c(N) ≤ 32 KiB. The source sends all its values to all others: (n − 1) c(N) bytes.
        many    In a chain, from the source on: each rank but the last sends c(N) bytes to the next, in links that it
                passes on while others arrive. On a GPU NCCL's broadcast takes its place.

    Where c(N) would be more than N values are, `x` travels as it is.

    Args:
        x: a floating tensor of any shape, or a list of them in one dtype; overwritten, at the source as well.
        compressor: such as `compressors.MinMaxUInt8()`; None sends values as they are.
        comm: the group. With one rank nothing happens and nothing is lost.
        source: the rank whose values all get.

    Returns:
        `x`.

    Raises:
        TypeError: a tensor is not floating, or is sparse; `compressor` keeps some places only.
        ValueError: `source` is not a rank of the group.
    """
    check_arguments(x, compressor, comm)
    integer("source", source, 0, comm.size - 1)
    codec = codec_of(x, compressor, comm, rows=1)
    if codec is None:
        return comm.broadcast(x, source) if x.numel() else x
    if x.is_cuda:
        row = x.view(1, -1)
        first = comm.rank == source
        packed = codec.compress(row, None, comm.key()) if first else bytes_for(1, x.numel(), codec, x.device)
        codec.decompress(comm.broadcast(packed, source), x.numel(), x.dtype, row)
        return x
    return _chain(x, codec, comm, source)


def _chain(x: Tensor, codec: Unchecked, comm: Comm, source: int) -> Tensor:
    n, rank, N = comm.size, comm.rank, x.numel()
    place = (rank - source) % n
    heard, targets = (rank - 1) % n, [(rank + 1) % n] if place < n - 1 else []
    if (n - 1) * codec.row_bytes(N) <= ONE_HOP_BYTES:
        heard, targets = source, [(source + i) % n for i in range(1, n)] if place == 0 else []
    least = LINK * (4 if comm.flows > 1 else 1)  # flows divide messages of 256 KiB
    values = least * -(-N // (least * MOST_LINKS))
    links = [x[i : i + values].view(1, -1) for i in range(0, N, values)]
    comm.settled()
    packed, receives, sends = [], [], []
    if place:
        packed = [bytes_for(1, link.numel(), codec, x.device) for link in links]
        receives = [comm.receive_later(each, heard, tag) for tag, each in enumerate(packed)]
    for tag, link in enumerate(links):
        if place:
            receives[tag].wait()
        else:
            packed.append(codec.compress(link, None, comm.key(tag)))
        sends += [comm.send_later(packed[tag], target, tag) for target in targets]
        codec.decompress(packed[tag], link.numel(), x.dtype, link)
    for work in sends:
        work.wait()
    return x
