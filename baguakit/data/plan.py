"""Plan which rank trains which samples in a pass over the data. The functions are pure: all ranks get equal results.

Ranks wait for each other if their costs within a step differ. Samples of similar cost therefore share a step. Steps are
assigned one by one (see `WIDEST`): the most expensive sample of a step goes to the rank with the least total cost so
far. Let s_g be the largest minus the smallest cost in step g. Then two totals never differ by more than the largest
s_g: if ranks i and j have totals l_i ≤ l_j, they get costs a_i ≥ a_j, and l_j − l_i changes by −(a_i − a_j) ≥ −s_g.

A pass is divided again whenever the ranks change. The part between two changes is a *stretch*. An item is a sample or a
batch. In a stretch, rank r has the queue of items

    queue_r  =  the items that it drew in earlier stretches and has not trained  +  its items of the plan

When the stretch ends, rank r has trained the first items of its queue and drawn some more. If rank r stays, it keeps
the items that it has drawn. The samples that nobody has trained or keeps are planned again. Ranks with less work left
get extra steps first, which repeat samples if there are too few, so that all ranks finish the pass together:
behind_r + len(queue_r) is then equal for all r, where behind_r is the number of items that rank r still trains in the
pass before.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

WIDEST = 4096  # the most groups that are assigned one by one; the others, of smaller spread, are assigned at random


def by_cost(samples: Indices, costs: Costs, random_level: float, rng: np.random.Generator) -> Indices:
    """Return `samples` (n,) in ascending order of (1 − random_level) · quantile of cost + random_level · U(0, 1).

    If `random_level` is 0, samples of equal cost keep their order.
    """
    by_cost_alone = np.argsort(costs[samples], kind="stable")
    if random_level == 0:
        return samples[by_cost_alone]
    quantile = np.empty(len(samples))
    quantile[by_cost_alone] = np.arange(len(samples)) / max(1, len(samples))
    return samples[np.argsort((1 - random_level) * quantile + random_level * rng.random(len(samples)), kind="stable")]


def assign(groups: Indices, costs: Costs, rng: np.random.Generator | None) -> Indices:
    """Return `groups` (g, ranks) with each row reordered, so that all columns have nearly equal total cost.

    Column r is for rank r. With `rng`, only the `WIDEST` rows with the largest spread (largest minus smallest cost) are
    ordered by the totals of the columns so far; before that, the other rows are shuffled.
    """
    rows = np.take_along_axis(groups, np.argsort(-costs[groups], axis=1, kind="stable"), axis=1)
    spread = costs[rows[:, 0]] - costs[rows[:, -1]]
    order = np.argsort(-spread, kind="stable")
    loads = np.zeros(groups.shape[1])
    if rng is not None and len(order) > WIDEST:
        order, narrow = order[:WIDEST], order[WIDEST:]
        rows[narrow] = rng.permuted(rows[narrow], axis=1)
        loads += costs[rows[narrow]].sum(axis=0)
    for g in order:
        row = rows[g].copy()
        rows[g, np.argsort(loads, kind="stable")] = row
        loads += costs[rows[g]]
    return rows


@dataclass(frozen=True)
class Limit:
    budget: float | None  # the largest cost
    batch_size: int | None
    padded: bool  # the cost of a batch is its length times its largest cost, not the sum of its costs

    def allows(self, batch: Indices, costs: Costs) -> bool:
        short = self.batch_size is None or len(batch) <= self.batch_size
        return short and (self.budget is None or self.cost(batch, costs) <= self.budget)

    def cost(self, batch: Indices, costs: Costs) -> float:
        return float(len(batch) * costs[batch].max(initial=0) if self.padded else costs[batch].sum())

    def most(self, samples: Indices, costs: Costs, ranks: int) -> int:
        """Return an upper bound (1 or more) on a rank's samples in one step, taken from the front of `samples`."""
        full = min(len(samples) // ranks, self.batch_size or len(samples))
        if self.budget is None:
            return max(1, full)
        fit = look = 32
        while fit >= look and look < max(full, 64):
            look *= 2
            first = costs[samples[: min(look, full) * ranks]]
            so_far = (np.maximum.accumulate if self.padded else np.cumsum)(first)[ranks - 1 :: ranks]
            needed = so_far * np.arange(1, len(so_far) + 1) if self.padded else so_far / ranks
            fit = int(np.searchsorted(needed, self.budget * (1 + 1e-9), side="right"))
        return max(1, fit)


Batches = list[Indices]  # one batch for each rank


def one_step(samples: Indices, costs: Costs, ranks: int) -> Batches:
    """Divide the samples of one step into one batch per rank: lengths differ by at most one, costs by little.

    The method is longest processing time first (Graham 1969) with equal lengths: each sample, the most expensive first,
    goes to the cheapest batch that is not full. The remaining samples, fewer than `ranks`, go to the cheapest batches.
    """
    ordered = samples[np.argsort(-costs[samples], kind="stable")].tolist()
    full = len(ordered) // ranks
    batches: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    filled = [] if full else loads
    for sample, cost in zip(ordered[: full * ranks], costs[ordered].tolist(), strict=False):
        load, rank = loads[0]
        batches[rank].append(sample)
        if len(batches[rank]) < full:
            heapq.heapreplace(loads, (load + cost, rank))
        else:
            heapq.heappop(loads)
            filled.append((load + cost, rank))
    for sample, (_, rank) in zip(ordered[full * ranks :], sorted(filled), strict=False):
        batches[rank].append(sample)
    return [np.array(batch, dtype=np.int64) for batch in batches]


def all_steps(samples: Indices, costs: Costs, ranks: int, limit: Limit) -> list[Batches]:
    """Divide `samples` (cheapest first) into steps within `limit`, most expensive first; a short last one repeats."""
    left = samples[::-1]
    steps: list[Batches] = []
    while len(left) >= ranks:
        step = _largest(left, costs, ranks, limit)
        left = left[sum(map(len, step)) :]
        steps.append(step)
    if len(left):
        steps[-1:] = _last(np.concatenate([*steps[-1], left]) if steps else left, len(left), costs, ranks, limit)
    return steps


def _largest(left: Indices, costs: Costs, ranks: int, limit: Limit) -> Batches:
    """Return a step from the front of `left`: equally many samples on each rank, about as many as the limit allows."""
    many = limit.most(left, costs, ranks)
    while True:
        step = one_step(left[: many * ranks], costs, ranks)
        if many == 1 or all(limit.allows(batch, costs) for batch in step):
            return step
        over = max(limit.cost(batch, costs) for batch in step)
        many = max(1, min(many - 1, int(many * (limit.budget or over) / over)))


def _last(samples: Indices, rest: int, costs: Costs, ranks: int, limit: Limit) -> list[Batches]:
    """Return the last one or two steps. `samples` has the samples of the last full step, then `rest` < `ranks` more.

    Try one step, then two steps in which each rank has a sample. If both exceed the limit, repeat samples at the end.
    """
    whole = len(samples) - rest
    for parts in ([samples], [samples[: whole - ranks], samples[whole - ranks :]]):
        if min(map(len, parts)) >= ranks:
            steps = [one_step(part, costs, ranks) for part in parts]
            if all(limit.allows(batch, costs) for step in steps for batch in step):
                return steps
    repeated = np.resize(samples[whole:], ranks)
    return [one_step(part, costs, ranks) for part in (samples[:whole], repeated) if len(part)]


# The division of a pass among ranks that may change


@dataclass(frozen=True)
class Seat:
    """The state of one rank at the end of a stretch: how far it has come in its queue."""

    trained: int  # the number of trained items of its queue
    drawn: int  # the number of items drawn from its queue; if the rank is lost, the number of trained items
    to: int = -1  # its rank in the next stretch; -1 for none
    behind: int = 0  # as in `Stretch`


Done = tuple[tuple[Seat, ...], ...]


@dataclass(frozen=True)
class Stretch:
    """A part of a pass in which the ranks stay the same. Its fields determine which rank gets which items."""

    epoch: int
    behind: tuple[int, ...]  # by rank: the number of items that it still trains in the pass before
    done: Done = ()  # for each earlier stretch of this pass: the seats of all ranks

    def ended(self, seats: Sequence[Seat], behind: Sequence[int]) -> "Stretch":
        """Return the next stretch of the pass. Its `done` omits this stretch if no rank drew or kept items in it."""
        begun = any(seat.drawn for seat in seats) or (self.done and any(seat.to >= 0 for seat in self.done[-1]))
        return Stretch(self.epoch, tuple(behind), (*self.done, tuple(seats)) if begun else self.done)


class Shares:
    """The queues of all ranks in a stretch."""

    def __init__(
        self,
        behind: Sequence[int],  # as in the stretch
        samples: Indices,  # the samples that nobody has trained in this pass
        kept: Mapping[int, list[Indices]],  # by rank: the items that it drew earlier and has not trained
        plan: Callable[[Indices, int], Sequence[Batches]],  # returns the steps of some ranks over some samples
        again: Indices,  # samples to repeat
    ) -> None:
        self.samples = samples
        # Each part is a pair (columns, steps): `columns` is {rank that takes part: its column in a step}.
        self.parts: list[tuple[dict[int, int], Sequence[Batches]]] = [
            ({rank: 0}, [[item] for item in items]) for rank, items in kept.items()
        ]
        ahead = [lag + len(kept.get(rank, ())) for rank, lag in enumerate(behind)]
        taken = chain.from_iterable(kept.values())
        levels = sorted(set(ahead))
        for low, high in zip(levels, [*levels[1:], None], strict=True):
            few = [rank for rank, items in enumerate(ahead) if items <= low]
            samples = without(samples, taken)
            steps = plan(samples if high is None else samples[: len(samples) // len(few) * len(few)], len(few))
            if high is not None and len(steps) < high - low:  # only here and at the end of a pass samples are repeated
                steps = [*plan(samples, len(few)), *plan(again, len(few))]
            steps = steps[: None if high is None else high - low]
            self.parts.append(({rank: column for column, rank in enumerate(few)}, steps))
            taken = chain.from_iterable(steps)

    def length(self, rank: int) -> int:
        return sum(len(steps) for columns, steps in self.parts if rank in columns)

    def queue(self, rank: int) -> Iterator[Indices]:
        return (steps[i][columns[rank]] for columns, steps in self.parts if rank in columns for i in range(len(steps)))

    def ended(self, seats: Sequence[Seat]) -> tuple[Indices, dict[int, list[Indices]]]:
        """End the stretch with `seats`. Return the samples that nobody has trained, and {next rank: kept items}."""
        taken = [(seat, list(islice(self.queue(rank), seat.drawn))) for rank, seat in enumerate(seats)]
        kept = {seat.to: items[seat.trained :] for seat, items in taken if seat.to >= 0}
        return without(self.samples, chain.from_iterable(items[: seat.trained] for seat, items in taken)), kept


def without(samples: Indices, items: Iterable[Indices]) -> Indices:
    """Return the samples that are in none of the items, in ascending order."""
    return np.setdiff1d(samples, np.concatenate([samples[:0], *items]))


# A change of the group


@dataclass(frozen=True)
class Record:
    """The state of a sampler that all ranks share from one change of the group to the next.

    Items are counted from the beginning of the record, over all passes. A short last step counts as a whole step.
    """

    version: int  # the number of changes before
    ids: tuple[int, ...]  # of the ranks; () before the first change
    origin: int  # after `steps` optimizer steps a rank has trained `origin + steps * items_per_step` items
    stretch: Stretch  # of the pass that the change has divided, or of the pass after it


@dataclass
class Position:
    stretch: Stretch
    rank: int  # of this process in the stretch
    drawn: int = 0  # the number of items drawn from its queue
    before: int = 0  # the number of items of this pass that the rank has trained before the stretch
    over: bool = False  # the iterator was asked for more items than there are
    base: int | None = None  # with `follow`: items trained minus `_count()`; None before the pass begins


@dataclass(frozen=True)
class Told:
    """The values that a rank tells the other ranks when the group changes."""

    id: int  # of the rank, equal in all groups
    record: Record | None  # None if it has joined
    rank: int  # in this record
    now: Position
    trained: int  # the number of trained items of its queue
    used: int  # the number of items that it has trained or lost since the record began

    @property
    def epoch(self) -> int:
        return self.now.stretch.epoch


def regrouped(
    record: Record,  # of the group before
    told: Sequence[Told],  # by new rank; a rank with another record has joined
    step: int,  # the optimizer steps made
    per_step: int,  # the items that a rank trains in a step
    shares: Callable[[Stretch], Shares],
) -> tuple[Record, dict[int, int]]:
    """Return the record of the new group, and {epoch: number of items of lost ranks that nobody trains}.

    Nobody trains a lost rank's items of a pass if another rank's iterator has ended this pass or is in a later pass.
    """
    known = {t.rank: (new, t) for new, t in enumerate(told) if t.record == record}
    stretch, made = record.stretch, record.origin + step * per_step
    first = max((t for _, t in known.values()), key=lambda t: (t.epoch, -t.rank))
    if first.epoch > stretch.epoch:
        stretch, made = Stretch(first.epoch, (0,) * len(stretch.behind)), made - (first.used - first.trained)
    epoch, lost = stretch.epoch, [rank for rank in range(len(stretch.behind)) if rank not in known]
    out = Counter({epoch - 1: sum(max(0, stretch.behind[rank] - made) for rank in lost)})
    seats = [Seat(k := max(0, made - lag), k, -1, lag) for lag in stretch.behind]
    for rank, (new, t) in known.items():
        seats[rank] = Seat(*((t.trained, t.now.drawn) if t.epoch == epoch else (0, 0)), new, stretch.behind[rank])

    def whole_steps(items: int) -> int:
        return -(-max(0, items) // per_step) * per_step

    def before(t: Told) -> int:
        """Return how many items a rank trains before this pass. A rank that joins again trains its drawn items."""
        if t.record != record:
            return whole_steps(t.now.drawn - t.trained)
        return whole_steps(stretch.behind[t.rank] - t.used) if t.epoch < epoch else 0

    behind = [before(t) for t in told]
    if any(t.now.over for _, t in known.values() if t.epoch == epoch):
        rest = [shares(stretch).length(rank) - seat.trained for rank, seat in enumerate(seats)]
        out[epoch] += sum(max(0, rest[rank]) for rank in lost)
        for rank, (new, _) in known.items():
            behind[new] += whole_steps(rest[rank])
        stretch = Stretch(epoch + 1, tuple(behind))
    else:
        stretch = stretch.ended(seats, behind)
    return Record(record.version + 1, tuple(t.id for t in told), -step * per_step, stretch), +out
