"""Samplers for samples of unequal cost: in every step all ranks get nearly equal work."""

from __future__ import annotations

import os
from collections.abc import Sized
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ..arguments import integer, real, truth
from .complexity import Complexity, complexities
from .following import Followed
from .plan import Batches, Indices, Limit, all_steps, assign, by_cost
from .resuming import Membership, Order, membership
from .sharing import Stretch


class LoadBalancedSampler(Followed[int], DistributedSampler[int]):
    """A sampler that draws one sample per rank and step, of nearly equal cost.

    Samples are sorted by cost and divided into groups of one sample per rank; each group is one step. Within a group
    the samples are assigned such that the total costs of the ranks stay nearly equal. `seed` and the epoch decide the
    order. Call `set_epoch` before each epoch.

    It is a `DistributedSampler`, so trainers that would add one keep it. If `complexity` is a function, construction
    is a collective call.

    Args:
        dataset: the samples; it has a length.
        complexity: the cost of each sample: a function of one sample, a tensor, array or sequence of numbers, or the
            path of an `.npy` file of them.
        num_replicas: the number of ranks; None for those of `group`.
        rank: this process's rank; None for that in `group`.
        shuffle: shuffle the steps; False: steps run from cheap to expensive.
        seed: the seed of the order, equal on all ranks.
        drop_last: leave out `len(dataset) % num_replicas` samples, different ones in each epoch; False: repeat as few
            samples as possible until `num_replicas` divides their number.
        random_level: from 0, only samples of similar cost share a step (best balance), to 1, any samples do (no
            balance).
        complexity_file: a file that keeps the results of a function for the next run; rank 0 reads and writes it.
        group: the process group of the ranks, or a `bk.Comm`, also one of `bk.elastic.join` (see `follow`); None for
            the default group, or one rank without one.

    Raises:
        TypeError, ValueError: the costs are not one finite, non-negative number per sample.
        ValueError: a rank or a setting is impossible.
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
        ranks = membership(num_replicas, rank, group)
        Order(np.zeros(0), shuffle, seed, drop_last, random_level)  # raises for bad settings before the dataset is read
        costs = complexities(dataset, complexity, ranks, complexity_file)
        self._begin(Order(costs, shuffle, seed, drop_last, random_level), ranks)
        self.dataset = dataset  # type: ignore[assignment]
        self.shuffle, self.seed, self.drop_last = self.order.shuffle, self.order.seed, self.order.drop_last

    def _sit(self, ranks: Membership) -> None:
        super()._sit(ranks)
        n = len(self.order.costs)
        self.num_samples = n // ranks.size if self.order.drop_last else -(-n // ranks.size)
        self.total_size = self.num_samples * ranks.size

    def _steps(self, samples: Indices, ranks: int, stretch: Stretch) -> list[Batches]:
        order, rng = self.order, self.order.generator(stretch)
        mixed = rng.permutation(samples) if order.shuffle else samples
        count = len(mixed) // ranks * ranks if order.drop_last else -(-len(mixed) // ranks) * ranks
        sorted_ = by_cost(np.resize(mixed, count), order.costs, order.random_level, rng)
        groups = assign(sorted_.reshape(-1, ranks), order.costs, rng if order.shuffle else None)
        groups = np.roll(groups, stretch.epoch, axis=1)  # each epoch moves a rank's samples to the next rank
        if order.shuffle:
            groups = rng.permutation(groups)
        return groups[:, :, None]  # type: ignore[return-value]

    def _item(self, batch: Indices) -> int:
        return int(batch[0])


class LoadBalancedBatchSampler(Followed[list[int]], Sampler[list[int]]):
    """A sampler that draws one batch per rank and step, of nearly equal cost, for `DataLoader(batch_sampler=…)`.

    In every step each rank has at least one sample, and the lengths of the batches differ by at most one. The number
    of steps, `len(sampler)`, is equal on all ranks; with a budget it may differ between epochs.

    Disable samplers that a trainer inserts (Lightning: `Trainer(use_distributed_sampler=False)`). Lightning calls
    `set_epoch` by itself.

    Args:
        budget: the largest cost of a batch, such as a number of tokens; None for no limit.
        batch_size: the largest number of samples of a batch; None for no limit. `budget` or `batch_size` is required.
        random_level: from 0, samples of a step have similar cost (least padding, best balance), to 1, any samples
            share a step.
        drop_last: give all ranks equally many samples in every step, and with `batch_size` alone full batches: this
            leaves out `len(dataset) % num_replicas` samples (`% (num_replicas * batch_size)` with `batch_size` alone),
            different ones in each epoch. False: leave out none; if a rank has no sample in the last step, repeat
            samples of it, fewer than `num_replicas`.
        padded: count the cost of a batch as its length times its largest cost; False: as the sum of its costs.

    All other arguments are as in `LoadBalancedSampler`.

    Raises:
        TypeError, ValueError: as `LoadBalancedSampler`.
        ValueError: neither `batch_size` nor `budget` is given, or one sample exceeds the budget.
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
        ranks = membership(num_replicas, rank, group)
        Order(np.zeros(0), shuffle, seed, drop_last, random_level)
        self.limit = _limit(budget, batch_size, padded)
        costs = complexities(dataset, complexity, ranks, complexity_file)
        if budget is not None and len(costs) and costs.max() > budget:
            worst = int(costs.argmax())
            raise ValueError(f"sample {worst} alone costs {costs[worst]:g} and the budget is {budget:g}; raise budget")
        self._begin(Order(costs, shuffle, seed, drop_last, random_level), ranks)
        self.drop_last = self.order.drop_last

    @property
    def sampler(self) -> LoadBalancedBatchSampler:
        """This sampler: trainers call `sampler.set_epoch`."""
        return self

    def _signature(self) -> dict[str, Any]:
        limit = self.limit
        return {
            **super()._signature(),
            "budget": limit.budget,
            "batch_size": limit.batch_size,
            "padded": limit.padded,
        }

    def _steps(self, samples: Indices, ranks: int, stretch: Stretch) -> list[Batches]:
        order, rng = self.order, self.order.generator(stretch)
        mixed = rng.permutation(samples) if order.shuffle else samples
        if order.drop_last:
            multiple = ranks * (self.limit.batch_size or 1) if self.limit.budget is None else ranks
            mixed = mixed[: len(mixed) // multiple * multiple]
        steps = all_steps(by_cost(mixed, order.costs, order.random_level, rng), order.costs, ranks, self.limit)[::-1]
        return self._assigned(steps, ranks, stretch, rng)

    def _assigned(self, steps: list[Batches], ranks: int, stretch: Stretch, rng: np.random.Generator) -> list[Batches]:
        """Assign the batches of each step such that the ranks' totals stay nearly equal, and shuffle the steps."""
        costs = np.array([[self.limit.cost(b, self.order.costs) for b in step] for step in steps]).reshape(-1, ranks)
        cells = np.arange(costs.size).reshape(costs.shape)
        cells = assign(cells, costs.reshape(-1), rng if self.order.shuffle else None)
        cells = np.roll(cells, stretch.epoch, axis=1)
        if self.order.shuffle:
            cells = rng.permutation(cells)
        return [[steps[cell // ranks][cell % ranks] for cell in row] for row in cells]

    def _item(self, batch: Indices) -> list[int]:
        return [int(i) for i in batch]


def _limit(budget: float | None, batch_size: int | None, padded: bool) -> Limit:
    if budget is None and batch_size is None:
        raise ValueError(
            "budget and batch_size are None; pass budget= (cost per batch), batch_size= (samples per batch), or both"
        )
    most = None if budget is None else real("budget", budget, above=0)
    return Limit(most, None if batch_size is None else integer("batch_size", batch_size, 1), truth("padded", padded))
