"""Fragments: the parameters of a model in parts of similar size."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from .arguments import check_fields, checked, integer


@dataclass(frozen=True)
class Fragment:
    """Part `k` of the parameters, divided into `of` parts of similar size: a value of `where=`.

    Parameters of one module stay together. Modules are assigned in the order of decreasing size, each to the smallest
    part so far: modules of equal size, such as the layers of a transformer, are assigned in turn.

    Args:
        k: the number of the part, 0 to `of` − 1.
        of: the number of parts.

    Raises:
        ValueError: `k` is not 0 to `of` − 1.
    """

    k: int
    of: int

    def __post_init__(self) -> None:
        check_fields(self)
        if integer("k", self.k, 0) >= integer("of", self.of, 1):
            raise ValueError(f"k is one of the parts, 0 to {self.of - 1} for of={self.of}, not {self.k}")

    @checked
    def choose(self, named: Mapping[str, Tensor]) -> set[str]:
        """Return the names of the parameters in this part."""
        modules: dict[str, list[str]] = {}
        for name in named:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        sizes = {module: sum(named[name].nbytes for name in names) for module, names in modules.items()}
        filled, parts = [0] * self.of, [set[str]() for _ in range(self.of)]
        for module in sorted(modules, key=lambda module: -sizes[module]):
            at = filled.index(min(filled))
            filled[at] += sizes[module]
            parts[at].update(modules[module])
        return parts[self.k]
