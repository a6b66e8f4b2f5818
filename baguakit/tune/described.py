"""Networks from figures instead of measurements, and a Comm to plan for a network whose ranks do not run."""

from collections.abc import Sequence

from ..arguments import checked, integer, real
from ..comm import Comm
from ..compressors import Compressor, MinMaxUInt8
from ..costs import Codec, Line, Link, Network

VALUES = 1 << 20  # values of the row that tells the bytes of a packed value


@checked
def describe(
    nodes: int,
    per_node: int,
    between: float,
    within: float,
    within_to_all: float | None = None,
    *,
    memory: float = 1e12,
    compressors: Sequence[Compressor] = (MinMaxUInt8(),),
    alpha: float = 20e-6,
    device: str = "cuda",
) -> Network:
    """Return the network of `nodes` machines of `per_node` ranks each, from figures: nothing is measured.

        network = bk.tune.describe(2, 4, between=10e9 / 8, within=12e9, within_to_all=6e9)
        print(bk.tune.plan(model, network=network, algorithms=[bk.algorithms.bytegrad()]))

    A ring crosses the network card of a machine once. In an all-to-all each of the L ranks of a machine sends N − L of
    its N − 1 messages across it, so that a byte takes L (N − L)/(N − 1) times as long; between nodes, where all L send
    at once, L times.

    Args:
        nodes, per_node: the number of machines, and L.
        between: bytes a second that a machine's network card sends.
        within: bytes a second of a rank in a ring of the ranks of one machine.
        within_to_all: in an all-to-all of them, which crosses PCIe switches and sockets; None: the same.
        memory: bytes a second that kernels read and write.
        compressors: the compressors whose speed follows from `memory`: one read of the values, one write of the codes.
        alpha: seconds that any message takes.
        device: "cuda" or "cpu".

    Raises:
        ValueError: a number is not positive.
    """
    L, n = integer("per_node", per_node, 1), integer("nodes", nodes, 1)
    N = n * L
    out, ring, spread, byte = (
        1 / real(name, value, above=0)
        for name, value in (
            ("between", between),
            ("within", within),
            ("within_to_all", within if within_to_all is None else within_to_all),
            ("memory", memory),
        )
    )
    inside = Line(alpha, ring), Line(alpha, ring), Line(alpha, spread)
    around = Line(alpha, max(ring if L > 1 else 0.0, out if n > 1 else 0.0))
    crossing = L * (N - L) / max(1, N - 1) * out
    links = [Link("flat", 1, N, around, around, Line(alpha, max(crossing, spread if L > 1 else 0.0)))] if N > 1 else []
    if L > 1:
        shared = Line(alpha, L * out)
        links += [Link("intra", 1, L, *inside), Link("inter", 1, n, shared, shared)]
    codecs = [_codec(each, byte) for each in compressors]
    return Network(N, L, device, 1, tuple(links), tuple(codecs), copy=2 * byte)


def _codec(compressor: Compressor, byte: float) -> Codec:
    packed = compressor.row_bytes(VALUES) / VALUES
    both = (4 + packed) * byte
    return Codec(repr(compressor), both, both, packed * byte)


class Described(Comm):
    """The ranks of a network that do not run. Algorithms can be checked for these ranks, but nothing can be sent.

    Args:
        size: the number of ranks.
        per_node: the number of ranks on each machine; 1 if the machines are not known.
    """

    def __init__(self, size: int, per_node: int = 1) -> None:
        for name, value in (("rank", 0), ("size", size), ("per_node", per_node), ("_parts", ())):
            object.__setattr__(self, name, value)

    def __post_init__(self) -> None:
        """Make no group."""

    @property
    def intra(self) -> Comm:
        return Described(self.per_node)  # type: ignore[attr-defined]

    @property
    def inter(self) -> Comm:
        return Described(self.size // self.per_node)  # type: ignore[attr-defined]

    @property
    def hierarchical(self) -> bool:
        return bool(self.per_node > 1)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"<Comm: {self.size} ranks that are not at hand>"
