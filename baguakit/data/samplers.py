"""Samplers for samples of unequal cost: at every step all ranks get equal work."""

from __future__ import annotations

import os
from collections.abc import Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ..arguments import real, truth, whole
from .complexity import Complexity, complexities
from .plan import Indices, Limit, Step, cut, deal, standing
from .position import Order, Position, Resumable
from .ranks import resolve


class LoadBalancedSampler(Resumable[int], DistributedSampler[int]):
    """One sample per rank and step, of nearly equal cost, in an order fixed by `seed` and epoch.

    Samples are ordered by cost and cut into groups of as many neighbours as there are ranks; each group is one step.
    Which rank takes which is chosen so that the ranks' totals stay equal; the steps are shuffled.

        complexity     a function of one sample, a tensor, array or sequence of numbers, or an `.npy` file of them
        complexity_file  where a function's results are kept and found again (rank 0 reads and writes it)
        random_level   0: only neighbours in cost meet in a step (best balance) … 1: any samples may (no balance)
        drop_last      True: `len(dataset) % num_replicas` samples, others in each epoch, are left out;
                       False: samples are repeated until the ranks divide them, none more often than it must
        group          the process group that numbers the ranks; by default the default group, or one rank alone

    Without `shuffle` steps run from cheap to costly. It is a `DistributedSampler`, so trainers that add one of their
    own leave it in place; call `set_epoch` before each epoch. Complexity given as a function is a collective call.

    Raises ValueError or TypeError for costs that are not one finite, non-negative number per sample, ValueError for a
    rank or a setting that is impossible.
    """

    def __init__(
        self,
        dataset: Sized,
        complexity: Complexity,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0.0,
        complexity_file: str | os.PathLike[str] | None = None,
        group: Any = None,
    ) -> None:
        ranks = resolve(num_replicas, rank, group)
        Order(np.zeros(0), shuffle, seed, drop_last, random_level)  # refuses bad settings before the dataset is read
        costs = complexities(dataset, complexity, ranks, complexity_file)
        self._begin(Order(costs, shuffle, seed, drop_last, random_level), ranks)
        self.dataset, self.num_replicas, self.rank = dataset, ranks.size, ranks.rank  # type: ignore[assignment]
        self.shuffle, self.seed, self.drop_last = self.order.shuffle, self.order.seed, self.order.drop_last
        self.num_samples = len(costs) // ranks.size if self.drop_last else -(-len(costs) // ranks.size)
        self.total_size = self.num_samples * ranks.size

    def _steps(self, samples: Indices, ranks: int, position: Position) -> list[Step]:
        order, rng = self.order, self.order.generator(position)
        mixed = rng.permutation(samples) if order.shuffle else samples
        count = len(mixed) // ranks * ranks if order.drop_last else -(-len(mixed) // ranks) * ranks
        sorted_ = standing(np.resize(mixed, count), order.costs, order.random_level, rng)
        groups = deal(sorted_.reshape(-1, ranks), order.costs, rng if order.shuffle else None)
        groups = np.roll(groups, position.epoch, axis=1)  # what was one rank's is the next one's in the next epoch
        if order.shuffle:
            groups = rng.permutation(groups)
        return groups[:, :, None]  # type: ignore[return-value]

    def _item(self, batch: Indices) -> int:
        return int(batch[0])


class LoadBalancedBatchSampler(Resumable[list[int]], Sampler[list[int]]):
    """One batch per rank and step, of nearly equal cost: for `DataLoader(batch_sampler=…)`.

    A batch holds at most `batch_size` samples and at most `budget` of cost (tokens, where complexity counts tokens):
    the sum of its samples' costs or, with `padded`, its length times its costliest sample's. Give either or both.
    In every step each rank has at least one sample, and their numbers differ by at most one.

        random_level   0: samples of a step are neighbours in cost (no padding, best balance) … 1: any may meet
        drop_last      True: all ranks have equally many samples in every step, and with `batch_size` alone every
                       batch is full; the `len(dataset) % num_replicas` samples (`% (num_replicas * batch_size)` with
                       `batch_size` alone) that this takes, others in each epoch, are left out
                       False: no sample is left out, and fewer than `num_replicas` samples, all of one step, are
                       repeated, and only if some rank would have none in it

    The number of steps, `len(sampler)`, is equal on all ranks and may differ from epoch to epoch when there is a
    budget. Other arguments are as in `LoadBalancedSampler`. Trainers that insert samplers of their own must be told not
    to (Lightning: `Trainer(use_distributed_sampler=False)`); Lightning finds `set_epoch` by itself.

    Raises as `LoadBalancedSampler`, and ValueError without `batch_size` and `budget`, or where one sample exceeds the
    budget.
    """

    def __init__(
        self,
        dataset: Sized,
        complexity: Complexity,
        budget: float | None = None,
        batch_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        random_level: float = 0.0,
        padded: bool = False,
        complexity_file: str | os.PathLike[str] | None = None,
        group: Any = None,
    ) -> None:
        ranks = resolve(num_replicas, rank, group)
        Order(np.zeros(0), shuffle, seed, drop_last, random_level)
        self.limit = _limit(budget, batch_size, padded)
        costs = complexities(dataset, complexity, ranks, complexity_file)
        if budget is not None and len(costs) and costs.max() > budget:
            worst = int(costs.argmax())
            raise ValueError(f"sample {worst} alone costs {costs[worst]:g} and the budget is {budget:g}; raise budget")
        self._begin(Order(costs, shuffle, seed, drop_last, random_level), ranks)
        self.num_replicas, self.rank, self.drop_last = ranks.size, ranks.rank, self.order.drop_last

    @property
    def sampler(self) -> LoadBalancedBatchSampler:
        """Itself: trainers call `set_epoch` on what they find here."""
        return self

    def _signature(self) -> dict[str, Any]:
        limit = self.limit
        return {
            **super()._signature(),
            "budget": limit.budget,
            "batch_size": limit.batch_size,
            "padded": limit.padded,
        }

    def _steps(self, samples: Indices, ranks: int, position: Position) -> list[Step]:
        order, rng = self.order, self.order.generator(position)
        mixed = rng.permutation(samples) if order.shuffle else samples
        if order.drop_last:
            whole = ranks * (self.limit.batch_size or 1) if self.limit.budget is None else ranks
            mixed = mixed[: len(mixed) // whole * whole]
        steps = cut(standing(mixed, order.costs, order.random_level, rng), order.costs, ranks, self.limit)[::-1]
        return self._assigned(steps, ranks, position, rng)

    def _assigned(self, steps: list[Step], ranks: int, position: Position, rng: np.random.Generator) -> list[Step]:
        """The batches of each step given to ranks so that their totals stay equal, and the steps shuffled."""
        costs = np.array([[self.limit.cost(b, self.order.costs) for b in step] for step in steps]).reshape(-1, ranks)
        cells = np.arange(costs.size).reshape(costs.shape)
        cells = deal(cells, costs.reshape(-1), rng if self.order.shuffle else None)
        cells = np.roll(cells, position.epoch, axis=1)
        if self.order.shuffle:
            cells = rng.permutation(cells)
        return [[steps[cell // ranks][cell % ranks] for cell in row] for row in cells]

    def _item(self, batch: Indices) -> list[int]:
        return [int(i) for i in batch]


def _limit(budget: float | None, batch_size: int | None, padded: bool) -> Limit:
    if budget is None and batch_size is None:
        raise ValueError(
            "budget and batch_size are None; give budget= (cost per batch), batch_size= (samples per batch), or both"
        )
    most = None if budget is None else real("budget", budget, above=0)
    return Limit(most, None if batch_size is None else whole("batch_size", batch_size, 1), truth("padded", padded))
