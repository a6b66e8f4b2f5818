"""Links as straight lines: a message of b bytes takes α + β b seconds.

Exchanges on a line take, for n ranks, S bytes of values and messages of b bytes:

    a message to each of k neighbours      α + k β b                            posted together
    all-reduce, a ring                     2 (n − 1) α + 2 (n − 1)/n β S
    all-gather, a ring                     (n − 1) (α + β b)                    b bytes from each rank
    scatter, and gather                    α' + (n − 1) β' b + α + (n − 1) β b  shards of b bytes, each to its owner,
                                                                                and around a ring to all

α' and β' are those of an all-to-all. Where ranks share a network card, or GPUs a link between two sockets, its messages
meet there, and those of a ring do not: each link of a ring has one sender.

Thakur, Rabenseifner and Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
"""

from dataclasses import dataclass

from ..arguments import check_fields, checked


@dataclass(frozen=True)
class Line:
    """The cost of a message: α + β b seconds for b bytes.

    Attributes:
        alpha: α, seconds that any message takes.
        beta: β, seconds that each byte takes.
        busy: seconds of β for which the sending rank's own processor is at work, and so not free to compute.
    """

    alpha: float
    beta: float
    busy: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)

    @checked
    def seconds(self, b: float) -> float:
        """Return α + β b."""
        return self.alpha + self.beta * b

    @property
    def rate(self) -> float:
        """Return 1/β in bytes a second; infinite if β is 0."""
        return 1 / self.beta if self.beta else float("inf")


FREE = Line(0.0, 0.0)


def ring(n: int) -> float:
    """Return 2 (n − 1)/n, the number of times that an all-reduce sends each byte."""
    return 2 * (n - 1) / n


def neighbors(line: Line, k: int, b: float) -> float:
    """Return the seconds of a message of b bytes to each of k neighbours, and one from each."""
    return line.alpha + k * line.beta * b if k else 0.0


def all_reduce(line: Line, n: int, S: float) -> float:
    """Return the seconds of the sum of S bytes over n ranks."""
    return 2 * (n - 1) * line.alpha + ring(n) * line.beta * S


def all_gather(line: Line, n: int, b: float) -> float:
    """Return the seconds of an all-gather of b bytes from each of n ranks, or of a reduce-scatter to b bytes each."""
    return (n - 1) * line.seconds(b)
