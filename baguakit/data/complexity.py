"""The costs of samples, given as numbers or measured by all ranks of a group, and this process's place in the group."""

import logging
from collections.abc import Callable, Sequence, Sized
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ..arguments import describe, integer
from ..comm import Comm, on_all
from .plan import Costs

Complexity = Callable[[Any], float] | torch.Tensor | npt.NDArray[Any] | Sequence[float]

log = logging.getLogger("baguakit")


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
    size = here[1] if num_replicas is None else integer("num_replicas", num_replicas, 1, 1 << 20)
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
    if not callable(complexity):
        return _checked(complexity, n)
    if not known:
        raise ValueError(
            "complexity is a function, and rank and num_replicas are not those of the process group, so the processes"
            " that divide the pass over the dataset are unknown; pass group=, or the costs as numbers"
        )
    if comm is not None and comm.membership.changes:
        raise ValueError(
            "complexity is a function, and ranks that join later cannot measure the dataset with the others; measure "
            "it before, and pass the costs as numbers"
        )
    rank, size = (0, 1) if comm is None else (comm.rank, comm.size)
    if rank == 0:
        log.warning("measuring the complexity of %d samples on %d ranks", n, size)
    doing = "determine the complexity of the dataset"
    mine = on_all(comm, lambda: [_cost(complexity, dataset, i) for i in range(rank, n, size)], doing)
    costs = np.empty(n)
    for r, share in enumerate([mine] if comm is None else comm.gather_objects(mine)):
        costs[r::size] = share
    return _checked(costs, n)


def _checked(values: Any, n: int) -> Costs:
    try:
        array = values.detach().cpu().double().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
        if array.dtype.kind not in "biufO":
            raise TypeError(f"dtype {array.dtype}")
        costs = np.array(array, dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # torch raises RuntimeError
        raise TypeError(f"complexity holds {type(values).__name__}, not one number per sample ({error})") from None
    if costs.shape != (n,):
        found = f"complexity has shape {costs.shape} and the dataset {n} samples"
        raise ValueError(f"{found}; pass one number per sample, not {describe(values)}")
    wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if wrong.size:
        raise ValueError(f"complexity of sample {wrong[0]} is {costs[wrong[0]]}; a cost is finite and not negative")
    return costs


def _cost(function: Callable[[Any], float], dataset: Any, i: int) -> float:
    sample = dataset[i]
    try:
        return float(function(sample))
    except Exception as error:
        raised = f"{type(error).__name__}: {error}"
        raise ValueError(f"complexity={describe(function)} of sample {i} raised {raised}") from error
