"""The assignment of samples to steps and ranks: pure functions of their costs.

Ranks wait for each other if their costs within a step differ. Samples of similar cost therefore share a step, and
within a step the most expensive sample goes to the rank with the least work so far. If s_g is the spread of group g
(largest cost minus smallest), the totals of two ranks never differ by more than max_g s_g: adding a_i ≥ a_j to the
loads l_i ≤ l_j turns their difference d into d − (a_i − a_j).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Costs = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]

WIDEST = 4096  # groups that are assigned one by one; the others, whose spread is small, at random and all at once


def by_cost(samples: Indices, costs: Costs, random_level: float, rng: np.random.Generator) -> Indices:
    """Return `samples` (n,) in the order of (1 − random_level) · quantile of cost + random_level · U(0, 1).

    The cheapest come first. Samples of equal cost keep their order.
    """
    by_cost_alone = np.argsort(costs[samples], kind="stable")
    if random_level == 0:
        return samples[by_cost_alone]
    quantile = np.empty(len(samples))
    quantile[by_cost_alone] = np.arange(len(samples)) / max(1, len(samples))
    return samples[np.argsort((1 - random_level) * quantile + random_level * rng.random(len(samples)), kind="stable")]


def assign(groups: Indices, costs: Costs, rng: np.random.Generator | None) -> Indices:
    """Return the groups of samples (g, ranks), each row reordered so that column r is for rank r.

    The columns then have nearly equal cost. With a generator, the groups beyond the `WIDEST` are assigned at random
    first, and the widest then balance the totals.
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
        """Return an upper bound of the samples per rank, taken from the front of `samples`, that fit; at least 1."""
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
    """Return the last steps, from the samples of the last full step and the `rest`, which are fewer than the ranks.

    These are one step, two steps with a sample for each rank, or a last step with repeated samples.
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
