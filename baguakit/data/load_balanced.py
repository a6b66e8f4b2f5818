"""Samplers for samples of unequal cost: in every step all ranks get nearly equal work.

The cost of each sample is given as a number, or measured by all ranks together.
"""

from collections.abc import Sized
from dataclasses import asdict
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ..arguments import integer, real, truth
from .complexity import Complexity
from .following import Followed
from .plan import Batches, Indices, Limit, all_steps, by_cost


class LoadBalancedSampler(Followed[int], DistributedSampler[int]):
    """A sampler that draws one sample per rank and step; the samples of a step have nearly equal cost.

    Samples are sorted by cost and divided into groups of one sample per rank; each group is one step. Within a group
    the samples are assigned such that the total costs of the ranks stay nearly equal. `seed` and the epoch determine
    the order. Call `set_epoch` before each epoch.

    It is a `DistributedSampler`, so trainers do not replace it. If `complexity` is a function, construction is a
    collective call: all ranks share the calls of this function.

    Args:
        dataset: the samples; it has a length.
        complexity: a function that returns the cost of a sample; or all costs, as a tensor, array or sequence.
        num_replicas, rank: the number of ranks, and this process's rank; None for those of `group`.
        shuffle: shuffle the steps; False: steps run from cheap to expensive.
        seed: the seed of the order, equal on all ranks.
        drop_last: leave out `len(dataset) % num_replicas` samples (with `shuffle`, other samples in each epoch); False:
            repeat as few samples as possible, so that all ranks draw equally many.
        random_level: from 0 (samples of similar cost share a step: best balance) to 1 (any samples do: no balance).
        group: the process group of the ranks, or a `bk.Comm`, for example from `bk.elastic.join` (see `follow`). None
            for the default group, or for a single rank if there is no default group.

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
        group: Any = None,
    ) -> None:
        self._begin(dataset, complexity, (num_replicas, rank, group), shuffle, seed, drop_last, random_level)
        self.dataset = dataset  # type: ignore[assignment]

    def _steps(self, samples: Indices, ranks: int, rng: np.random.Generator, epoch: int) -> list[Batches]:
        count = len(samples) // ranks * ranks if self.drop_last else -(-len(samples) // ranks) * ranks
        sorted_ = by_cost(np.resize(samples, count), self.costs, self.random_level, rng)
        return sorted_[self._assigned(self.costs[sorted_], ranks, rng, epoch)][:, :, None]  # type: ignore[return-value]

    def _item(self, batch: Indices) -> int:
        return int(batch[0])


class LoadBalancedBatchSampler(Followed[list[int]], Sampler[list[int]]):
    """A sampler of batches for `DataLoader(batch_sampler=…)`: in each step, all ranks get batches of nearly equal cost.

    In every step each rank has at least one sample, and the lengths of the batches differ by at most one. The number
    of steps, `len(sampler)`, is equal on all ranks; with a budget it may differ between epochs.

    Disable samplers of trainers (Lightning, which calls `set_epoch`: `Trainer(use_distributed_sampler=False)`).

    Args:
        budget: the largest cost of a batch, such as a number of tokens; None for no limit.
        batch_size: the largest number of samples of a batch; None for no limit. `budget` or `batch_size` is required.
        random_level: from 0 (samples of a step have similar cost: least padding, best balance) to 1 (any samples).
        drop_last: give all ranks the same number of samples in every step; with `batch_size` alone, make all batches
            full. This leaves out `len(dataset) % num_replicas` samples (with `batch_size` alone,
            `% (num_replicas * batch_size)`); with `shuffle`, other samples in each epoch. False: leave out none; if the
            last step has fewer samples than ranks, repeat fewer than `num_replicas` samples.
        padded: a batch costs its length times the largest cost of its samples; False: the sum of their costs.

    All other arguments are as in `LoadBalancedSampler`.

    Raises:
        TypeError, ValueError: as in `LoadBalancedSampler`.
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
        group: Any = None,
    ) -> None:
        if budget is None and batch_size is None:
            raise ValueError("budget and batch_size are None; pass budget= (cost of a batch), batch_size=, or both")
        budget = None if budget is None else real("budget", budget, above=0)
        many = None if batch_size is None else integer("batch_size", batch_size, 1)
        self.limit = Limit(budget, many, truth("padded", padded))
        self._begin(dataset, complexity, (num_replicas, rank, group), shuffle, seed, drop_last, random_level)
        if budget is not None and (most := self.costs.max(initial=0)) > budget:
            worst = self.costs.argmax()
            raise ValueError(f"sample {worst} alone costs {most:g} and the budget is {budget:g}; raise budget")

    @property
    def sampler(self) -> "LoadBalancedBatchSampler":
        """Return this sampler itself, because trainers call `batch_sampler.sampler.set_epoch`."""
        return self

    def _signature(self) -> dict[str, Any]:
        return super()._signature() | asdict(self.limit)

    def _steps(self, samples: Indices, ranks: int, rng: np.random.Generator, epoch: int) -> list[Batches]:
        limit, costs = self.limit, self.costs
        if self.drop_last:
            multiple = ranks * (limit.batch_size or 1) if limit.budget is None else ranks
            samples = samples[: len(samples) // multiple * multiple]
        steps = all_steps(by_cost(samples, costs, self.random_level, rng), costs, ranks, limit)[::-1]
        work = np.array([limit.cost(batch, costs) for step in steps for batch in step])
        cells = self._assigned(work, ranks, rng, epoch)
        return [[steps[cell // ranks][cell % ranks] for cell in row] for row in cells]

    def _item(self, batch: Indices) -> list[int]:
        return [int(i) for i in batch]
