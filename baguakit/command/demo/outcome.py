"""The table of the demo, its legend, and the claims that its results must bear out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..pacing.rates import written
from ..screen import Column
from .contenders import ALONE, BASE, CONTENDERS
from .training import Result

BY_NAME = {each.name: each for each in CONTENDERS}


@dataclass(frozen=True)
class Clock:
    """The time of training on a network of a rate.

    Attributes:
        bits: the rate, in bits per second.
        paced: whether the ranks trained at that rate, so that times are measured. Else they are computed: the measured
            seconds over loopback, and then the measured bytes at the rate.
    """

    bits: float
    paced: bool

    def step(self, result: Result) -> float:
        """Return the seconds of a step."""
        return self.until(result.sent, result.seconds)

    def until(self, sent: float, seconds: float) -> float:
        """Return the seconds in which so many bytes were sent, and so many seconds measured."""
        return seconds if self.paced else seconds + sent * 8 / self.bits

    @property
    def said(self) -> str:
        """Return the source of the times, in words."""
        rate = written(self.bits)
        if self.paced:
            return f"A step at {rate} is measured, with every rank kept below {rate}."
        return (
            f"A step at {rate} is computed, not measured: the measured step over loopback, and after it the measured "
            "bytes at that rate. Nothing overlaps, so it is rather long; --rate measures it. Over loopback alone, "
            "where bytes cost next to nothing, an all-reduce always looks best."
        )


def columns(clock: Clock) -> list[Column]:
    """Return the columns of the table: 80 characters."""
    mark = "measured" if clock.paced else "computed"
    return [
        Column("algorithm", max(map(len, BY_NAME))),
        Column("accuracy", 8, right=True),
        Column("sent\na step", 10, right=True),
        Column("of\nall-reduce", 10, right=True),
        Column(f"a step at\n{written(clock.bits)}\n{mark}", 9, right=True),
        Column("faster", 6, right=True),
    ]


def row(result: Result, clock: Clock, base: Result | None) -> list[str]:
    """Return the cells of a result, compared with that of an all-reduce."""
    step = clock.step(result)
    return [
        result.contender,
        f"{result.accuracy:.1%}",
        f"{result.sent / 1000:,.1f} kB",
        f"{result.sent / base.sent:.3f}" if base else "",
        f"{step * 1e3:,.1f} ms",
        f"{clock.step(base) / step:.1f} ×" if base and result.contender != ALONE.name else "",
    ]


LEGEND = """
accuracy     on test images, of the mean of the ranks' networks; without
             communication, the mean over the ranks of their own accuracies
sent         by a rank; "of all-reduce" is the ratio to gradient_allreduce
faster       than gradient_allreduce"""


def most_alone(ranks: int) -> float:
    """Return the most that a rank may reach alone: it holds at most ⌈10 / n⌉ of ten digits, and a tenth is for luck."""
    return (-(-10 // ranks) + 1) / 10


def broken_claims(results: Sequence[Result], ranks: int, complete: bool) -> list[str]:
    """Return the claims of the demo that the results contradict, as sentences.

    Args:
        results: the results.
        ranks: the number of ranks.
        complete: whether ranks, steps and seed are those that the claims are made for.
    """
    found: Mapping[str, Result] = {result.contender: result for result in results}
    claims = []
    if silent := found.get(ALONE.name):
        most = most_alone(ranks)
        needless = "the task shows nothing about communication"
        said = f"without communication {silent.alone:.1%} of the images were read, more than {most:.0%}: {needless}"
        claims.append((silent.alone <= most, said))
    for result in results if complete else ():
        least = BY_NAME[result.contender].reaches
        said = f"{result.contender} reads {result.merged:.1%} of the images and should read {least:.0%}"
        claims.append((result.merged >= least, said))
    if complete and "bytegrad" in found and ranks > 1:
        ratio = found["bytegrad"].sent / found[BASE.name].sent
        claims.append((ratio <= 0.27, f"bytegrad sends {ratio:.1%} of the bytes of gradient_allreduce, more than 27%"))
    return [sentence for holds, sentence in claims if not holds]
