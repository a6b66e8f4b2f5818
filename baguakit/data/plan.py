"""The plan of a pass over the data: which rank trains which samples. Pure functions, with equal results on all ranks.

Ranks wait for each other if their costs within a step differ. Samples of similar cost therefore share a step, and
within a step the most expensive sample goes to the rank with the least work so far. If s_g is the spread of group g
(largest cost minus smallest), the totals of two ranks never differ by more than max_g s_g: adding a_i ≥ a_j to the
loads l_i ≤ l_j turns their difference d into d − (a_i − a_j).

A pass is divided again whenever the ranks change. The part between two changes is a *stretch*, in which rank r has

    queue_r  =  the items that it drew in earlier stretches and has not trained  +  its items of the plan

When the stretch ends, rank r has trained the first items of its queue and drawn some more. If rank r stays, it keeps
the items that it has drawn. The samples that nobody has trained or keeps are planned again. Ranks with less work left
get extra steps first, so that all ranks finish the pass together if the samples suffice:

    behind_r + len(queue_r)  =  the same for all r,    behind_r: the items that rank r still trains in earlier passes
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

WIDEST = 4096  # groups assigned one by one; other groups, of smaller spread, are assigned at random at once


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
    """Return the groups of samples (g, ranks), each row reordered so that column r is for rank r.

    The columns then have nearly equal total cost. With `rng`, only the `WIDEST` groups with the largest spread of cost
    are assigned in this way; the other groups are assigned at random first.
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
    """The limit of one rank's batch."""

    budget: float | None  # of the cost
    batch_size: int | None
    padded: bool  # the cost of a batch is its length times its largest cost, not the sum of its costs

    def allows(self, batch: Indices, costs: Costs) -> bool:
        """Return whether the batch is within the limit."""
        short = self.batch_size is None or len(batch) <= self.batch_size
        return short and (self.budget is None or self.cost(batch, costs) <= self.budget)

    def cost(self, batch: Indices, costs: Costs) -> float:
        """Return the cost of a batch."""
        return float(len(batch) * costs[batch].max(initial=0) if self.padded else costs[batch].sum())

    def most(self, samples: Indices, costs: Costs, ranks: int) -> int:
        """Return an upper bound on how many samples per rank, from the front of `samples`, fit; at least 1."""
        full = min(len(samples) // ranks, self.batch_size or len(samples))
        if self.budget is None:
            return max(1, full)
        needed: Costs
        fit = look = 32
        while fit >= look and look < max(full, 64):
            look *= 2
            first = costs[samples[: min(look, full) * ranks]]
            if self.padded:
                needed = np.maximum.accumulate(first)[ranks - 1 :: ranks] * np.arange(1, len(first) // ranks + 1)
            else:
                needed = np.cumsum(first)[ranks - 1 :: ranks] / ranks
            fit = int(np.searchsorted(needed, self.budget * (1 + 1e-9), side="right"))
        return max(1, fit)


Batches = list[Indices]  # one batch for each rank


def one_step(samples: Indices, costs: Costs, ranks: int) -> Batches:
    """Divide the samples of one step into one batch per rank: lengths differ by at most one, costs by little.

    Longest processing time first (Graham 1969) with equal lengths: the most expensive sample goes to the cheapest
    batch that is not full. The remaining samples, which are the cheapest, go to the cheapest batches.
    """
    ordered = samples[np.argsort(-costs[samples], kind="stable")].tolist()
    full = len(ordered) // ranks
    if not full:
        return [np.array([s], dtype=np.int64) for s in ordered] + [samples[:0]] * (ranks - len(ordered))
    batches: list[list[int]] = [[] for _ in range(ranks)]
    loads = [(0.0, rank) for rank in range(ranks)]
    filled: list[tuple[float, int]] = []
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
    """Return steps, most expensive first, that hold each of `samples` (cheapest first) once, within `limit`.

    If the last step has fewer samples than ranks, some of them are repeated: fewer than `ranks` in all.
    """
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
    """Return the largest step from the front of `left` with equally many samples on every rank, within the limit."""
    many = limit.most(left, costs, ranks)
    while True:
        step = one_step(left[: many * ranks], costs, ranks)
        if many == 1 or all(limit.allows(batch, costs) for batch in step):
            return step
        over = max(limit.cost(batch, costs) for batch in step)
        many = max(1, min(many - 1, int(many * (limit.budget or over) / over)))


def _last(samples: Indices, rest: int, costs: Costs, ranks: int, limit: Limit) -> list[Batches]:
    """Divide the last full step and the `rest` remaining samples, fewer than ranks, into the last steps.

    Try one step, then two steps in which each rank has a sample; else repeat samples in a last step.
    """
    whole = len(samples) - rest
    choices = [[samples]] if whole else []
    if whole >= 2 * ranks:
        choices.append([samples[: whole - ranks], samples[whole - ranks :]])
    for parts in choices:
        steps = [one_step(part, costs, ranks) for part in parts]
        if all(limit.allows(batch, costs) for step in steps for batch in step):
            return steps
    repeated = one_step(np.resize(samples[whole:], ranks), costs, ranks)
    return [one_step(samples[:whole], costs, ranks), repeated] if whole else [repeated]


# The division of a pass among ranks that may change


@dataclass(frozen=True)
class Seat:
    """The place of one rank in a stretch that has ended."""

    trained: int  # items of its queue
    drawn: int  # items taken from its queue; if it is lost, items that it has trained
    to: int = -1  # its rank in the next stretch
    behind: int = 0  # as in the stretch


Done = tuple[tuple[Seat, ...], ...]


@dataclass(frozen=True)
class Stretch:
    """A part of a pass in which the ranks stay the same. Its numbers decide who has which items."""

    epoch: int
    behind: tuple[int, ...]  # by rank: the number of items that it still trains in earlier passes
    done: Done = ()  # for each earlier stretch of this pass: the seats of all ranks

    def ended(self, seats: Sequence[Seat], behind: Sequence[int]) -> Stretch:
        """Return the next stretch of the pass. It replaces this one if no rank has drawn an item from this one."""
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
    ) -> None:
        self.samples = samples
        # Each part is a pair: {rank that takes part: its column in a step}, and the steps.
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
            if high is not None:  # only the last steps repeat samples
                steps = (steps if len(steps) >= high - low else plan(samples, len(few)))[: high - low]
            self.parts.append(({rank: column for column, rank in enumerate(few)}, steps))
            taken = chain.from_iterable(steps)

    def length(self, rank: int) -> int:
        """Return the number of items in the queue of a rank."""
        return sum(len(steps) for columns, steps in self.parts if rank in columns)

    def queue(self, rank: int) -> Iterator[Indices]:
        """Return an iterator over the queue of a rank."""
        return (steps[i][columns[rank]] for columns, steps in self.parts if rank in columns for i in range(len(steps)))

    def ended(self, seats: Sequence[Seat]) -> tuple[Indices, dict[int, list[Indices]]]:
        """Return the samples that nobody has trained when this stretch ends with `seats`, and {rank: items kept}."""
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

    Items are counted from the beginning of the record, over all passes; a short last step of a pass counts as a whole
    step. `passes` are consecutive, up to the first one that all ranks end together. The next change divides one of
    these passes, or a later one.
    """

    version: int  # the number of changes before
    ids: tuple[int, ...]  # of the ranks; () before the first change
    origin: int  # after `steps` optimizer steps a rank has trained `origin + steps * items_per_step` items
    passes: tuple[Stretch, ...]


@dataclass
class Position:
    """The position of one rank in a pass."""

    stretch: Stretch
    rank: int  # of this process in the stretch
    drawn: int = 0  # items of its queue
    before: int = 0  # items of this pass that it has trained before the stretch
    over: bool = False  # the iterator was asked for more items than there are
    base: int | None = None  # following: items trained minus `_count()`; None before the pass begins
    origin: int | None = None  # as in `Record`, of a pass that no change has divided


@dataclass(frozen=True)
class Told:
    """The values that a rank tells the other ranks when the group changes."""

    id: int  # of the rank, equal in all groups
    version: int  # of its record; -1 if it has none
    rank: int  # in that record
    now: Position
    trained: int  # items of its queue there
    used: int  # items that it has trained or lost since the record began

    @property
    def epoch(self) -> int:
        """The epoch of the pass in which the rank is."""
        return self.now.stretch.epoch


def regrouped(
    record: Record,  # of the group before
    told: Sequence[Told],  # by new rank; a rank whose version is not that of the record has joined
    step: int,  # the optimizer steps made
    per_step: int,  # the items that a rank trains in a step
    shares: Callable[[Stretch], Shares],
) -> tuple[Record, dict[int, int]]:
    """Return the record of the new group, and {epoch: number of items of lost ranks that nobody trains}.

    Nobody trains the items of a pass if the iterator of another rank has ended, or is already in a later pass.
    """
    known = {t.rank: (new, t) for new, t in enumerate(told) if t.version == record.version}
    passes, made = record.passes, record.origin + step * per_step
    first = max((t for _, t in known.values()), key=lambda t: (t.epoch, -t.rank))
    if first.epoch > passes[-1].epoch:
        passes = (Stretch(first.epoch, (0,) * len(passes[0].behind)),)
        made = 0 if first.now.origin is None else first.now.origin + step * per_step
    lost = [rank for rank in range(len(passes[0].behind)) if rank not in known]
    reached = [each.epoch for each in passes for rank in lost if each.behind[rank] < made]
    epoch = max(first.epoch, passes[0].epoch, *reached)
    passes = passes[: epoch - passes[0].epoch + 1]
    stretch, out = passes[-1], Counter[int]()
    for rank in lost:
        since = made
        for each in passes:
            out[each.epoch - 1] += max(0, each.behind[rank] - since)
            since = max(since, each.behind[rank])
    seats = [Seat(k := max(0, made - lag), k, -1, lag) for lag in stretch.behind]
    for rank, (new, t) in known.items():
        seats[rank] = Seat(*((t.trained, t.now.drawn) if t.epoch == epoch else (0, 0)), new, stretch.behind[rank])

    def whole_steps(items: int) -> int:
        return -(-max(0, items) // per_step) * per_step

    def before(t: Told) -> int:
        """Return how many items a rank trains before the pass. A rank that was left out trains what it has drawn."""
        if t.version != record.version:
            return whole_steps(t.now.drawn - t.trained)
        return whole_steps(stretch.behind[t.rank] - t.used) if t.epoch < epoch else 0

    behind = [before(t) for t in told]
    if any(t.now.over for _, t in known.values() if t.epoch == epoch):
        rest = [shares(stretch).length(rank) - seat.trained for rank, seat in enumerate(seats)]
        out[epoch] += sum(max(0, rest[rank]) for rank in lost)
        for rank, (new, _) in known.items():
            behind[new] += whole_steps(rest[rank])
        following = [Stretch(epoch + 1, tuple(behind))]
    else:
        following = [stretch.ended(seats, behind)]
    while True:
        last = following[-1]
        ends = tuple(whole_steps(lag + shares(last).length(rank)) for rank, lag in enumerate(last.behind))
        if len(set(ends)) == 1 or ends == last.behind:
            return Record(record.version + 1, tuple(t.id for t in told), -step * per_step, tuple(following)), +out
        following.append(Stretch(last.epoch + 1, ends))
