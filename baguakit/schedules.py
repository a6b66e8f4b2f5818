"""When a rule acts, and where: values of `every=`, `start=` and `stop=` that are not numbers, and of `where=`."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from .arguments import Declared, Natural, Positive, checked
from .comm import Comm


class Interval(Protocol):
    """An object that tells in each step of training whether to exchange: a value of `every=`.

    All ranks must make the same number of exchanges, because an exchange waits for the last rank. So `due` must return
    the same on all ranks, or return True equally often. To combine measurements of all ranks without waiting, launch a
    flight in one step and read its result in a later step (`bk.primitives.launch`, with a separate group).
    `att.state_dict()` does not contain the object: the user saves the data that a resumed training needs.
    """

    def due(self, step: int, comm: Comm) -> bool:
        """Return True to exchange in this step.

        It is called once in each step in which the rule acts and nothing is in flight. `comm.round` counts exchanges.
        """
        ...


@dataclass(frozen=True)
class BySpeed(Declared):
    """As many steps as a rank makes while the fastest makes `most`: a value of `every=` in `free_running`.

        H_r ← max(1, ⌊most · v_r / max_j v_j⌋)

    v_r are the steps per second of rank r since it last contributed, exchanged in each agreement. At first all take
    `most` steps. The learning rate is not corrected. `algorithms.decoupled_diloco` names the paper (DyLU).
    """

    most: Positive


Every = int | Callable[[int], int] | Interval | BySpeed
Bound = Natural | Callable[[int], bool]


@dataclass(frozen=True)
class Fragment(Declared):
    """Part `k` of the parameters, divided into `of` parts of similar size: a value of `where=`.

    Parameters of one module stay together. Modules are assigned in the order of decreasing size, each to the part that
    is smallest so far, so that modules of equal sizes (the layers of a transformer) go to the parts in turn. Raises a
    ValueError if `k` is not 0 to `of` − 1.
    """

    k: Natural
    of: Positive

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k >= self.of:
            raise ValueError(f"k is one of the parts, 0 to {self.of - 1} for of={self.of}, not {self.k}")

    @checked
    def choose(self, named: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the parameters in this part."""
        sizes: Counter[str] = Counter()
        for name, p in named.items():
            sizes[name.rpartition(".")[0]] += p.nbytes
        filled, part_of = [0] * self.of, {}
        for module, size in sizes.most_common():
            part_of[module] = filled.index(min(filled))
            filled[part_of[module]] += size
        return {name for name in named if part_of[name.rpartition(".")[0]] == self.k}


Where = Callable[[str, Tensor], bool] | Fragment
