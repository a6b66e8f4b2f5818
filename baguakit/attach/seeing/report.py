"""The report of an attachment: bytes sent, and the time that they were exposed."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ...arguments import shown
from ...lanes import between, passed
from ..runners.runner import RuleRunner
from ..runtime.channels import Channel
from ..training.logbook import BACKWARD, Logbook
from .row import Row
from .table import counted, milliseconds, size, table

LEAST = 1e6  # bytes a step: the overlap of fewer is not worth a word
MOST = 0.8  # of forward and backward, of which forward takes about a third
LATE = (
    "the first bucket is launched when {:.0%} of forward and backward are over, so that little overlaps: it holds a "
    "gradient that comes late, or torch.compile returns all gradients at once; compile block by block"
)


@dataclass(frozen=True, eq=False)
class Report:
    """A report of an attachment so far. Print it.

    Attributes:
        steps: optimizer steps since the buckets were made.
        ranks, groups: the number of ranks, and of process groups that the attachment has made.
        rows: one for each bucket of each rule.
        seconds_per_step: of the latest steps, the mean; None with one rank, or before the first step.
        launched_after: the share of forward and backward that was over when the first of several buckets of gradients
            was launched, from 0 to 1: the mean over the latest steps with one backward; None if that is not known.
    """

    steps: int
    ranks: int
    groups: int
    rows: tuple[Row, ...]
    seconds_per_step: float | None = None
    launched_after: float | None = None

    @property
    def bytes_sent(self) -> float:
        """Return the bytes sent by this rank."""
        return sum(row.bytes_sent for row in self.rows)

    @property
    def bytes_per_step(self) -> float:
        """Return the bytes sent by this rank in each optimizer step."""
        return self.bytes_sent / max(1, self.steps)

    @property
    def exposed_per_step(self) -> float:
        """Return the seconds for which training waited in each optimizer step:  Σ_rows exposed · landed / steps."""
        return self._per_step(row.exposed * row.landed for row in self.rows)

    @property
    def exposed_share(self) -> float | None:
        """Return the ratio of `exposed_per_step` to the length of a step; None if that is not known."""
        return self.exposed_per_step / self.seconds_per_step if self.seconds_per_step else None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the parts of the network in which anything was sent: "flat", or "intra" and "inter"."""
        return tuple(sorted({part for row in self.rows for part in row.bytes}))

    def scalars(self) -> dict[str, float]:
        """Return the figures by name, for TensorBoard, wandb or Lightning's `log_dict`.

        `baguakit/…` of `bytes_per_step`, `exposed_seconds_per_step`, `air_seconds_per_step`, and `exposed_share` once
        it is known; of `bytes_per_step_intra` and `_inter` where both are used; and of the first three for each of
        several rules, as `baguakit/rule_0/…`, by their order in `att.rules`.
        """
        named = self._figures("baguakit", self.rows)
        if self.exposed_share is not None:
            named["baguakit/exposed_share"] = self.exposed_share
        if len(self.parts) > 1:
            for part in self.parts:
                sent = self._per_step(row.bytes.get(part, 0) for row in self.rows)
                named[f"baguakit/bytes_per_step_{part}"] = sent
        rules = [(number, list(rows)) for number, rows in groupby(self.rows, key=lambda row: row.number)]
        if len(rules) > 1:
            for number, rows in rules:
                named |= self._figures(f"baguakit/rule_{number}", rows)
        return named

    def _figures(self, prefix: str, rows: Sequence[Row]) -> dict[str, float]:
        return {
            f"{prefix}/bytes_per_step": self._per_step(row.bytes_sent for row in rows),
            f"{prefix}/exposed_seconds_per_step": self._per_step(row.exposed * row.landed for row in rows),
            f"{prefix}/air_seconds_per_step": self._per_step(row.seconds * row.landed for row in rows),
        }

    def _per_step(self, amounts: Iterable[float]) -> float:
        return sum(amounts) / max(1, self.steps)

    def __str__(self) -> str:
        slow = self.bytes_per_step > LEAST and (self.launched_after or 0.0) > MOST
        late = [LATE.format(self.launched_after)] if slow else []
        return "\n".join([self._summary(), *late, *table(self.rows, self.parts if len(self.parts) > 1 else ())])

    __repr__ = __str__

    def _summary(self) -> str:
        length = f" of {milliseconds(self.seconds_per_step)}" if self.seconds_per_step else ""
        share = f" ({self.exposed_share:.1%})" if self.exposed_share is not None else ""
        return (
            f"{counted(self.steps, 'step')}{length} on {counted(self.ranks, 'rank')}, "
            f"{counted(self.groups, 'group')}; {size(self.bytes_per_step)} sent a step, "
            f"{milliseconds(self.exposed_per_step)} exposed{share}"
        )


def make_report(
    runners: Sequence[RuleRunner],
    channels: Sequence[Channel],
    steps: int,
    log: Logbook | None = None,
) -> Report:
    """Return the report of an attachment at this moment, without waiting."""
    rows = []
    for runner in runners:
        in_air = runner.flights()
        for i, bucket in enumerate(runner.buckets):
            dtype = str(bucket.flat.dtype).removeprefix("torch.")
            flown = tuple(flight for flight in runner.records[i] if flight not in in_air)
            which = (runner.label, runner.index, i, bucket.flat.numel(), dtype)
            landed = runner.launches[i] - (len(runner.records[i]) - len(flown))
            kinds = tuple(runner.ways[i].kinds)
            rows.append(Row(*which, runner.launches[i], landed, dict(runner.sent[i]), flown, kinds))
    ranks = channels[0].comm.size
    groups = sum(len(channel.comm.groups()) for channel in channels) if ranks > 1 else 0
    seconds, late = (None, None) if log is None else (log.seconds_per_step(), launched_after(runners, log))
    return Report(steps, ranks, groups, tuple(rows), seconds, late)


def launched_after(runners: Sequence[RuleRunner], log: Logbook) -> float | None:
    """Return `Report.launched_after`. Backward is known from its first gradient on, and so a step from its begin."""
    on_gradients = [each for each in runners if each.rule.what == "grad" and not each.rule.delay]
    first: dict[int | None, Any] = {}  # moments, by step
    for flight in (flight for runner in on_gradients for flight in runner.records[0] if flight.flight.over()):
        first.setdefault(flight.step, flight.flight.times().launched)
    shares = []
    for record in (each for each in log.steps if each.step in first and not each.accumulated and passed(each.end)):
        ends = [part.end for part in record.parts if part.name == BACKWARD]
        if len(ends) == 1 and (length := between(record.begin, ends[0])) > 0:
            shares.append(between(record.begin, first[record.step]) / length)
    several = sum(len(each.buckets) for each in on_gradients) > 1
    return sum(shares) / len(shares) if shares and several else None


def written(scalars: Mapping[str, float], writer: Any, step: int) -> dict[str, float]:
    """Return the scalars, after `writer.add_scalar(name, value, step)` for each, if there is a writer.

    Raises:
        TypeError: the writer has no `add_scalar`.
    """
    if writer is not None:
        if not callable(getattr(writer, "add_scalar", None)):
            raise TypeError(
                "writer is one with add_scalar(name, value, step), such as "
                f"torch.utils.tensorboard.SummaryWriter, and not {shown(writer)}; "
                "give another logger att.report().scalars()"
            )
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
    return dict(scalars)
