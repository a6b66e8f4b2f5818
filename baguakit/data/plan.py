"""Which samples meet in a step and which rank takes which: pure functions of costs and a random generator.

Two things make ranks wait for each other: unequal cost within a step, and a rank that always draws the longer straw.
Samples that stand next to each other in cost therefore meet in a step, and within it the costliest goes to the rank
with the least work so far. With groups of spread s_g (largest cost minus smallest) the totals of any two ranks then
never differ by more than max_g s_g: handing a_i >= a_j to loads l_i <= l_j turns their difference d into
d - (a_i - a_j).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

WIDEST = 4096  # groups that are dealt one after another; narrower ones, where little is at stake, at random at once


def standing(samples: Indices, costs: Costs, random_level: float, rng: np.random.Generator) -> Indices:
    """`samples` (n,) ordered by (1 - random_level) * quantile of cost + random_level * U(0, 1), cheapest first.

    Samples of equal cost keep the order they come in.
    """
    if random_level == 0:
        return samples[np.argsort(costs[samples], kind="stable")]
    quantile = np.empty(len(samples))
    quantile[np.argsort(costs[samples], kind="stable")] = np.arange(len(samples)) / max(1, len(samples))
    return samples[np.argsort((1 - random_level) * quantile + random_level * rng.random(len(samples)), kind="stable")]


def deal(groups: Indices, costs: Costs, rng: np.random.Generator | None) -> Indices:
    """Groups of samples (g, ranks), each row reordered so that column r is rank r's and the columns cost the same.

    Without a generator every group is dealt to the rank with the least work so far; with one, the groups beyond the
    `WIDEST` are dealt at random first and the widest then even out what chance left.
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
    """The limit of one rank's batch: `batch_size` samples, and `budget` of cost.

    The cost of a batch is the sum of its samples' or, when `padded`, its length times its costliest sample's.
    """

    budget: float | None
    batch_size: int | None
    padded: bool

    def allows(self, batch: Indices, costs: Costs) -> bool:
        if self.batch_size is not None and len(batch) > self.batch_size:
            return False
        return self.budget is None or self.cost(batch, costs) <= self.budget

    def cost(self, batch: Indices, costs: Costs) -> float:
        if not len(batch):
            return 0.0
        return float(len(batch) * costs[batch].max() if self.padded else costs[batch].sum())

    def most(self, samples: Indices, costs: Costs, ranks: int) -> int:
        """How many samples per rank, taken from the front of `samples`, may fit; at least 1, and never too few."""
        full, look = len(samples) // ranks, 64
        if self.batch_size is not None:
            full = min(full, self.batch_size)
        if self.budget is None:
            return max(1, full)
        while (fit := self._fitting(costs[samples[: min(look, full) * ranks]], ranks)) >= look and look < full:
            look *= 2
        return max(1, fit)

    def _fitting(self, costs: Costs, ranks: int) -> int:
        needed: Costs
        if self.padded:
            needed = np.maximum.accumulate(costs)[ranks - 1 :: ranks] * np.arange(1, len(costs) // ranks + 1)
        else:
            needed = np.cumsum(costs)[ranks - 1 :: ranks] / ranks
        return int(np.searchsorted(needed, (self.budget or 0.0) * (1 + 1e-9), side="right"))


Step = list[Indices]  # one batch for each rank


def split(samples: Indices, costs: Costs, ranks: int) -> Step:
    """Deal the samples of one step to the ranks: numbers differ by one at most, costs as little as may be.

    Costliest first, each to the rank with the least so far that has not its number yet (LPT with equal counts, after
    Graham 1969); what the ranks do not divide, the cheapest, to those with the least.
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


def cut(samples: Indices, costs: Costs, ranks: int, limit: Limit) -> list[Step]:
    """Steps, costliest samples first, that hold `samples` (cheapest first) each once and keep every batch to `limit`.

    Only where the last step would leave a rank without a sample are its samples repeated, fewer than `ranks` times.
    """
    left = samples[::-1]
    steps: list[Step] = []
    while len(left) >= ranks:
        step = _largest(left, costs, ranks, limit)
        left = left[sum(map(len, step)) :]
        steps.append(step)
    if len(left):
        steps[-1:] = _last(np.concatenate([*steps[-1], left]) if steps else left, len(left), costs, ranks, limit)
    return steps


def _largest(left: Indices, costs: Costs, ranks: int, limit: Limit) -> Step:
    """The largest step with equally many samples on every rank, from the front of `left`, that the limit allows."""
    many = limit.most(left, costs, ranks)
    while True:
        step = split(left[: many * ranks], costs, ranks)
        if many == 1 or all(limit.allows(batch, costs) for batch in step):
            return step
        over = max(limit.cost(batch, costs) for batch in step)
        many = max(1, min(many - 1, int(many * (limit.budget or over) / over)))


def _last(samples: Indices, rest: int, costs: Costs, ranks: int, limit: Limit) -> list[Step]:
    """The last step and the `rest` samples that leave some rank without one: together, evened out, or repeated."""
    whole = len(samples) - rest
    choices = [[samples]] if whole else []
    if whole >= 2 * ranks:
        choices.append([samples[: whole - ranks], samples[whole - ranks :]])
    for parts in choices:
        steps = [split(part, costs, ranks) for part in parts]
        if all(limit.allows(batch, costs) for step in steps for batch in step):
            return steps
    repeated = split(np.resize(samples[whole:], ranks), costs, ranks)
    return [split(samples[:whole], costs, ranks), repeated] if whole else [repeated]
