"""Samplers for samples of unequal cost: in every step all ranks get nearly equal work.

The cost of each sample is given as a number, read from a file, or measured by all ranks together.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence, Sized
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ..arguments import describe, integer, message, real, truth
from ..comm import Comm
from ..comm.groups import on_all
from .following import Followed
from .plan import Batches, Costs, Indices, Limit, all_steps, by_cost

Complexity = Callable[[Any], float] | torch.Tensor | npt.NDArray[Any] | Sequence[float] | str | os.PathLike[str]

log = logging.getLogger("baguakit")


class LoadBalancedSampler(Followed[int], DistributedSampler[int]):
    """A sampler that draws one sample per rank and step; the samples of a step have nearly equal cost.

    Samples are sorted by cost and divided into groups of one sample per rank; each group is one step. Within a group
    the samples are assigned such that the total costs of the ranks stay nearly equal. `seed` and the epoch determine
    the order. Call `set_epoch` before each epoch.

    It is a `DistributedSampler`, so trainers do not replace it. If `complexity` is a function, construction is a
    collective call: all ranks share the calls of this function.

    Args:
        dataset: the samples; it has a length.
        complexity: a function that returns the cost of a sample; or the costs of all samples, as a tensor, an array, a
            sequence of numbers, or the path of an `.npy` file of numbers.
        num_replicas, rank: the number of ranks, and this process's rank; None for those of `group`.
        shuffle: shuffle the steps; False: steps run from cheap to expensive.
        seed: the seed of the order, equal on all ranks.
        drop_last: leave out `len(dataset) % num_replicas` samples (with `shuffle`, other samples in each epoch); False:
            repeat as few samples as possible, so that all ranks draw equally many.
        random_level: from 0 (only samples of similar cost share a step: best balance) to 1 (any samples share a step:
            no balance).
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
        place, measure = membership(num_replicas, rank, group), partial(complexities, dataset, complexity)
        self._begin(place, measure, shuffle, seed, drop_last, random_level)
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

    Disable samplers that a trainer inserts (Lightning: `Trainer(use_distributed_sampler=False)`). Lightning calls
    `set_epoch` by itself.

    Args:
        budget: the largest cost of a batch, such as a number of tokens; None for no limit.
        batch_size: the largest number of samples of a batch; None for no limit. `budget` or `batch_size` is required.
        random_level: from 0 (samples of a step have similar cost: least padding, best balance) to 1 (any samples share
            a step).
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
        place, measure = membership(num_replicas, rank, group), partial(complexities, dataset, complexity)
        self._begin(place, measure, shuffle, seed, drop_last, random_level)
        if budget is not None and (most := self.costs.max(initial=0)) > budget:
            worst = self.costs.argmax()
            raise ValueError(f"sample {worst} alone costs {most:g} and the budget is {budget:g}; raise budget")

    @property
    def sampler(self) -> LoadBalancedBatchSampler:
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


# Costs


def membership(num_replicas: int | None, rank: int | None, group: Any) -> tuple[int, int, Comm | None, bool]:
    """Return (rank, number of ranks, comm, known). None means the group's value, or without a group, 0 or 1.

    `comm` is None without a group, and for a group that always has one rank. In any other group, if `rank` or
    `num_replicas` differs from the group's, `comm` is None and `known` is False: the ranks' processes are unknown.
    """
    try:
        comm = group if isinstance(group, Comm) else Comm(group)
    except RuntimeError:  # torch.distributed is not initialised
        comm = None
    here = (0, 1) if comm is None else (comm.rank, comm.size)
    mine = here[0] if rank is None else integer("rank", rank, 0)
    size = here[1] if num_replicas is None else integer("num_replicas", num_replicas, 1)
    if size > 1 << 20:  # a list of more ranks would be too long
        raise ValueError(message("num_replicas", "a number of ranks, at most 1048576", size))
    if mine >= size:
        raise ValueError(f"there is no rank {mine} of {size} ranks; rank runs from 0 to num_replicas - 1")
    same = (mine, size) == here
    alone = comm is None or (comm.size == 1 and not comm.membership.changes)
    return mine, size, comm if same and not alone else None, same or alone


def complexities(dataset: Sized, complexity: Complexity, comm: Comm | None, known: bool) -> Costs:
    """Return the cost of each sample, (len(dataset),). If `complexity` is a function, the ranks share its calls."""
    if not isinstance(dataset, Sized):
        raise TypeError(f"dataset is one that has a length, not {type(dataset).__name__}; pass one with __len__")
    n = len(dataset)
    if isinstance(complexity, (str, os.PathLike)):
        return _checked(_load(Path(complexity)), n, f"the complexity file {os.fspath(complexity)!r}")
    if not callable(complexity):
        return _checked(complexity, n, "complexity")
    if not known:
        raise ValueError(
            "complexity is a function, and rank and num_replicas are not those of the process group, so the processes"
            " that divide the pass over the dataset are unknown; pass group=, or the costs as numbers or as a file"
        )
    if comm is not None and comm.membership.changes:
        raise ValueError(
            "complexity is a function, and ranks that join later cannot measure the dataset with the others; measure "
            "it before, and pass the costs as numbers or as a file"
        )
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    if rank == 0:
        log.warning("measuring the complexity of %d samples on %d ranks", n, size)
    doing = "determine the complexity of the dataset"
    mine = on_all(comm, lambda: [_cost(complexity, dataset, i) for i in range(rank, n, size)], doing)
    costs = np.empty(n)
    for r, share in enumerate([mine] if comm is None else comm.gather_objects(mine)):
        costs[r::size] = share
    return _checked(costs, n, "complexity")


def _checked(values: Any, n: int, what: str) -> Costs:
    try:
        array = values.detach().cpu().double().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        if array.dtype.kind not in "biufO":
            raise TypeError(f"dtype {array.dtype}")
        costs = np.array(array, dtype=np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # torch raises RuntimeError
        raise TypeError(f"{what} holds {type(values).__name__}, not one number per sample ({error})") from None
    if costs.shape != (n,):
        found = f"{what} has shape {costs.shape} and the dataset {n} samples"
        raise ValueError(f"{found}; pass one number per sample, not {describe(values)}")
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if wrong.size:
        raise ValueError(f"{what} of sample {wrong[0]} is {costs[wrong[0]]}; a cost is finite and not negative")
    return costs


def _load(path: Path) -> npt.NDArray[Any]:
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(f"the complexity file {str(path)!r} does not exist; write one with numpy.save") from None
    except (ValueError, EOFError, IsADirectoryError) as error:
        raise ValueError(f"the complexity file {str(path)!r} is not an .npy array of numbers ({error})") from None


def _cost(function: Callable[[Any], float], dataset: Any, i: int) -> float:
    sample = dataset[i]
    try:
        return float(function(sample))
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        raise ValueError(f"complexity={describe(function)} of sample {i} raised {raised}") from error
